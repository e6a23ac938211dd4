"""One MSA layer from PyTorch: a prompt of 4,096 tokens, then decoding over a paged cache, each held against what it must equal."""

import openmsa
import torch

torch.manual_seed(0)
# 8 query heads in 2 GQA groups; each query token keeps 8 of the 32 blocks of 128 tokens, separately per group.
config = openmsa.MsaConfig(num_q_heads=8, num_kv_heads=2, head_dim=64, index_dim=64, block_size=128, top_k=8)
num_tokens = 4096

# 1. The whole pipeline in one call. These are what a model's projections give, token-major: [tokens, heads, width].
q = torch.randn(num_tokens, config.num_q_heads, config.head_dim)
k = torch.randn(num_tokens, config.num_kv_heads, config.head_dim)
v = torch.randn(num_tokens, config.num_kv_heads, config.head_dim)
q_idx = torch.randn(num_tokens, config.num_kv_heads, config.index_dim)  # one index query per token and group
k_idx = torch.randn(num_tokens, config.index_dim)                       # one index key per token, shared by all groups
out, lse, block_ids = openmsa.msa_attention(q, k, v, q_idx, k_idx, config=config, return_lse=True, return_block_ids=True)
print(f"out {list(out.shape)}, lse {list(lse.shape)}, block_ids {list(block_ids.shape)}")
print("the last token's group 0 chose blocks", block_ids[-1, 0].tolist())

# 2. The same, one step at a time. A Batch says where each sequence's tokens lie; here it is a single sequence.
batch = openmsa.Batch.single(num_tokens)
scores = openmsa.block_scores(q_idx, k_idx, batch, config)  # [tokens, groups, blocks], -inf where nothing is visible
assert torch.equal(openmsa.select_blocks(scores, batch, config), block_ids)
assert torch.equal(openmsa.sparse_attention(q, k, v, block_ids, batch, config), out)

# 3. With as many blocks as there are, nothing is left out: it is dense causal attention.
everything = openmsa.MsaConfig(num_q_heads=8, num_kv_heads=2, head_dim=64, index_dim=64, block_size=128, top_k=32)
complete = openmsa.msa_attention(q, k, v, q_idx, k_idx, config=everything)
dense = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), is_causal=True, enable_gqa=True)
print(f"all blocks against PyTorch's dense attention: largest difference {(complete - dense[0].transpose(0, 1)).abs().max():.1e}")
torch.testing.assert_close(complete, dense[0].transpose(0, 1), atol=1e-5, rtol=1e-5)

# 4. Decoding. The cache holds keys, values and index keys in pages of one block; index keys share the fate of the others.
cache = openmsa.PagedKvCache(config, num_pages=40, dtype=torch.float32)
cache.append("chat", k[:-1], v[:-1], k_idx[:-1])  # the prompt, all but its last token
cache.append("chat", k[-1:], v[-1:], k_idx[-1:])  # one new token
step = cache.batch(["chat"])                      # one query at the end of the sequence
k_pages, v_pages, k_idx_pages = cache.k[0], cache.v[0], cache.k_idx[0]
last = openmsa.msa_attention(q[-1:], k_pages, v_pages, q_idx[-1:], k_idx_pages, step, config)
print(f"decoding step against the prefill's last row: largest difference {(last - out[-1:]).abs().max():.1e}")
torch.testing.assert_close(last, out[-1:], atol=1e-5, rtol=1e-5)

# 5. Mistakes are refused before anything is written, with the argument, the value found, the rule, and how to mend it.
try:
    openmsa.sparse_attention(q[:100], k, v, block_ids, batch, config)
except openmsa.InvalidArgumentError as error:
    print("refused, as it should be:", error)
else:
    raise SystemExit("a wrong batch was accepted")
