"""Faults that other engines running this attention had (public issue trackers, 2026), as small inputs that show each kind, on the GPU.

The CPU's are in tests/unit/api_known_faults_test.cpp, under the same numbers. Values are worked out by hand where K is zero: attention
is then the plain mean of V over what is seen. Numbers missing here concern the cache and the model (test_cuda_cache.py, test_cache.py,
test_hf_*.py), comparison code, or eight-bit formats, which this version does not have.
"""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import openmsa  # noqa: E402
from cuda_support import SMALL, make, needs_gpu  # noqa: E402
from openmsa import Batch, MsaConfig  # noqa: E402

pytestmark = needs_gpu

BF16 = torch.bfloat16
ATTENDS = [openmsa.sparse_attention, openmsa.sparse_decode]


def small(**fields) -> MsaConfig:
    return MsaConfig(**{**dict(num_q_heads=2, num_kv_heads=1, head_dim=64, index_dim=64, block_size=64, top_k=4), **fields})


def lists(rows) -> torch.Tensor:
    """[T, Hkv, k] from nested lists."""
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def flat_keys(num_k: int, config: MsaConfig, value=1.0):
    """K = 0 and V = value for a packed sequence."""
    k = torch.zeros(num_k, config.num_kv_heads, config.head_dim, dtype=BF16, device="cuda")
    return k, torch.full_like(k, value)


def queries(num_q: int, config: MsaConfig) -> torch.Tensor:
    return torch.randn(num_q, config.num_q_heads, config.head_dim, dtype=BF16, device="cuda")


@pytest.mark.parametrize("tokens", [4, 5])
@pytest.mark.parametrize("attend", ATTENDS)
def test_1_lists_are_token_major(attend, tokens):
    """Every (token, group) has a block of its own; with 4 tokens and 4 groups no shape tells a swapped list."""
    config = small(num_q_heads=8, num_kv_heads=4, top_k=2)
    k, v = flat_keys(64 * 32, config)
    v[:] = (64 * torch.arange(4)[None, :, None] + (torch.arange(64 * 32) // 64)[:, None, None]).to(BF16)
    ids = torch.full((tokens, 4, 2), -1, dtype=torch.int32)
    for t in range(tokens):
        for g in range(4):
            ids[t, g, 0] = 4 * t + g
    batch = Batch.single(tokens, 64 * 32, device="cuda")
    out = attend(queries(tokens, config), k, v, ids.cuda(), batch, config)
    want = torch.tensor([[64 * g + 4 * t + g for g in range(4) for _ in range(2)] for t in range(tokens)])
    assert torch.equal(out.float().cpu(), want[:, :, None].expand(-1, -1, 64).float())


@pytest.mark.parametrize("attend", ATTENDS)
def test_2_minus_one_is_no_page(attend):
    """A hole in a list is reported, and the page that index -1 would hit is not read: it is full of NaN."""
    config = small()
    pool = torch.zeros(6, 1, 64, 64, dtype=BF16, device="cuda")
    pool[5] = math.nan
    batch = Batch(
        cu_seqlens_q=lists([0, 1]), seqlens_k=lists([130]), page_table=lists([[2, 0, 3]])
    )  # fmt: skip
    out = attend(queries(1, config), pool, pool, lists([[[1, -1, 2, -1]]]), batch, config)
    assert not out.isnan().any()
    with pytest.raises(openmsa.InvalidArgumentError, match="ascending"):
        openmsa.synchronize("cuda")
    out = attend(queries(1, config), pool, pool, lists([[[0, 2, -1, -1]]]), batch, config)
    openmsa.synchronize("cuda")
    assert not out.isnan().any()


@pytest.mark.parametrize("paged", [False, True])
def test_3_and_8_padding_rows_are_exact_zeros(paged):
    """Three real requests in a graph of eight: rows of length 0 give 0 and -inf, and change nothing for the others."""
    config = MsaConfig(**SMALL)
    lengths = [129, 0, 700, 0, 0, 2049, 0, 0]
    q, k, v, q_idx, k_idx, batch = make([1] * 8, lengths, config, paged=paged)
    ids = openmsa.index_select(q_idx, k_idx, batch, config)
    for attend in ATTENDS:
        out, lse = attend(q, k, v, ids, batch, config, return_lse=True)
        for row, length in enumerate(lengths):
            if length == 0:
                assert (ids[row] == -1).all() and (out[row] == 0).all() and (lse[row] == -math.inf).all()
            else:
                assert out[row].isfinite().all() and lse[row].isfinite().all()
    out, lse = openmsa.dense_attention(q, k, v, batch, config, return_lse=True)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all() and out.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config)
    want = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config)
    captured.fill_(math.nan)
    graph.replay()
    assert torch.equal(captured, want)


@pytest.mark.parametrize("tokens", [1, 70])
def test_4_slots_past_the_end_do_not_leak(tokens):
    config = small(num_q_heads=16, block_size=128)
    k = torch.zeros(9, 1, 128, 64, dtype=BF16, device="cuda")
    v = torch.ones_like(k)
    k[8, :, 127:], v[8, :, 127:] = math.nan, 1e4  # 1,023 keys: the last page holds one slot too many
    k[0], v[0] = math.nan, math.nan  # a page of nobody
    batch = Batch(
        cu_seqlens_q=lists([0, tokens]), seqlens_k=lists([1023]), page_table=lists([[1, 2, 3, 4, 5, 6, 7, 8]])
    )  # fmt: skip
    ids = lists([[[0, 3, 6, 7]]]).expand(tokens, -1, -1)
    outs = [attend(queries(tokens, config), k, v, ids, batch, config) for attend in ATTENDS]
    for out in (*outs, openmsa.dense_attention(queries(tokens, config), k, v, batch, config)):
        assert (out == 1).all()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("attend", ATTENDS)
def test_5_strided_lists_are_read(attend, tokens):
    config = MsaConfig(**SMALL)
    q, k, v, q_idx, k_idx, batch = make([tokens], [1500], config)
    ids = openmsa.index_select(q_idx, k_idx, batch, config)
    big = torch.full((tokens, 4, 4), 1 << 30, dtype=torch.int32, device="cuda")
    big[:, ::2] = ids
    assert torch.equal(attend(q, k, v, big[:, ::2], batch, config), attend(q, k, v, ids, batch, config))
    openmsa.synchronize("cuda")


@pytest.mark.parametrize("attend", ATTENDS)
def test_7_unsorted_lists_are_reported(attend):
    config = small(block_size=128)
    k, v = flat_keys(1023, config)
    batch = Batch.single(1, 1023, device="cuda")
    attend(queries(1, config), k, v, lists([[[7, 2, 0, 5]]]), batch, config)
    with pytest.raises(openmsa.InvalidArgumentError, match="ascending"):
        openmsa.synchronize("cuda")


def test_9_a_stale_maximum_is_reported():
    config = small(block_size=128)
    q, k, v, q_idx, k_idx, batch = make([3], [4096], config)
    ids = openmsa.index_select(q_idx, k_idx, batch, config)
    batch.max_seqlen_k = 64
    calls = [lambda: openmsa.block_scores(q_idx, k_idx, batch, config), lambda: openmsa.index_select(q_idx, k_idx, batch, config)]
    calls += [lambda attend=attend: attend(q, k, v, ids, batch, config) for attend in ATTENDS]
    calls += [lambda: openmsa.dense_attention(q, k, v, batch, config)]
    for call in calls:
        with pytest.raises(openmsa.InvalidArgumentError, match="max_seqlen_k"):
            call()
            openmsa.synchronize("cuda")


@pytest.mark.parametrize("tokens", [3, 600])
def test_11_scores_wider_than_what_lives(tokens):
    """A buffer of the model's limit, stale behind the live blocks."""
    config = small()
    scores = torch.full((tokens, 1, 8192), 1e9, device="cuda")
    batch = Batch.single(tokens, tokens + 129, device="cuda")
    num_blocks = -(-(tokens + 129) // 64)
    scores[..., :num_blocks] = torch.randn(tokens, 1, num_blocks, device="cuda")
    ids = openmsa.select_blocks(scores, batch, config)
    assert torch.equal(ids, openmsa.select_blocks(scores[..., :num_blocks].contiguous(), batch, config))


@pytest.mark.parametrize("tokens", [1, 70])
def test_12_page_offsets_are_64_bit(tokens):
    """Page id 131,072 times a stride of 16,384 elements is 2^31."""
    config = small(head_dim=128, index_dim=128, block_size=128, num_q_heads=16, top_k=2)
    far, length = 131072, 128 + tokens + 1
    k = torch.empty(far + 1, 1, 128, 128, dtype=BF16, device="cuda")
    v, k_idx = torch.empty_like(k), torch.empty(far + 1, 128, 128, dtype=BF16, device="cuda")
    for pool in (k, v, k_idx):
        pool[1], pool[far], pool[0] = 0, 0, math.nan  # page 0 is where a product of 32 bits would end
    v[far], k_idx[far] = 64, 1
    batch = Batch(
        cu_seqlens_q=lists([0, tokens]), seqlens_k=lists([length]), page_table=lists([[1, far]])
    )  # fmt: skip
    q_idx = torch.ones(tokens, 1, 128, dtype=BF16, device="cuda")
    scores = openmsa.block_scores(q_idx, k_idx, batch, config)
    assert (scores[:, 0, 0] == 0).all() and (scores[:, 0, 1] == 128).all()
    q = queries(tokens, config)
    ids = lists([[[0, 1]]]).expand(tokens, -1, -1)
    in_far = torch.arange(2, tokens + 2, device="cuda")
    want = (64.0 * in_far / (128 + in_far))[:, None, None]
    for out in (*(attend(q, k, v, ids, batch, config) for attend in ATTENDS), openmsa.dense_attention(q, k, v, batch, config)):
        assert (out.float() - want).abs().max() < 0.13  # half a step of bfloat16 at 32
    openmsa.synchronize("cuda")


def test_12_score_offsets_are_64_bit():
    """More than 2^31 scores in one tensor; the last rows against a call of their own."""
    config = MsaConfig(num_q_heads=4, num_kv_heads=4, head_dim=64, index_dim=64)
    tokens, keys = 65600, 8192 * 128
    k_idx = torch.randn(keys, 64, dtype=BF16, device="cuda")
    q_idx = torch.randn(tokens, 4, 64, dtype=BF16, device="cuda")
    scores = openmsa.block_scores(q_idx, k_idx, Batch.single(tokens, keys, device="cuda"), config)
    assert scores.numel() > 2**31
    last = Batch.single(100, keys, device="cuda")
    assert torch.equal(scores[-100:], openmsa.block_scores(q_idx[-100:].contiguous(), k_idx, last, config))
    ids = openmsa.select_blocks(scores, Batch.single(tokens, keys, device="cuda"), config)
    assert torch.equal(ids[-100:], openmsa.index_select(q_idx[-100:].contiguous(), k_idx, last, config))


@pytest.mark.parametrize("prefix", [0, 128])
@pytest.mark.parametrize("group_size", [2, 16])
def test_13_and_18_the_own_block_is_masked_by_tokens(prefix, group_size):
    """V of the next key is 1e4, of the one after NaN: neither reaches a query at 5, and a future index key lifts no block."""
    config = small(num_q_heads=group_size, block_size=128)
    k, v = flat_keys(prefix + 8, config)
    v[prefix + 6], v[prefix + 7] = 1e4, math.nan
    batch = Batch.packed([1], [prefix + 8], q_start=[prefix + 5], device="cuda")
    ids = lists([[[0, 1, -1, -1] if prefix else [0, -1, -1, -1]]])
    results = [attend(queries(1, config), k, v, ids, batch, config, return_lse=True) for attend in ATTENDS]
    for out, lse in (*results, openmsa.dense_attention(queries(1, config), k, v, batch, config, return_lse=True)):
        assert (out == 1).all()
        assert (lse - math.log(prefix + 6)).abs().max() < 1e-3
    k_idx = torch.full((prefix + 8, 64), -1.0, dtype=BF16, device="cuda")
    k_idx[prefix + 6 :] = 100
    scores = openmsa.block_scores(torch.ones(1, 1, 64, dtype=BF16, device="cuda"), k_idx, batch, config)
    assert scores[0, 0, prefix // 128] == -64


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_18_a_value_reaches_only_the_rows_that_see_it(tokens, bad):
    config = small(num_q_heads=16)
    k, v = flat_keys(200, config)
    v[170] = bad
    batch = Batch.packed([tokens], [200], q_start=[200 - tokens if tokens > 1 else 169], device="cuda")
    ids = lists([[[0, 2, -1, -1]]]).expand(tokens, -1, -1).clone()
    positions = torch.arange(tokens, device="cuda") + (200 - tokens if tokens > 1 else 169)
    ids[positions < 128, :, 1] = 1  # those see two blocks only
    sees = positions >= 170
    results = [attend(queries(tokens, config), k, v, ids, batch, config) for attend in ATTENDS]
    for out in (*results, openmsa.dense_attention(queries(tokens, config), k, v, batch, config)):
        assert (out[~sees] == 1).all()
        assert not out[sees].isfinite().any()


@pytest.mark.parametrize("tokens", [1, 70])
def test_14_groups_select_for_themselves(tokens):
    config = small(num_q_heads=8, num_kv_heads=4, top_k=2)
    k_idx = torch.zeros(640 + tokens, 64, dtype=BF16, device="cuda")
    q_idx = torch.zeros(tokens, 4, 64, dtype=BF16, device="cuda")
    for g in range(4):
        q_idx[:, g, g] = 10
        k_idx[(2 * g + 1) * 64 + 7, g] = 10
    ids = openmsa.index_select(q_idx, k_idx, Batch.single(tokens, 640 + tokens, device="cuda"), config)
    for g in range(4):
        assert (ids[:, g, 0] == 2 * g + 1).all()
    assert torch.equal(ids[:, 0, 1].cpu(), ((640 + torch.arange(tokens)) // 64).int())


@pytest.mark.parametrize("num_k", [2049, 2050, 2111, 2175])
@pytest.mark.parametrize("paged", [False, True])
def test_15_the_tail_block_counts(num_k, paged):
    config = small(block_size=128, top_k=16)
    q, k, v, q_idx, k_idx, batch = make([1], [num_k], config, paged=paged)
    ids = openmsa.index_select(q_idx, k_idx, batch, config)
    assert ids[0, 0, 15] == 16
    k.zero_()
    v.zero_()
    if paged:
        v[batch.page_table[0, 16].item(), :, num_k - 2049] = 1
    else:
        v[num_k - 1] = 1
    seen = 15 * 128 + num_k - 2048
    for attend in ATTENDS:
        out, lse = attend(q, k, v, ids, batch, config, return_lse=True)
        assert (out.float() * seen - 1).abs().max() < 1e-2
        assert (lse - math.log(seen)).abs().max() < 1e-3


@pytest.mark.parametrize("before", [1, 127, 128, 129])
def test_16_block_borders_do_not_shift_with_the_pack(before):
    config = MsaConfig(**SMALL)
    q, k, v, q_idx, k_idx, batch = make([before, 40], [before, 1600], config)
    alone = Batch.single(40, 1600, device="cuda")
    parts = [x[before:].contiguous() for x in (q, k, v, q_idx, k_idx)]
    want, want_ids = openmsa.msa_attention(*parts, alone, config, return_block_ids=True)
    out, ids = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config, return_block_ids=True)
    assert torch.equal(ids[before:], want_ids)
    assert (out[before:].float() - want.float()).abs().max() < 2e-2


def test_23_a_page_of_another_size_is_refused():
    config = small(block_size=128)
    pool = torch.zeros(4, 1, 64, 64, dtype=BF16, device="cuda")
    batch = Batch(
        cu_seqlens_q=lists([0, 1]), seqlens_k=lists([130]), page_table=lists([[0, 1]])
    )  # fmt: skip
    with pytest.raises(openmsa.InvalidArgumentError, match="block_size"):
        openmsa.dense_attention(queries(1, config), pool, pool, batch, config)


@pytest.mark.parametrize("paged", [False, True])
def test_25_speculative_rows_equal_single_steps(paged):
    config = MsaConfig(**SMALL)
    q, k, v, q_idx, k_idx, batch = make([4, 4, 4], [2050, 130, 7], config, paged=paged)
    ids = openmsa.index_select(q_idx, k_idx, batch, config)
    out, lse = openmsa.sparse_decode(q, k, v, ids, batch, config, return_lse=True)
    for i in range(4):
        rows = torch.arange(3, device="cuda") * 4 + i
        fields = dict(cu_seqlens_q=lists([0, 1, 2, 3]), q_start=lists([2046 + i, 126 + i, 3 + i]))
        for name in ("cu_seqlens_k", "seqlens_k", "page_table"):
            fields[name] = getattr(batch, name)
        step = Batch(**fields)
        step_ids = openmsa.index_select(q_idx[rows], k_idx, step, config)
        assert torch.equal(step_ids, ids[rows])
        step_out, step_lse = openmsa.sparse_decode(q[rows], k, v, step_ids, step, config, return_lse=True)
        assert (step_out.float() - out[rows].float()).abs().max() < 8e-3
        assert (step_lse - lse[rows]).abs().max() < 1e-4
