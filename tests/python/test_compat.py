"""The authors' interface (openmsa.compat) against the fp64 oracle, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import random
import sys

import pytest

torch = pytest.importorskip("torch")

import openmsa  # noqa: E402
from openmsa import Batch, MsaConfig, compat  # noqa: E402
from openmsa.compat import build_k2q_csr, fmha_sm100, fmha_sm100_plan, sparse_atten_func, sparse_topk_select  # noqa: E402
from test_cuda import assert_attention, oracle  # noqa: E402

_gpu = {backend.backend: backend for backend in openmsa.list_backends()}["cuda"]
needs_gpu = pytest.mark.skipif(not _gpu.available, reason=f"no usable GPU: {_gpu.detail}")
PAGE, DIM = 128, 128


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    yield request.param
    if request.param == "cuda":
        openmsa.synchronize("cuda")


@pytest.fixture
def installed():
    compat.uninstall()
    yield compat.install()
    compat.uninstall()


class Case:
    """Random tensors over shuffled pages. Slots that no query may reach hold NaN; integers make proxy scores exact."""

    def __init__(self, seqlens_q, seqlens_k, device, *, num_q_heads=8, num_kv_heads=2, dtype=torch.bfloat16, seed=0, q_start=None):
        gen = torch.Generator().manual_seed(seed)
        self.seqlens_q, self.seqlens_k, self.device = seqlens_q, seqlens_k, device
        self.qo_lens = torch.tensor(seqlens_q, dtype=torch.int32)
        self.kv_lens = torch.tensor(seqlens_k, dtype=torch.int32)
        total_q, pages_of = sum(seqlens_q), [-(-n // PAGE) for n in seqlens_k]
        self.num_pages = max(pages_of, default=0)
        order = list(range(sum(pages_of) + 2))
        random.Random(seed).shuffle(order)
        owned, self.unowned = order[: sum(pages_of)], order[sum(pages_of) :]

        def draw(*shape):
            return torch.randn(shape, generator=gen).to(dtype)

        self.q = draw(total_q, num_q_heads, DIM)
        self.proxy_q = torch.randint(-3, 4, (total_q, num_kv_heads, DIM), generator=gen).to(dtype)
        self.k_pages, self.v_pages = draw(len(order), num_kv_heads, PAGE, DIM), draw(len(order), num_kv_heads, PAGE, DIM)
        self.proxy_k_pages = torch.randint(-3, 4, (len(order), 1, PAGE, DIM), generator=gen).to(dtype)
        table = torch.full((len(seqlens_k), max(self.num_pages, 1)), -1, dtype=torch.int32)
        free = iter(owned)
        for s, n in enumerate(seqlens_k):
            for b in range(pages_of[s]):
                table[s, b] = page = next(free)
                for pool in (self.k_pages, self.v_pages, self.proxy_k_pages):
                    pool[page, :, max(n - b * PAGE, 0) :] = torch.nan
        for pool in (self.k_pages, self.v_pages, self.proxy_k_pages):
            pool[self.unowned] = torch.nan
        self.proxy_v_pages = torch.full_like(self.proxy_k_pages, torch.nan)
        self.kv_indices = torch.tensor(owned, dtype=torch.int32)
        self.table = table
        cu_q = Batch.packed(seqlens_q).cu_seqlens_q
        self.batch = Batch(cu_seqlens_q=cu_q, seqlens_k=self.kv_lens, page_table=table,
                           q_start=None if q_start is None else torch.tensor(q_start, dtype=torch.int32))  # fmt: skip
        self.config = MsaConfig(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=DIM, index_dim=DIM, num_local_blocks=0)
        for name in ("q", "proxy_q", "k_pages", "v_pages", "proxy_k_pages", "proxy_v_pages", "kv_indices"):
            setattr(self, name, getattr(self, name).to(device))

    def unpaged(self, pool):
        """[S, Hkv, D]: the same keys, one sequence after the other."""
        rows = (pool[self.table[s].long().clamp(min=0).to(pool.device)] for s in range(len(self.seqlens_k)))
        return torch.cat([pages.transpose(1, 2).flatten(0, 1)[:n] for pages, n in zip(rows, self.seqlens_k)])

    def scores(self):
        """fp64 [T, Hkv, blocks], raw dot products."""
        return oracle(openmsa.block_scores, self.proxy_q, self.proxy_k_pages[:, 0], batch=self.batch, config=self.config)

    def selection(self):
        return oracle(openmsa.index_select, self.proxy_q, self.proxy_k_pages[:, 0], batch=self.batch, config=self.config)

    def assert_attends(self, out, ids, lse=None):
        args = (self.q, self.k_pages, self.v_pages, ids)
        config = dataclasses.replace(self.config, top_k=ids.shape[-1])
        want, want_lse = oracle(openmsa.sparse_attention, *args, batch=self.batch, config=config, return_lse=True)
        plain = openmsa.sparse_attention(*(x.cpu() for x in args), self.batch, config)
        assert out.dtype == self.q.dtype and out.device == self.q.device
        assert_attention(out, want_lse.float() if lse is None else lse, want, want_lse, plain)


def sample(case):
    """The program that has to run unchanged once the module is installed."""
    from fmha_sm100 import fmha_sm100, fmha_sm100_plan, sparse_topk_select

    qo_lens, kv_lens, kv_indices, num_pages = case.qo_lens, case.kv_lens, case.kv_indices, case.num_pages
    proxy_q, proxy_k_pages, proxy_v_pages = case.proxy_q, case.proxy_k_pages, case.proxy_v_pages
    q, k_pages, v_pages = case.q, case.k_pages, case.v_pages
    plan = fmha_sm100_plan(qo_lens, kv_lens, proxy_q.shape[1], num_kv_heads=1, page_size=128, output_maxscore=True)
    _, max_score = fmha_sm100(proxy_q, proxy_k_pages, proxy_v_pages, plan, kv_indices=kv_indices, output_o=False, output_maxscore=True)
    ids = sparse_topk_select(max_score.contiguous(), 16, num_valid_pages=num_pages)
    plan2 = fmha_sm100_plan(qo_lens, kv_lens, q.shape[1], num_kv_heads=k_pages.shape[1], page_size=128, kv_block_num=16)
    out, _ = fmha_sm100(q, k_pages, v_pages, plan2, kv_indices=kv_indices, kv_block_indexes=ids)
    assert _ is None
    return max_score, ids, out


LENGTHS = {
    **{f"{n} tokens": ([n], [n]) for n in (0, 1, 127, 128, 129)},
    "no keys at all": ([3, 0], [0, 0]),
    **{f"last of {n}": ([70], [n]) for n in (2047, 2048, 2049, 2175, 8192)},
    "prefill beyond 16 blocks": ([2175], [2175]),
    "documents": ([127, 129, 1, 2, 3, 5, 128], [127, 129, 1, 2, 3, 5, 128]),
    "decode": ([1, 1, 1, 1], [2500, 1, 129, 4000]),
    "speculative decode": ([4, 3], [2500, 4000]),
    "decode, then prefill, then nothing": ([1, 1, 40, 0, 130], [3000, 5, 2600, 300, 130]),
    "more queries than keys": ([40], [10]),
    "as many tokens as heads": ([2], [2500]),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_sample_agrees_with_the_oracle(name, device, installed):
    case = Case(*LENGTHS[name], device, num_q_heads=4 if name.startswith("prefill") else 8)
    max_score, ids, out = sample(case)
    want = case.scores()
    tokens, heads = case.proxy_q.shape[:2]
    assert max_score.shape == (heads, -(-case.num_pages // 128) * 128, tokens) and max_score.dtype == torch.float32
    assert max_score.is_contiguous() and max_score.device == case.q.device
    assert torch.equal(max_score[:, : case.num_pages].permute(2, 0, 1).cpu().double(), want)  # integers: exact
    assert (max_score[:, case.num_pages :] == -torch.inf).all()
    assert ids.shape == (tokens, heads, 16) and ids.dtype == torch.int32
    assert torch.equal(ids.cpu(), case.selection())
    case.assert_attends(out, ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (16, 1), (64, 4)])
def test_group_sizes_and_dtypes(heads, dtype, device, installed):
    case = Case([20, 1], [2300, 700], device, num_q_heads=heads[0], num_kv_heads=heads[1], dtype=dtype)
    _, ids, out = sample(case)
    assert torch.equal(ids.cpu(), case.selection())
    case.assert_attends(out, ids)


def test_the_answer_at_the_far_end_of_5000_blocks(device, installed):
    case = Case([3], [5000 * PAGE], device, num_q_heads=2, num_kv_heads=1)
    case.proxy_q[:] = 1
    case.proxy_k_pages.clamp_(max=0)
    case.proxy_k_pages[case.kv_indices[4990].item(), 0, 77] = 3
    max_score, ids, _ = sample(case)
    assert (ids == 4990).any(-1).all() and (max_score[:, 4990] == 3 * DIM).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("paged", [True, False])
def test_dense_pass(paged, causal, device):
    seqlens_q, seqlens_k = [130, 0, 5, 1], [300, 40, 900, 129]
    case = Case(seqlens_q, seqlens_k, device)
    k, v, kv_indices = case.k_pages, case.v_pages, case.kv_indices
    if not paged:
        k, v, kv_indices = case.unpaged(k), case.unpaged(v), None
    batch = Batch.packed(seqlens_q, seqlens_k) if not paged else case.batch
    if not causal:
        batch.q_start = case.kv_lens
    page_size = PAGE if paged else -1
    plan = fmha_sm100_plan(case.qo_lens, case.kv_lens, 8, 2, page_size=page_size, output_maxscore=True, causal=causal)
    out, max_score = fmha_sm100(case.q, k, v, plan, kv_indices=kv_indices, sm_scale=0.05)
    scaled = MsaConfig(num_q_heads=8, num_kv_heads=2, head_dim=DIM, softmax_scale=0.05)
    want, want_lse = oracle(openmsa.dense_attention, case.q, k, v, batch=batch, config=scaled, return_lse=True)
    plain = openmsa.dense_attention(case.q.cpu(), k.cpu(), v.cpu(), batch, scaled)
    assert_attention(out, want_lse.float(), want, want_lse, plain)
    # Scores are raw whatever the softmax scale, and the same from the pass that computes nothing else.
    proxy = MsaConfig(num_q_heads=4, num_kv_heads=4, head_dim=DIM, index_dim=DIM)
    heads = [oracle(openmsa.block_scores, case.q[:, 4 * h : 4 * h + 4], k[:, h], batch=batch, config=proxy) for h in range(2)]
    raw = torch.cat(heads, dim=1)
    none, alone = fmha_sm100(case.q, k, v, plan, kv_indices=kv_indices, output_o=False)
    assert none is None
    for scores in (max_score, alone):
        got = scores[:, : case.num_pages].permute(2, 0, 1).cpu().double()
        assert torch.allclose(got, raw, atol=2e-3, rtol=1e-5)  # infinities must be equal
    only, nothing = fmha_sm100(case.q, k, v, plan, kv_indices=kv_indices, sm_scale=0.05, output_maxscore=False)
    assert nothing is None and torch.equal(only, out)


def test_offsets_move_the_queries(device):
    case = Case([5, 30], [300, 900], device, q_start=[-3, 100])
    ids = torch.tensor([0, 1, 2, -1], dtype=torch.int32, device=device).repeat(35, 2, 1)
    common = dict(num_kv_heads=2, page_size=PAGE, kv_block_num=4)
    plan = fmha_sm100_plan(case.qo_lens, case.kv_lens, 8, qo_offset=torch.tensor([-3, 100]), **common)
    out, _ = fmha_sm100(case.q, case.k_pages, case.v_pages, plan, case.kv_indices, ids)
    visible = torch.tensor([max(-(-(p + 1) // PAGE), 0) for p in [*range(-3, 2), *range(100, 130)]])[:, None, None]
    case.assert_attends(out, torch.where(ids.cpu() < visible, ids.cpu(), -1).to(device))
    elsewhere = fmha_sm100_plan(case.qo_lens, case.kv_lens, 8, **common)
    override = torch.tensor([-3, 100], dtype=torch.int32, device=device)
    moved, _ = fmha_sm100(case.q, case.k_pages, case.v_pages, elsewhere, case.kv_indices, ids, override)
    assert torch.equal(moved, out)
    one = fmha_sm100_plan(case.qo_lens, case.kv_lens, 8, qo_offset=7, **common)
    same, _ = fmha_sm100(case.q, case.k_pages, case.v_pages, elsewhere, case.kv_indices, ids, q_offset_override=7)
    assert torch.equal(same, fmha_sm100(case.q, case.k_pages, case.v_pages, one, case.kv_indices, ids)[0])


def test_tensors_given_to_write_to(device):
    case = Case([9, 1], [700, 300], device)
    plan = fmha_sm100_plan(case.qo_lens, case.kv_lens, 2, num_kv_heads=1, page_size=PAGE, output_maxscore=True)
    args = (case.proxy_q, case.proxy_k_pages, case.proxy_k_pages, plan, case.kv_indices)
    _, want = fmha_sm100(*args, output_o=False)
    by_head, by_token = (torch.full(shape, torch.nan, device=device) for shape in ((2, 8, 10), (10, 2, 128)))
    assert fmha_sm100(*args, max_score=by_head, output_o=False)[1] is by_head
    assert torch.equal(by_head, want[:, :8])
    assert fmha_sm100(*args, max_score=by_token, output_o=False)[1] is by_token
    assert torch.equal(by_token, want.permute(2, 0, 1))
    ids = sparse_topk_select(want, 16)
    assert torch.equal(sparse_topk_select(by_token, 16, max_score_layout="THK"), ids)
    given = torch.zeros_like(ids)
    assert sparse_topk_select(want, 16, num_valid_pages=6, output=given) is given and torch.equal(given, ids)
    plan = fmha_sm100_plan(case.qo_lens, case.kv_lens, 8, num_kv_heads=2, page_size=PAGE, kv_block_num=16)
    args = (case.q, case.k_pages, case.v_pages, plan)
    out = torch.full_like(case.q, torch.nan)
    result, _ = fmha_sm100(*args, kv_indices=case.kv_indices, kv_block_indexes=ids, out=out)
    assert result is out
    case.assert_attends(out, ids)
    wide = torch.cat([case.table, case.table], dim=1).to(device)
    by_query_head = ids.repeat_interleave(4, dim=1)
    assert torch.equal(fmha_sm100(*args, page_table=wide, kv_block_indexes=by_query_head)[0], out)
    longer = torch.cat([case.kv_indices, torch.tensor(case.unowned, dtype=torch.int32, device=device)])
    assert torch.equal(fmha_sm100(*args, kv_indices=longer, kv_block_indexes=ids.long(), check_input_valid=True)[0], out)


@needs_gpu
def test_more_than_2_to_the_31_scores():
    heads, tokens, blocks = 4, 66_000, 8192
    gen = torch.Generator(device="cuda").manual_seed(0)
    q = torch.randint(-3, 4, (tokens, heads, DIM), generator=gen, device="cuda").bfloat16()
    pages = torch.randint(-3, 4, (blocks, 1, PAGE, DIM), generator=gen, device="cuda").bfloat16()
    order = torch.randperm(blocks, generator=gen, device="cuda").int()
    plan = fmha_sm100_plan([tokens], [blocks * PAGE], heads, 1, page_size=PAGE, output_maxscore=True)
    _, max_score = fmha_sm100(q, pages, pages, plan, order, output_o=False)
    assert max_score.shape == (heads, blocks, tokens) and max_score.numel() > 2**31
    ids = sparse_topk_select(max_score, 16)
    keys = pages[order.long(), 0].float()
    for t in (0, tokens // 2, tokens - 1):
        dots = torch.einsum("hd,bjd->hbj", q[t].float(), keys)
        dots.flatten(1)[:, blocks * PAGE - tokens + t + 1 :] = -torch.inf
        want = dots.amax(-1)
        assert torch.equal(max_score[:, :, t], want)
        assert torch.equal(ids[t : t + 1].cpu(), naive_topk(want[None].cpu(), 16, [blocks]))


def naive_topk(scores, topk, limits, begin=0, end=0):
    """scores [T, H, blocks] on the CPU: forced blocks first, then by (score descending, block ascending); never -inf unless forced."""
    result = torch.full((*scores.shape[:2], topk), -1, dtype=torch.int32)
    for t in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            row = scores[t, h].tolist()[: limits[t]]
            forced = {b for b in range(len(row)) if b < begin or b >= len(row) - end}
            free = sorted((b for b in range(len(row)) if b not in forced and row[b] > -torch.inf), key=lambda b: (-row[b], b))
            chosen = sorted([*forced, *free[: topk - len(forced)]])
            result[t, h, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return result


@pytest.mark.parametrize("begin, end", [(0, 0), (2, 0), (0, 3), (1, 2)])
@pytest.mark.parametrize("topk", [4, 16])
@pytest.mark.parametrize("layout", ["HKT", "THK"])
def test_topk_against_a_naive_one(layout, topk, begin, end, device):
    gen = torch.Generator().manual_seed(topk + begin)
    scores = torch.randint(-5, 6, (37, 3, 128), generator=gen).float()  # many ties
    scores[torch.rand(scores.shape, generator=gen) < 0.3] = -torch.inf  # anywhere, not only behind the last visible block
    scores[:5] = -torch.inf
    scores[5:9, :, 9:] = -torch.inf
    given = scores.to(device) if layout == "THK" else scores.permute(1, 2, 0).contiguous().to(device)
    forced = dict(force_begin_blocks=begin, force_end_blocks=end, max_score_layout=layout)
    for valid in (128, 100, 11, 3):
        got = sparse_topk_select(given, topk, num_valid_pages=valid, **forced)
        assert torch.equal(got.cpu(), naive_topk(scores, topk, [valid] * 37, begin, end)), valid
    limits = torch.randint(1, 129, (37,), generator=gen)
    got = sparse_topk_select(given, topk, num_valid_pages=limits.to(device), **forced)
    assert torch.equal(got.cpu(), naive_topk(scores, topk, limits.tolist(), begin, end))
    assert torch.equal(given.cpu(), scores if layout == "THK" else scores.permute(1, 2, 0)), "the scores were written to"


def test_topk_in_pieces_and_of_nothing(device, monkeypatch):
    gen = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 40, 50, generator=gen).to(device)
    whole = sparse_topk_select(scores, 8)
    monkeypatch.setattr("openmsa.compat.topk._CHUNK_ELEMENTS", 2 * 40 * 7)
    assert torch.equal(sparse_topk_select(scores, 8), whole)
    assert (sparse_topk_select(scores, 8, num_valid_pages=0) == -1).all()
    assert sparse_topk_select(scores[:, :, :0], 8).shape == (0, 2, 8)
    nan = torch.full((1, 128, 4), torch.nan, device=device)
    nan[:, 3:] = -torch.inf
    assert sparse_topk_select(nan, 4, num_valid_pages=3)[:, 0].tolist() == [[0, 1, 2, -1]] * 4, "NaN ranks last, but is visible"


def make_lists(seqlens_q, seqlens_k, heads, topk, seed, causal):
    """q2k [Hkv, T, topk], unordered like their own test data where not causal."""
    rng = random.Random(seed)
    lists = torch.full((heads, sum(seqlens_q), topk), -1, dtype=torch.int32)
    token = 0
    for n_q, n_k in zip(seqlens_q, seqlens_k):
        for i in range(n_q):
            keys = min(n_k - n_q + i + 1, n_k) if causal else n_k
            blocks = max(-(-keys // PAGE), 0)
            for h in range(heads):
                ids = rng.sample(range(blocks), min(blocks, rng.randint(0, topk)))
                lists[h, token, : len(ids)] = torch.tensor(sorted(ids) if causal else ids, dtype=torch.int32)
            token += 1
    return lists


RAGGED = ([3, 0, 130, 1, 40], [700, 200, 130, 1, 1100])


@pytest.mark.parametrize("seqlens_q, seqlens_k", [RAGGED, ([50], [900]), ([1, 1], [0, 300]), ([0], [0])])
def test_k2q_against_a_naive_inversion(seqlens_q, seqlens_k, device):
    heads, topk = 2, 4
    lists = make_lists(seqlens_q, seqlens_k, heads, topk, 0, causal=False)
    batch = Batch.packed(seqlens_q, seqlens_k, device=device)
    rows = [(b, s) for b in range(max(-(-n // PAGE) for n in seqlens_k)) for s, n in enumerate(seqlens_k) if b * PAGE < n]
    options = dict(total_k=sum(seqlens_k), max_seqlen_k=max(seqlens_k), max_seqlen_q=max(seqlens_q))
    for extra in ({}, {"total_rows": len(rows)}):
        row_ptr, q_indices = build_k2q_csr(lists.to(device), batch.cu_seqlens_q, batch.cu_seqlens_k, PAGE, **options, **extra)
        assert row_ptr.dtype == q_indices.dtype == torch.int32 and q_indices.shape == (heads, lists.shape[1] * topk)
        assert row_ptr.shape[1] == len(rows) + 1 if extra or device == "cpu" else row_ptr.shape[1] > len(rows)
        first = torch.tensor([0, *seqlens_q]).cumsum(0).tolist()
        for h in range(heads):
            ends, got = row_ptr[h].tolist(), q_indices[h].tolist()
            for r, (block, seq) in enumerate(rows):
                mine = [i for i in range(seqlens_q[seq]) if block in lists[h, first[seq] + i].tolist()]
                assert got[ends[r] : ends[r + 1]] == mine, (h, block, seq)
            used = int((lists[h] >= 0).sum())
            assert set(ends[len(rows) :]) == {used} and set(got[used:]) <= {-1}


@pytest.mark.parametrize("with_schedule", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("paged", [True, False])
def test_attention_over_inverted_lists(paged, causal, with_schedule, device):
    case = Case(*RAGGED, device)
    lists = make_lists(*RAGGED, 2, 4, 1, causal)
    offsets = Batch.packed(*RAGGED, device=device)
    built = build_k2q_csr(lists.to(device), offsets.cu_seqlens_q, offsets.cu_seqlens_k, PAGE, total_k=sum(RAGGED[1]),
                          max_seqlen_k=max(RAGGED[1]), return_schedule=True)  # fmt: skip
    k, v, table = case.k_pages, case.v_pages, case.table.to(device)
    if not paged:
        k, v, table = case.unpaged(k), case.unpaged(v), None
    options = dict(cu_seqlens_q=offsets.cu_seqlens_q, cu_seqlens_k=offsets.cu_seqlens_k, max_seqlen_q=130, max_seqlen_k=1100,
                   causal=causal, page_table=table, schedule=built[2] if with_schedule else None)  # fmt: skip
    out, lse, cooler = sparse_atten_func(
        case.q, k, v, *built[:2], 4, return_softmax_lse=True, return_temperature_lse=True, lse_temperature_scale=2.0, **options
    )
    if not causal:
        case.batch.q_start = case.kv_lens
    ids = compat.arguments.ascending(lists, lists >= 0).transpose(0, 1)
    case.assert_attends(out, ids.to(device), lse)
    assert torch.equal(sparse_atten_func(case.q, k, v, *built[:2], 4, **options), out)
    config = MsaConfig(num_q_heads=8, num_kv_heads=2, head_dim=DIM, top_k=4, softmax_scale=DIM**-0.5 / 2)
    want = oracle(openmsa.sparse_attention, case.q, case.k_pages, case.v_pages, ids, batch=case.batch, config=config, return_lse=True)[1]
    seen = torch.isfinite(want)
    assert torch.equal(torch.isfinite(cooler.cpu()), seen) and (cooler.cpu().double()[seen] - want[seen]).abs().max() < 1e-3


def test_keys_in_use_end_before_the_pages(device):
    """seqused_k shortens sequences and, causally, moves the queries with it; lists may name blocks behind it."""
    seqlens_q, capacity, used = [20, 3], [1000, 700], [650, 400]
    case = Case(seqlens_q, used, device)
    case.table = torch.cat([case.table, torch.full((2, 3), case.unowned[0])], dim=1).int()
    lists = torch.arange(4, dtype=torch.int32).add(2).repeat(2, 23, 1)
    offsets = Batch.packed(seqlens_q, capacity, device=device)
    for schedule in (True, False):
        built = build_k2q_csr(lists.to(device), offsets.cu_seqlens_q, offsets.cu_seqlens_k, PAGE, total_k=1700, return_schedule=True)
        out, lse = sparse_atten_func(
            case.q, case.k_pages, case.v_pages, *built[:2], 4, cu_seqlens_q=offsets.cu_seqlens_q, cu_seqlens_k=offsets.cu_seqlens_k,
            max_seqlen_q=20, max_seqlen_k=1000, causal=True, page_table=case.table.to(device),
            seqused_k=torch.tensor(used, dtype=torch.int32, device=device), schedule=built[2] if schedule else None,
            return_softmax_lse=True,
        )  # fmt: skip
        ids = lists.transpose(0, 1).clone()
        for token, position in enumerate([*range(630, 650), *range(397, 400)]):
            ids[token][ids[token] > position // PAGE] = -1
        case.assert_attends(out, ids.to(device), lse)


def test_a_plan_serves_many_calls_without_waiting(device):
    case = Case([1, 1], [900, 300], device)
    plan = fmha_sm100_plan([1, 1], [900, 300], 8, 2, page_size=PAGE, kv_block_num=16)
    assert "sparse" in repr(plan)
    ids = case.selection().to(device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        proxy = fmha_sm100_plan(case.qo_lens, case.kv_lens, 2, 1, page_size=PAGE, output_maxscore=True)
        _, max_score = fmha_sm100(case.proxy_q, case.proxy_k_pages, case.proxy_v_pages, proxy, case.kv_indices, output_o=False)
        chosen = sparse_topk_select(max_score, 16, num_valid_pages=8)
        out, _ = fmha_sm100(case.q, case.k_pages, case.v_pages, plan, case.kv_indices, chosen)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(chosen, ids)
    case.assert_attends(out, ids)


@needs_gpu
def test_a_step_can_be_captured_in_a_graph():
    case = Case([1, 1], [2900, 300], "cuda")
    proxy = fmha_sm100_plan(case.qo_lens, case.kv_lens, 2, 1, page_size=PAGE, output_maxscore=True)
    plan = fmha_sm100_plan(case.qo_lens, case.kv_lens, 8, 2, page_size=PAGE, kv_block_num=16)

    def step():
        _, max_score = fmha_sm100(case.proxy_q, case.proxy_k_pages, case.proxy_v_pages, proxy, case.kv_indices, output_o=False)
        return fmha_sm100(case.q, case.k_pages, case.v_pages, plan, case.kv_indices, sparse_topk_select(max_score, 16))[0]

    want = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, want)


def expect(argument, words, kind=openmsa.InvalidArgumentError):
    return pytest.raises(kind, match=rf"(?s)^{argument}\b.*{words}")


def test_low_precision_is_refused_by_name(device):
    case = Case([2], [300], device)
    plan = fmha_sm100_plan(case.qo_lens, case.kv_lens, 8, 2, page_size=PAGE)
    not_yet = openmsa.UnsupportedError
    for option, value in (("use_fp8_kvcache", True), ("kv_dtype", "nvfp4")):
        with expect(option, "not supported yet", not_yet):
            fmha_sm100_plan(case.qo_lens, case.kv_lens, 8, 2, page_size=PAGE, **{option: value})
    tensors = {"q": case.q, "k": case.k_pages, "v": case.v_pages}
    for name in tensors:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8):
            changed = {**tensors, name: torch.zeros_like(tensors[name], dtype=dtype)}
            with expect(name, "(float8|uint8).*not supported yet", not_yet):
                fmha_sm100(*changed.values(), plan, case.kv_indices)
            with expect(name, "not supported yet", not_yet):
                sparse_atten_func(*changed.values(), None, None, 16, cu_seqlens_q=None, max_seqlen_q=2, max_seqlen_k=300)
    for scale in ("q_scale", "k_scale", "v_scale", "o_scale", "k_global_scale"):
        for value in (0.5, torch.ones(1)):
            with expect(scale, "not supported yet", not_yet):
                fmha_sm100(*tensors.values(), plan, case.kv_indices, **{scale: value})
    out, _ = fmha_sm100(*tensors.values(), plan, case.kv_indices)
    assert torch.equal(fmha_sm100(*tensors.values(), plan, case.kv_indices, q_scale=1.0, k_scale=1)[0], out)
    lens = dict(cu_seqlens_q=None, max_seqlen_q=2, max_seqlen_k=300)
    with expect("partial_dtype", "not supported yet", not_yet):
        sparse_atten_func(*tensors.values(), None, None, 16, partial_dtype=torch.float8_e4m3fn, **lens)


def test_mistakes_are_refused_by_name(device):
    case = Case([2, 1], [300, 40], device)
    q, k, v, pages = case.q, case.k_pages, case.v_pages, case.kv_indices
    lens = (case.qo_lens, case.kv_lens)
    dense = fmha_sm100_plan(*lens, 8, 2, page_size=PAGE)
    sparse = fmha_sm100_plan(*lens, 8, 2, page_size=PAGE, kv_block_num=4)
    ids = torch.zeros(3, 2, 4, dtype=torch.int32, device=device)
    with expect("kv_segment_lens", "1 lengths for 2"):
        fmha_sm100_plan([2, 1], [300], 8, 2)
    with expect("qo_segment_lens", "running sums"):
        fmha_sm100_plan([-2, 1], [300, 40], 8, 2)
    with expect("num_qo_heads", "same number"):
        fmha_sm100_plan(*lens, 8, 3)
    with expect("page_size", "paged"):
        fmha_sm100_plan(*lens, 8, 2, kv_block_num=4)
    with expect("qo_offset", "1 entries for 2"):
        fmha_sm100_plan(*lens, 8, 2, qo_offset=torch.tensor([1]))
    with expect("output_maxscore", "dense pass", openmsa.UnsupportedError):
        fmha_sm100_plan(*lens, 8, 2, page_size=PAGE, kv_block_num=4, output_maxscore=True)
    with pytest.raises(TypeError, match="nonsense"):
        fmha_sm100_plan(*lens, 8, 2, nonsense=1)
    with expect("plan_info", "unchanged"):
        fmha_sm100(q, k, v, (False, 0, 2, {}, None), pages)
    with expect("q", "T = 3"):
        fmha_sm100(q[:2], k, v, dense, pages)
    with expect("q", "Hq = 8"):
        fmha_sm100(q[:, :4], k, v, dense, pages)
    with expect("k", "page_size = 128"):
        fmha_sm100(q, k[:, :, :64], v, dense, pages)
    with expect("k", "no page_size"):
        fmha_sm100(q, k, v, fmha_sm100_plan(*lens, 8, 2), pages)
    with expect("kv_indices", "missing"):
        fmha_sm100(q, k, v, dense)
    with expect("kv_indices", "on meta, but q is on"):
        fmha_sm100(q, k, v, dense, pages.to("meta"))
    with expect("v", "list"):
        fmha_sm100(q, k, [v], dense, pages)
    with expect("kv_indices", "3 entries.*4 pages"):
        fmha_sm100(q, k, v, dense, pages[:-1])
    with expect("page_table", "2 columns"):
        fmha_sm100(q, k, v, dense, page_table=case.table[:, :2].to(device))
    with expect("output_o", "nothing is left"):
        fmha_sm100(q, k, v, dense, pages, output_o=False)
    with expect("kv_block_indexes", "dense pass"):
        fmha_sm100(q, k, v, dense, pages, ids)
    with expect("kv_block_indexes", "missing"):
        fmha_sm100(q, k, v, sparse, pages)
    with expect("kv_block_indexes", "kv_block_num = 4"):
        fmha_sm100(q, k, v, sparse, pages, ids[..., :3])
    with expect("kv_block_indexes", "int32"):
        fmha_sm100(q, k, v, sparse, pages, ids.float())
    with expect("q_offset_override", "causal"):
        fmha_sm100(q, k, v, fmha_sm100_plan(*lens, 8, 2, page_size=PAGE, causal=False), pages, q_offset_override=3)
    scored = fmha_sm100_plan(*lens, 8, 2, page_size=PAGE, output_maxscore=True)
    with expect("max_score", "at least 3 tiles"):
        fmha_sm100(q, k, v, scored, pages, max_score=torch.zeros(8, 2, 3, device=device))
    with expect("max_score", "float32"):
        sparse_topk_select(torch.zeros(1, 8, 2, device=device, dtype=torch.float64), 4)
    with expect("num_valid_pages", "0 to 8"):
        sparse_topk_select(torch.zeros(1, 8, 2, device=device), 4, num_valid_pages=9)
    with expect("force_begin_blocks", "together"):
        sparse_topk_select(torch.zeros(1, 8, 2, device=device), 4, force_begin_blocks=3, force_end_blocks=2)
    with expect("max_score_layout", "HKT"):
        sparse_topk_select(torch.zeros(1, 8, 2, device=device), 4, max_score_layout="TKH")
    # Index data that lies: on the CPU refused at once, on a GPU when asked.
    for wrong in ([0, 7, -1, -1], [1, 0, -1, -1]):
        with expect("block_ids", "(must be|ascending)"):
            bad = torch.tensor(wrong, dtype=torch.int32, device=device).repeat(3, 2, 1)
            fmha_sm100(q, k, v, sparse, pages, bad, check_input_valid=True)
    with expect("batch.page_table", ""):
        fmha_sm100(q, k, v, sparse, pages + 100, ids.masked_fill(torch.arange(4, device=device) > 0, -1), check_input_valid=True)


def test_csr_mistakes(device):
    offsets = Batch.packed([2], [300], device=device)
    lists = torch.zeros(2, 2, 4, dtype=torch.int32, device=device)
    with expect("cu_seqlens_q", "int32"):
        build_k2q_csr(lists, offsets.cu_seqlens_q.long(), offsets.cu_seqlens_k, PAGE, total_k=300)
    with expect("q2k_indices", "Hkv"):
        build_k2q_csr(lists[0], offsets.cu_seqlens_q, offsets.cu_seqlens_k, PAGE, total_k=300)
    with expect("kv_block_size", "at least 1"):
        build_k2q_csr(lists, offsets.cu_seqlens_q, offsets.cu_seqlens_k, 0, total_k=300)
    if device == "cpu":
        with expect("q2k_indices", "do not have"):
            build_k2q_csr(lists + 3, offsets.cu_seqlens_q, offsets.cu_seqlens_k, PAGE, total_k=300)
        with expect("total_rows", "3 blocks"):
            build_k2q_csr(lists, offsets.cu_seqlens_q, offsets.cu_seqlens_k, PAGE, total_rows=2)
    row_ptr, q_indices = build_k2q_csr(lists, offsets.cu_seqlens_q, offsets.cu_seqlens_k, PAGE, total_k=300)
    q, kv = torch.zeros(2, 8, DIM, device=device, dtype=torch.bfloat16), torch.zeros(300, 2, DIM, device=device, dtype=torch.bfloat16)
    options = dict(cu_seqlens_q=offsets.cu_seqlens_q, cu_seqlens_k=offsets.cu_seqlens_k, max_seqlen_q=2, max_seqlen_k=300)
    with expect("k2q_row_ptr", "Hkv = 2"):
        sparse_atten_func(q, kv, kv, row_ptr[:1], q_indices, 4, **options)
    with expect("schedule", "build_k2q_csr"):
        sparse_atten_func(q, kv, kv, row_ptr, q_indices, 4, schedule=object(), **options)
    with expect("return_temperature_lse", "return_softmax_lse"):
        sparse_atten_func(q, kv, kv, row_ptr, q_indices, 4, return_temperature_lse=True, **options)
    with expect("blk_kv", "pages of 128"):
        pages = torch.zeros(3, 2, PAGE, DIM, device=device, dtype=torch.bfloat16)
        table = torch.arange(3, device=device, dtype=torch.int32)[None]
        sparse_atten_func(q, pages, pages, row_ptr, q_indices, 4, blk_kv=64, page_table=table, **options)


def test_install_registers_a_module():
    compat.uninstall()
    module = compat.install()
    try:
        assert compat.install() is module is sys.modules["fmha_sm100"]
        import fmha_sm100 as package
        import fmha_sm100.api
        from fmha_sm100 import build_k2q_csr as build, sparse_atten_func as attend
        from fmha_sm100.sparse import sparse_atten_func as again

        assert package.fmha_sm100 is fmha_sm100.fmha_sm100 is fmha_sm100.api.fmha_sm100 is compat.fmha_sm100
        assert build is compat.build_k2q_csr and attend is again is compat.sparse_atten_func
        assert importlib.util.find_spec("fmha_sm100") is not None
        with pytest.raises(ImportError):
            import fmha_sm100.cute  # noqa: F401
    finally:
        compat.uninstall()
    assert not {"fmha_sm100", "fmha_sm100.api", "fmha_sm100.sparse"} & set(sys.modules)


@pytest.mark.parametrize("imported", [False, True])
def test_install_leaves_theirs_alone(imported, tmp_path, monkeypatch):
    compat.uninstall()
    (tmp_path / "fmha_sm100").mkdir()
    (tmp_path / "fmha_sm100" / "__init__.py").write_text("whose = 'theirs'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if imported:
        monkeypatch.setitem(sys.modules, "fmha_sm100", importlib.import_module("fmha_sm100"))
    with expect("replace", f"another fmha_sm100 is {'already imported' if imported else 'installed'}"):
        compat.install()
    import fmha_sm100

    assert fmha_sm100.whose == "theirs"
    try:
        assert compat.install(replace=True) is sys.modules["fmha_sm100"] and not hasattr(sys.modules["fmha_sm100"], "whose")
    finally:
        compat.uninstall()
        sys.modules.pop("fmha_sm100", None)
