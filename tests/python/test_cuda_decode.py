"""The decode step of msa_attention on the GPU: against the oracle, against its two steps, and under hostile index data."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import openmsa  # noqa: E402
from cuda_support import REFERENCE_MODEL, assert_attention, make, needs_gpu, oracle  # noqa: E402
from openmsa import MsaConfig  # noqa: E402

pytestmark = needs_gpu

# (queries, keys, config): blocks 64 and 128, every dim, groups that do not fill a tile, several tokens, ragged batches, sequences
# without queries or keys, k beyond the number of blocks, enough rows for one unit each, and Di != D, which takes two launches.
CASES = {
    "one token": ([1], [300], {}),
    "speculative": ([16], [2500], {}),
    "ragged": ([1, 0, 3, 1], [5, 700, 3000, 0], {}),
    "batch": ([1] * 40, [200 + 37 * i for i in range(40)], dict(top_k=4)),
    "k 32": ([2], [6000], dict(top_k=32, block_size=64)),
    "G 3, D 64": ([1, 2], [900, 40], dict(num_q_heads=6, num_kv_heads=2, head_dim=64, index_dim=64, block_size=64)),
    "G 5, D 96": ([1, 1], [1111, 129], dict(num_q_heads=5, num_kv_heads=1, head_dim=96, index_dim=96, top_k=8)),
    "G 1": ([4], [1000], dict(num_q_heads=4, num_kv_heads=4, top_k=4)),
    "initial blocks": ([2], [4000], dict(num_init_blocks=2, num_local_blocks=3)),
    "Di is not D": ([1, 5], [1500, 700], dict(index_dim=64)),
    "before the first key": ([3], [2], {}),
}


def assert_oracle(out, lse, q, k, v, ids, batch, config):
    reference, reference_lse = oracle(openmsa.sparse_attention, q, k, v, ids, batch=batch, config=config, return_lse=True)
    plain = openmsa.sparse_attention(q.cpu(), k.cpu(), v.cpu(), ids.cpu(), batch.to("cpu"), config).float()
    assert_attention(out, lse, reference, reference_lse, plain)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_equals_the_oracle(case, paged, dtype):
    queries, keys, changes = CASES[case]
    config = MsaConfig(**{**REFERENCE_MODEL, **changes})
    q, k, v, q_idx, k_idx, batch = make(queries, keys, config, dtype=dtype, paged=paged, integers=True)
    q = q * 0.1
    out, lse, ids = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config, return_lse=True, return_block_ids=True)
    # Integer index data has exact scores, so the lists are those of the oracle to the last tie.
    assert torch.equal(ids.cpu(), oracle(openmsa.index_select, q_idx, k_idx, batch=batch, config=config))
    assert_oracle(out, lse, q, k, v, ids, batch, config)
    again = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config, return_lse=True)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("blocks", [1024, 1025, 4096, 20000])
def test_long_rows_select_what_the_two_steps_select(blocks):
    config = MsaConfig(num_q_heads=16, num_kv_heads=1, head_dim=64, index_dim=64, block_size=64)
    q, k, v, q_idx, k_idx, batch = make([2], [blocks * 64 - 17], config)
    out, lse, ids = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config, return_lse=True, return_block_ids=True)
    scores = openmsa.block_scores(q_idx, k_idx, batch, config)
    best = openmsa.select_blocks(scores, batch, config)
    chosen, wanted = (scores.gather(2, x.long()).sort(-1).values for x in (ids, best))
    # A block may only be chosen differently where its score is within a rounding of the k-th best.
    assert (chosen - wanted).abs().max() < 1e-3
    assert_oracle(out, lse, q, k, v, ids, batch, config)


def test_reports_a_bad_page_and_reads_nothing_from_it():
    config = MsaConfig(**REFERENCE_MODEL)
    q, k, v, q_idx, k_idx, batch = make([1], [3000], config, paged=True)
    batch.page_table[0, 5] = 10**6
    openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config)
    with pytest.raises(openmsa.Error, match="page_table"):
        openmsa.synchronize("cuda")


def test_a_graph_follows_changed_lengths_and_pages():
    config = MsaConfig(**REFERENCE_MODEL)
    q, k, v, q_idx, k_idx, batch = make([1, 1], [3000, 2000], config, paged=True)
    openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config)
    for lengths in ((3000, 2000), (129, 1), (2999, 1024)):
        batch.seqlens_k.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config))
