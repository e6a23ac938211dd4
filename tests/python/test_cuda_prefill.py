"""Prompts of several chunks through msa_attention on the GPU, where a chunk is merged while the next is scored: the bits of index_select
followed by sparse_attention, which do one after the other."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import openmsa  # noqa: E402
from cuda_support import make, needs_gpu  # noqa: E402
from openmsa import MsaConfig  # noqa: E402

pytestmark = needs_gpu

# (queries, keys): a chunk is 16,384 tokens. Whole chunks, a last one of one token, a cached prefix, sequences that chunks cut.
LENGTHS = {
    "one prompt": ([40000], [40000]),
    "whole chunks": ([32768], [32768]),
    "one token more": ([16385], [16385]),
    "prefix": ([20000], [100000]),
    "ragged": ([9000, 3, 20000, 0, 12000], [9000, 500, 61000, 70, 12000]),
}
CONFIGS = {
    "G 16": {},
    "G 16, block 64": dict(block_size=64, top_k=8),
    "G 3, D 64": dict(num_q_heads=6, num_kv_heads=2, head_dim=64, index_dim=96),
}


def inputs(case, changes, paged, clustered, dtype=torch.bfloat16):
    config = MsaConfig(**{**dict(num_q_heads=16, num_kv_heads=1, head_dim=128, index_dim=128), **changes})
    q, k, v, q_idx, k_idx, batch = make(*LENGTHS[case], config, dtype=dtype, paged=paged)
    if clustered:  # runs of 96 tokens choose alike, so no merge has much to do
        q_idx = q_idx[torch.arange(q_idx.shape[0], device="cuda") // 96 * 96].contiguous()
    return q, k, v, q_idx, k_idx, batch, config


def assert_equals_two_steps(q, k, v, q_idx, k_idx, batch, config, found):
    ids = openmsa.index_select(q_idx, k_idx, batch, config)
    want = *openmsa.sparse_attention(q, k, v, ids, batch, config, return_lse=True), ids
    for name, a, b in zip(("out", "lse", "block_ids"), found, want, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("case, clustered", [*((case, False) for case in LENGTHS), ("one prompt", True), ("ragged", True)])
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_equals_the_two_steps(case, paged, clustered):
    x = inputs(case, {}, paged, clustered)
    found = openmsa.msa_attention(*x, return_lse=True, return_block_ids=True)
    assert_equals_two_steps(*x, found)
    assert torch.equal(openmsa.msa_attention(*x), found[0]), "without lse and block_ids"


@pytest.mark.parametrize("changes", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_other_shapes_equal_the_two_steps(changes, dtype):
    x = inputs("ragged", CONFIGS[changes], True, False, dtype)
    assert_equals_two_steps(*x, openmsa.msa_attention(*x, return_lse=True, return_block_ids=True))


def test_a_graph_replays_with_other_queries():
    q, k, v, q_idx, k_idx, batch, config = inputs("one prompt", {}, False, True)
    x = (q, k, v, q_idx, k_idx, batch, config)
    openmsa.msa_attention(*x)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        found = openmsa.msa_attention(*x, return_lse=True, return_block_ids=True)
    for seed in (1, 2):  # now lists are scattered, and merges have everything to do
        gen = torch.Generator("cuda").manual_seed(seed)
        for tensor in (q, q_idx):
            tensor.normal_(generator=gen)
        graph.replay()
        torch.cuda.synchronize()
        assert_equals_two_steps(*x, found)


def test_runs_on_other_streams_at_once():
    x = [inputs("one prompt", {}, False, clustered) for clustered in (False, True)]
    streams = [torch.cuda.Stream() for _ in x]
    torch.cuda.synchronize()
    found = []
    for args, stream in zip(x * 2, streams * 2, strict=True):
        with torch.cuda.stream(stream):
            found.append(openmsa.msa_attention(*args, return_lse=True, return_block_ids=True))
    torch.cuda.synchronize()
    for args, result in zip(x * 2, found, strict=True):
        assert_equals_two_steps(*args, result)
