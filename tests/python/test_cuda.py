"""The Hopper backend against the fp64 oracle (small) and the CPU engine (large). Skipped, with the reason, without a usable GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import openmsa  # noqa: E402
from cuda_support import (  # noqa: E402
    REFERENCE_MODEL,
    SMALL,
    assert_attention,
    assert_selection,
    make,
    needs_gpu,
    oracle,
)
from openmsa import Batch, MsaConfig  # noqa: E402

pytestmark = needs_gpu

LAYOUTS = {
    "one token": ([1], [1]),
    "edges of a block": ([127, 128, 129], [127, 128, 129]),
    "documents": ([127, 129, 1, 2, 3, 5, 128], [127, 129, 1, 2, 3, 5, 128]),
    "empty sequences": ([0, 7, 0, 130, 0], [5, 7, 0, 300, 0]),
    "chunk after a prefix": ([200], [2175]),
    "edges of sparsity": ([2049], [2049]),
    "listed lengths": ([20] * 5, [2047, 2048, 2050, 2175, 8320]),
    "more queries than keys": ([40], [10]),
    "layout mix-up": ([4], [700]),
}


def check(seqlens_q, seqlens_k, config, dtype=torch.bfloat16, **kwargs):
    q, k, v, q_idx, k_idx, batch = make(seqlens_q, seqlens_k, config, dtype, **kwargs)
    scores = openmsa.block_scores(q_idx, k_idx, batch, config)
    exact = oracle(openmsa.block_scores, q_idx, k_idx, batch=batch, config=config)
    visible = torch.isfinite(exact)
    assert torch.equal(torch.isfinite(scores.cpu()), visible)
    assert torch.allclose(scores.cpu().double()[visible], exact[visible], atol=1e-3, rtol=1e-5)
    ids = openmsa.index_select(q_idx, k_idx, batch, config)
    assert torch.equal(ids, openmsa.select_blocks(scores, batch, config))
    if kwargs.get("integers"):
        assert torch.equal(ids.cpu(), openmsa.select_blocks(exact, batch.to("cpu"), config, backend="reference"))
    else:
        assert_selection(ids, exact, config, batch, 1e-3)
    reference, reference_lse = oracle(openmsa.sparse_attention, q, k, v, ids, batch=batch, config=config, return_lse=True)
    plain = openmsa.sparse_attention(q.cpu(), k.cpu(), v.cpu(), ids.cpu(), batch.to("cpu"), config).float()
    for attend in (openmsa.sparse_attention, openmsa.sparse_decode):
        out, lse = attend(q, k, v, ids, batch, config, return_lse=True)
        assert_attention(out, lse, reference, reference_lse, plain)
        again, again_lse = attend(q, k, v, ids, batch, config, return_lse=True)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)
    reference, reference_lse, reference_max = oracle(
        openmsa.dense_attention, q, k, v, batch=batch, config=config, return_lse=True, return_block_max=True
    )
    plain = openmsa.dense_attention(q.cpu(), k.cpu(), v.cpu(), batch.to("cpu"), config).float()
    out, lse, block_max = openmsa.dense_attention(q, k, v, batch, config, return_lse=True, return_block_max=True)
    assert_attention(out, lse, reference, reference_lse, plain)
    assert torch.equal(out, openmsa.dense_attention(q, k, v, batch, config))
    finite = torch.isfinite(reference_max)
    assert torch.equal(torch.isfinite(block_max.cpu()), finite)
    assert torch.allclose(block_max.cpu().double()[finite], reference_max[finite], atol=1e-3)
    openmsa.synchronize("cuda")


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, paged):
    check(*LAYOUTS[name], MsaConfig(**SMALL), paged=paged)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_groups_and_dims(group, dim):
    config = MsaConfig(
        num_q_heads=2 * group, num_kv_heads=2, head_dim=dim, index_dim=dim, block_size=64, top_k=4, num_init_blocks=1
    )
    check([70, 3, 260], [400, 3, 700], config)
    check([70, 3, 260], [400, 3, 700], config, torch.float16, paged=True)


@pytest.mark.parametrize("top_k", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("block_size", [64, 128])
def test_block_sizes_and_top_k(block_size, top_k):
    check([300, 9], [6000, 4000], MsaConfig(**{**SMALL, "block_size": block_size, "top_k": top_k}))


@pytest.mark.parametrize("queries", [1, 2, 4, 16])
def test_decode_shapes(queries):
    config = MsaConfig(**REFERENCE_MODEL)
    check([queries] * 3, [5000, 129, 2500], config, paged=True)
    check([queries, 0, queries], [5000, 129, 2500], config)


@pytest.mark.parametrize("paged", [False, True])
def test_exact_ties(paged):
    check([130, 260], [1500, 260], MsaConfig(**SMALL), integers=True, paged=paged)


def test_explicit_positions():
    check([5, 300], [300, 900], MsaConfig(**SMALL), q_start=[-3, 100])


def test_sparse_equals_dense_when_all_blocks_fit():
    config = MsaConfig(**REFERENCE_MODEL)
    q, k, v, q_idx, k_idx, batch = make([2048], [2048], config)
    out = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config)
    dense = openmsa.dense_attention(q, k, v, batch, config)
    assert (out.float() - dense.float()).abs().max() < 2e-2


@pytest.mark.parametrize("clustered", [False, True])
def test_large_against_the_cpu_engine(clustered):
    """Many blocks, both routes of sparse_attention: scattered lists token by token, shared ones by tiles."""
    config = MsaConfig(**REFERENCE_MODEL)
    q, k, v, q_idx, k_idx, batch = make([3000], [16500], config)
    if clustered:
        q_idx = q_idx[:1] + 0.02 * q_idx
    ids = openmsa.index_select(q_idx, k_idx, batch, config)
    out, lse = openmsa.sparse_attention(q, k, v, ids, batch, config, return_lse=True)
    rows = torch.cat([torch.arange(0, 64), torch.arange(2936, 3000)])
    part = Batch.packed([64, 64], [16500 - 2936, 16500])
    host_k, host_v = (torch.cat([x[: 16500 - 2936], x]).cpu() for x in (k, v))
    want, want_lse = openmsa.sparse_attention(q[rows].cpu(), host_k, host_v, ids[rows].cpu(), part, config, return_lse=True)
    assert (out[rows].cpu().float() - want.float()).abs().max() < 4e-3
    assert (lse[rows].cpu() - want_lse).abs().max() < 1e-3


def test_the_answer_at_the_far_end():
    """8,192 blocks, one of them relevant: number 8,000. Queries behind it must choose it, in prefill and in decode."""
    config = MsaConfig(num_q_heads=16, num_kv_heads=1, head_dim=128, index_dim=128)
    total = 8192 * 128
    for queries in (1, 300):
        gen = torch.Generator(device="cuda").manual_seed(queries)
        k, v, k_idx = (
            torch.randn(total, *s, generator=gen, device="cuda", dtype=torch.bfloat16) for s in ((1, 128), (1, 128), (128,))
        )
        q = torch.randn(queries, 16, 128, generator=gen, device="cuda", dtype=torch.bfloat16)
        q_idx = torch.randn(queries, 1, 128, generator=gen, device="cuda", dtype=torch.bfloat16)
        q_idx[:] = q_idx[:1].clone()  # all ask for the same
        k_idx[8000 * 128 + 77] = 20 * q_idx[0, 0]
        batch = Batch.single(queries, total, device="cuda")
        out, lse, ids = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config, return_lse=True, return_block_ids=True)
        assert (ids == 8000).any(-1).all()
        own = (total - queries + torch.arange(queries, device="cuda")) // 128
        assert (ids[:, 0, -1] == own).all()
        keys = (ids[0, 0].long()[:, None] * 128 + torch.arange(128, device="cuda")).flatten()
        keys = keys[keys <= total - queries]
        s = (q[0].double() @ k[keys, 0].double().T) * 128**-0.5
        assert (out[0].double() - s.softmax(-1) @ v[keys, 0].double()).abs().max() < 1e-2
        assert (lse[0].double() - s.logsumexp(-1)).abs().max() < 1e-3


def test_graph_replay_with_changed_contents():
    """Captured once at the largest size, replayed with other lengths, pages and selections, on poisoned scratch."""
    config = MsaConfig(**REFERENCE_MODEL)
    first = make([1, 1, 1], [4000, 130, 2500], config, paged=True)
    q, k, v, q_idx, k_idx, batch = first
    batch.max_seqlen_k = 4096
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out, lse, ids = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config, return_lse=True, return_block_ids=True)
    for seed, lengths in ((1, [4000, 130, 2500]), (2, [300, 3999, 1])):
        other = make([1, 1, 1], lengths, config, seed=seed, paged=True)
        for target, source in zip((q, q_idx), (other[0], other[3])):
            target.copy_(source)
        for target, source in zip((k, v, k_idx), (other[1], other[2], other[4])):
            target.fill_(float("nan"))
            assert source.shape[0] <= target.shape[0]  # the captured pool is the largest
            target[: source.shape[0]].copy_(source)
        batch.seqlens_k.copy_(other[5].seqlens_k)
        width = min(batch.page_table.shape[1], other[5].page_table.shape[1])
        batch.page_table.fill_(-1)
        batch.page_table[:, :width].copy_(other[5].page_table[:, :width])
        out.fill_(float("nan"))
        graph.replay()
        want, want_lse, want_ids = openmsa.msa_attention(
            other[0], other[1], other[2], other[3], other[4], other[5], config, return_lse=True, return_block_ids=True
        )
        assert torch.equal(ids, want_ids) and torch.equal(out, want) and torch.equal(lse, want_lse)


def test_prefill_graph():
    config = MsaConfig(**REFERENCE_MODEL)
    q, k, v, q_idx, k_idx, batch = make([1000, 500], [3000, 500], config)
    want = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("bad, words", [(99, "must be a block"), (-5, "must be a block"), (0, "ascending")])
def test_bad_block_ids_are_reported(bad, words, decode):
    config = MsaConfig(**SMALL)
    q, k, v, q_idx, k_idx, batch = make([4], [1500], config)
    ids = openmsa.index_select(q_idx, k_idx, batch, config)
    ids[2, 1, 2 if bad == 0 else 3] = bad
    (openmsa.sparse_decode if decode else openmsa.sparse_attention)(q, k, v, ids, batch, config)
    with pytest.raises(openmsa.InvalidArgumentError, match=words):
        openmsa.synchronize("cuda")
    openmsa.synchronize("cuda")  # told once


@pytest.mark.parametrize("queries", [4, 300])
def test_bad_pages_and_offsets_are_reported(queries):
    config = MsaConfig(**SMALL)
    q, k, v, q_idx, k_idx, batch = make([queries], [1500], config, paged=True)
    batch.page_table[0, 3] = 10**6
    openmsa.index_select(q_idx, k_idx, batch, config)
    with pytest.raises(openmsa.InvalidArgumentError, match="page_table"):
        openmsa.synchronize("cuda")
    q, k, v, q_idx, k_idx, batch = make([queries], [1500], config)
    batch.cu_seqlens_q[0] = 2
    openmsa.index_select(q_idx, k_idx, batch, config)
    with pytest.raises(openmsa.InvalidArgumentError, match="cu_seqlens_q"):
        openmsa.synchronize("cuda")
    q, k, v, q_idx, k_idx, batch = make([queries], [1500], config)
    batch.max_seqlen_k = 64
    openmsa.index_select(q_idx, k_idx, batch, config)
    with pytest.raises(openmsa.InvalidArgumentError, match="max_seqlen_k"):
        openmsa.synchronize("cuda")


@pytest.mark.parametrize("queries", [3, 100])
def test_a_cache_without_keys(queries):
    config = MsaConfig(**SMALL)
    q, k, v, q_idx, k_idx, batch = make([queries], [0], config, paged=True)
    assert openmsa.block_scores(q_idx, k_idx, batch, config).shape == (queries, config.num_kv_heads, 0)
    assert (openmsa.index_select(q_idx, k_idx, batch, config) == -1).all()
    for out in (openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config), openmsa.dense_attention(q, k, v, batch, config)):
        assert (out == 0).all()
    openmsa.synchronize()


def test_refusals_name_the_rule():
    config = MsaConfig(**SMALL)
    q, k, v, q_idx, k_idx, batch = make([4], [1500], config)
    with pytest.raises(openmsa.InvalidArgumentError, match="multiple of 8"):
        openmsa.block_scores(torch.randn(4, 2, 129, device="cuda", dtype=torch.bfloat16)[..., :128], k_idx, batch, config)
    with pytest.raises(openmsa.UnsupportedError, match="float32"):
        openmsa.index_select(q_idx.float(), k_idx.float(), batch, config)
    with pytest.raises(openmsa.InvalidArgumentError, match="one device"):
        openmsa.index_select(q_idx, k_idx, batch.to("cpu"), config)
    wide = MsaConfig(num_q_heads=40, num_kv_heads=2, head_dim=128, index_dim=128)
    with pytest.raises(openmsa.UnsupportedError, match="group_size 20"):
        openmsa.dense_attention(torch.randn(4, 40, 128, device="cuda", dtype=torch.bfloat16), k, v, batch, wide)
