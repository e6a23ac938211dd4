"""A program written for the authors' package `fmha_sm100`, on whatever machine this is: one line is new."""

import openmsa
import torch

openmsa.compat.install()  # the new line; from here on `fmha_sm100` is OpenMSA

from fmha_sm100 import fmha_sm100, fmha_sm100_plan, sparse_topk_select  # noqa: E402

torch.manual_seed(0)
device = "cuda" if any(row.backend == "cuda" and row.available for row in openmsa.list_backends()) else "cpu"
options = {"device": device, "dtype": torch.bfloat16}

# Two requests: a chunk of 200 tokens behind a prefix, and one decoding step. Lengths stay on the host.
qo_lens, kv_lens = torch.tensor([200, 1], dtype=torch.int32), torch.tensor([3000, 5000], dtype=torch.int32)
pages_of = -(-kv_lens // 128)
num_pages = int(pages_of.max())
kv_indices = torch.randperm(int(pages_of.sum()), device=device).int()  # each request's pages in order, one request after the other
k_pages, v_pages = (torch.randn(len(kv_indices), 2, 128, 128, **options) for _ in range(2))  # [pages, Hkv, tokens, D]
proxy_k_pages = torch.randn(len(kv_indices), 1, 128, 128, **options)  # the index keys: one head
q, proxy_q = torch.randn(201, 16, 128, **options), torch.randn(201, 2, 128, **options)

# 1. Block scores: a dense pass of the index heads that computes scores alone.
plan = fmha_sm100_plan(qo_lens, kv_lens, proxy_q.shape[1], num_kv_heads=1, page_size=128, output_maxscore=True)
_, max_score = fmha_sm100(proxy_q, proxy_k_pages, proxy_k_pages, plan, kv_indices=kv_indices, output_o=False, output_maxscore=True)
# 2. The 16 best blocks of each token and head. 3. Attention over them. A plan serves every layer of a step.
ids = sparse_topk_select(max_score.contiguous(), 16, num_valid_pages=num_pages)
plan = fmha_sm100_plan(qo_lens, kv_lens, q.shape[1], num_kv_heads=k_pages.shape[1], page_size=128, kv_block_num=16)
out, _ = fmha_sm100(q, k_pages, v_pages, plan, kv_indices=kv_indices, kv_block_indexes=ids)
print(f"on {device}: max_score {list(max_score.shape)}, ids {list(ids.shape)}, out {list(out.shape)}")

# The same in OpenMSA's own words. Their selection forces no block, hence num_local_blocks=0; the scores are never stored.
table = torch.nn.utils.rnn.pad_sequence(kv_indices.split(pages_of.tolist()), batch_first=True, padding_value=-1)
batch = openmsa.Batch(cu_seqlens_q=torch.tensor([0, 200, 201]).int(), seqlens_k=kv_lens, page_table=table).to(device)
config = openmsa.MsaConfig(num_q_heads=16, num_kv_heads=2, head_dim=128, index_dim=128, num_local_blocks=0)
own, own_ids = openmsa.msa_attention(q, k_pages, v_pages, proxy_q, proxy_k_pages[:, 0], batch, config, return_block_ids=True)
assert torch.equal(own_ids, ids)
torch.testing.assert_close(own, out)
print("openmsa.msa_attention chose the same blocks and gave the same result")
