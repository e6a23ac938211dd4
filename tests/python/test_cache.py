"""PagedKvCache: what is appended is what attention reads, through copies, crops and reuse; index keys always come along."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import golden
import openmsa
from golden import Layout
from openmsa import InvalidArgumentError, MsaConfig, OutOfPagesError, PagedKvCache
from test_ops import SMALL

BLOCK = SMALL.block_size


def rows(n: int, rng: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    data = golden.make_data(Layout([0], [n]), SMALL, rng, dtype)
    return data.k, data.v, data.k_idx


def poisoned_cache(num_pages: int, **options) -> PagedKvCache:
    cache = PagedKvCache(SMALL, num_pages, **options)
    for pool in (cache.k, cache.v, cache.k_idx):
        pool.fill_(math.nan)
    return cache


def assert_holds(cache: PagedKvCache, seq, want: tuple[torch.Tensor, ...], layer: int = 0) -> None:
    assert cache.seqlen(seq) == len(want[0])
    for found, expected in zip(cache.gather(seq, layer), want):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_over_the_cache_equals_packed_attention(dtype, backend, rng):
    layout = Layout([3, 1, 20], [130, 1, 64])
    data = golden.make_data(layout, SMALL, rng, dtype)
    cache = poisoned_cache(20, dtype=dtype)
    for seq, (_, tk, _) in enumerate(layout.rows()):
        for first in range(tk.start, tk.stop, 50):  # in several pieces
            piece = slice(first, min(first + 50, tk.stop))
            cache.append(seq, data.k[piece], data.v[piece], data.k_idx[piece])
    batch = cache.batch([0, 1, 2], layout.seqlens_q)
    options = dict(return_lse=True, return_block_ids=True, backend=backend)
    found = openmsa.msa_attention(data.q, cache.k[0], cache.v[0], data.q_idx, cache.k_idx[0], batch, SMALL, **options)
    want = openmsa.msa_attention(data.q, data.k, data.v, data.q_idx, data.k_idx, layout.batch(), SMALL, **options)
    for x, y in zip(found, want):
        assert torch.equal(x, y)


def test_one_step_serves_all_layers(rng):
    cache = poisoned_cache(8, num_layers=3)
    held = {seq: [] for seq in "ab"}
    for lengths in ([20, 3], [1, 1], [0, 30]):
        step = cache.extend("ab", lengths)
        assert step.positions.tolist() == [p for s, n in zip("ab", lengths) for p in range(cache.seqlen(s) - n, cache.seqlen(s))]
        assert torch.equal(step.positions, step.batch.positions())
        data = [rows(sum(lengths), rng) for _ in range(3)]
        for layer in range(3):
            step.write(*data[layer], layer)
        for seq, piece in zip("ab", (slice(0, lengths[0]), slice(lengths[0], None))):
            held[seq].append([tuple(x[piece] for x in layer) for layer in data])
    for seq in "ab":
        for layer in range(3):
            assert_holds(cache, seq, tuple(torch.cat(parts) for parts in zip(*(step[layer] for step in held[seq]))), layer)


def test_index_keys_follow_copies_and_crops(rng, backend):
    """KNOWN_FAULTS 22: the lists of a copied and cropped sequence are those of its real index keys, not of zeroed ones."""
    config = MsaConfig(num_q_heads=2, num_kv_heads=2, head_dim=16, index_dim=16, block_size=128, top_k=16)
    layout = Layout([1], [2049])
    data = golden.make_data(layout, config, rng)
    cache = PagedKvCache(config, 40)
    cache.append("source", data.k, data.v, data.k_idx)
    cache.append("source", *(torch.ones_like(x[:70]) for x in (data.k, data.v, data.k_idx)))
    cache.copy("source", "copy")
    cache.free("source")
    cache.crop("copy", 2049)

    def selected(k_idx):
        return openmsa.index_select(data.q_idx, k_idx, cache.batch(["copy"]), config, backend=backend)

    want = openmsa.index_select(data.q_idx, data.k_idx, layout.batch(), config, backend=backend)
    assert torch.equal(selected(cache.k_idx[0]), want)
    assert not torch.equal(selected(torch.zeros_like(cache.k_idx[0])), want)


def test_copies_share_pages_until_one_writes(rng):
    cache = poisoned_cache(5)
    first, more_a, more_b = rows(BLOCK + 4, rng), rows(3, rng), rows(5, rng)
    cache.append("a", *first)
    cache.copy("a", "b")
    assert cache.num_free_pages == 3
    cache.append("b", *more_b)
    assert cache.num_free_pages == 2  # b took its own copy of the page that was half full
    cache.append("a", *more_a)
    assert cache.num_free_pages == 2  # a is alone on its page now
    assert_holds(cache, "a", tuple(torch.cat(pair) for pair in zip(first, more_a)))
    assert_holds(cache, "b", tuple(torch.cat(pair) for pair in zip(first, more_b)))
    cache.free("a")
    assert_holds(cache, "b", tuple(torch.cat(pair) for pair in zip(first, more_b)))
    cache.free("b")
    assert cache.num_free_pages == 5 and cache.seqs == ()


def test_both_copies_may_grow_in_one_step(rng):
    cache = poisoned_cache(2)
    first, more = rows(4, rng), rows(2, rng)
    cache.append("a", *first)
    cache.copy("a", "b")
    cache.extend(["a", "b"], [1, 1]).write(*more)  # needs exactly one page: the second to write is alone on the old one
    for row, seq in enumerate("ab"):
        assert_holds(cache, seq, tuple(torch.cat([x, y[row : row + 1]]) for x, y in zip(first, more)))


def test_running_out_of_pages_changes_nothing(rng):
    cache = poisoned_cache(3)
    first = rows(BLOCK + 1, rng)
    cache.append("a", *first)
    with pytest.raises(OutOfPagesError, match="needs 2 more pages of 16 tokens, 1 are free"):
        cache.extend(["new", "a"], [1, BLOCK])
    assert cache.seqs == ("a",) and cache.num_free_pages == 1
    assert_holds(cache, "a", first)
    cache.append("a", *rows(2 * BLOCK - 1, rng))
    with pytest.raises(OutOfPagesError):
        cache.append("a", *rows(1, rng))


def test_negative_slots_are_skipped(rng):
    """KNOWN_FAULTS 6: a negative slot must not write before the pool or into its last page."""
    guard = 5.0
    cache = poisoned_cache(3)
    for pool in (cache.k, cache.v, cache.k_idx):
        pool.fill_(guard)
    k, v, k_idx = rows(3, rng)
    cache.write(torch.tensor([5, -2, 7]), k, v, k_idx)
    assert (
        torch.equal(cache.k[0, 0, :, 5], k[0])
        and torch.equal(cache.v[0, 0, :, 7], v[2])
        and torch.equal(cache.k_idx[0, 0, 5], k_idx[0])
    )
    for pool in (cache.k.transpose(2, 3), cache.v.transpose(2, 3), cache.k_idx):
        untouched = torch.ones(pool.shape[1:3], dtype=torch.bool)
        untouched[0, [5, 7]] = False
        assert (pool[0][untouched] == guard).all()


@pytest.mark.parametrize("trust_slots", [False, True])
@pytest.mark.parametrize("slots", [[-1, 5, 0], [3, -1, -1], [-1, -1, -1], [2, 1, 0]], ids=str)
def test_padding_rows_change_nothing(slots, trust_slots, rng):
    """Whatever stands in padding rows, NaN too, and also where slot 0 is written by a real row or holds something."""
    cache = poisoned_cache(1)
    old, new = rows(BLOCK, rng), rows(3, rng)
    cache.append("a", *old)
    for row, slot in enumerate(slots):
        if slot < 0:
            for x in new:
                x[row] = math.nan
    cache.write(torch.tensor(slots), *new, trust_slots=trust_slots)
    want = tuple(x.clone() for x in old)
    for row, slot in enumerate(slots):
        for x, y in zip(want, new):
            if slot >= 0:
                x[slot] = y[row]
    assert_holds(cache, "a", want)


def test_a_step_is_refilled_in_place(rng):
    """What a CUDA graph needs: the same tensors, holding another step; the results are those of a step made anew."""
    cache, other = poisoned_cache(20), poisoned_cache(20)
    first = rows(5 * BLOCK, rng)
    with torch.inference_mode():
        step = cache.extend(["a", "b"], [2 * BLOCK, 3 * BLOCK], max_seqlen=5 * BLOCK)
        other.extend(["a", "b"], [2 * BLOCK, 3 * BLOCK]).write(*first)
    step.write(*first)
    assert step.batch.max_seqlen_k == 5 * BLOCK and step.batch.page_table.shape == (2, 5)
    decode = cache.extend(["a", "b"], [1, 1], max_seqlen=5 * BLOCK)
    where = [x.data_ptr() for x in (decode.slots, decode.positions, decode.batch.page_table, decode.batch.seqlens_k)]
    other.extend(["a", "b"], [1, 1])
    cache.copy("b", "c")
    other.copy("b", "c")
    for seqs in (["b", "a"], ["c", "a"], ["a", "b"]):  # "c" must first take its own copy of the page it shares
        new = rows(2, rng)
        decode = cache.extend(seqs, [1, 1], into=decode)
        fresh = other.extend(seqs, [1, 1])
        assert decode.seqs == tuple(seqs)
        assert where == [x.data_ptr() for x in (decode.slots, decode.positions, decode.batch.page_table, decode.batch.seqlens_k)]
        width = fresh.batch.page_table.shape[1]
        assert torch.equal(decode.batch.page_table[:, :width], fresh.batch.page_table)
        assert (decode.batch.page_table[:, width:] == -1).all()
        for name in ("cu_seqlens_q", "seqlens_k"):
            assert torch.equal(getattr(decode.batch, name), getattr(fresh.batch, name))
        assert torch.equal(decode.positions, fresh.positions) and torch.equal(decode.positions, decode.batch.positions())
        decode.write(*new)
        for row, seq in enumerate(seqs):
            for found, expected in zip(cache.gather(seq), new):
                assert torch.equal(found[-1], expected[row])


def test_a_step_that_does_not_fit_is_refused_and_nothing_changes(rng):
    cache = poisoned_cache(20)
    step = cache.extend(["a", "b"], [1, 1], max_seqlen=BLOCK)
    for call, text in (
        (lambda: cache.extend(["a"], [1], into=step), "made for 2 sequences with 2 new tokens.*seqlens is"),
        (lambda: cache.extend(["a", "b"], [2, 0], into=step), "at most 1 each"),
        (lambda: cache.extend(["a", "c"], [1, 2], into=step), "made for 2 sequences"),
        (lambda: poisoned_cache(2).extend(["a", "b"], [1, 1], into=step), "another cache"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            call()
    for _ in range(BLOCK - 1):
        cache.extend(["a", "b"], [1, 1], into=step)
    with pytest.raises(InvalidArgumentError, match=f"up to {BLOCK} tokens; the longest would hold {BLOCK + 1}.*larger max_seqlen"):
        cache.extend(["a", "b"], [1, 1], into=step)
    assert cache.seqlen("a") == cache.seqlen("b") == BLOCK and cache.num_free_pages == 18


@pytest.mark.skipif(not openmsa.list_backends()[-1].compiled, reason="built without CUDA: there are no limits to tell")
def test_a_cache_that_the_gpu_kernels_could_not_read_is_refused():
    """Before any memory is taken, so also where there is no GPU."""
    fits = MsaConfig(num_q_heads=2, num_kv_heads=2, head_dim=64, index_dim=64, block_size=64)
    for config, dtype, reason in ((fits, None, "float32 is not one of"), (SMALL, torch.bfloat16, "head_dim 16 is not in 64..128")):
        with pytest.raises(openmsa.UnsupportedError, match=f"device is cuda.*{reason}.*dtype=torch.bfloat16"):
            PagedKvCache(config, 4, dtype=dtype, device="cuda")


def test_wrong_arguments(rng):
    cache = poisoned_cache(3)
    k, v, k_idx = rows(4, rng)
    cache.append("a", k, v, k_idx)
    for call, text in (
        (lambda: cache.append("a", k.bfloat16(), v, k_idx), r"k is torch.bfloat16 \[4, 2, 16\]; this cache takes torch.float32"),
        (lambda: cache.append("a", k, v[:3], k_idx), r"v is torch.float32 \[3, 2, 16\]"),
        (lambda: cache.append("a", k, v, k_idx[:, :8]), r"k_idx is torch.float32 \[4, 8\]"),
        (lambda: cache.append("a", k, v, k_idx.to("meta")), "k_idx lies on meta, this cache on cpu"),
        (lambda: cache.write(torch.tensor([48]), k[:1], v[:1], k_idx[:1]), r"slots\[0\] is 48, but k_pages has 48 slots"),
        (lambda: cache.write(torch.tensor([1.0]), k[:1], v[:1], k_idx[:1]), "slots has dtype float32"),
        (lambda: cache.write(torch.tensor([1]), k[:1].bfloat16(), v[:1], k_idx[:1]), "k has dtype bfloat16, but k_pages has float32"),
        (lambda: cache.write(torch.tensor([1]), k[:1], v[:1], k_idx[:1].to("meta")), "k_idx lies on meta"),
        (lambda: cache.write(torch.tensor([1]), k[:1], v[:1], k_idx[:1], layer=1), "layer is 1.*0 to 0"),
        (lambda: cache.extend(["a", "a"], [1, 1]), "each sequence once"),
        (lambda: cache.extend(["a"], [-1]), "at least 0"),
        (lambda: cache.crop("a", 5), "seqlen is 5; 'a' holds 4"),
        (lambda: cache.copy("a", "a"), "held already"),
        (lambda: cache.free("b"), "'b' is not held"),
        (lambda: cache.batch(["b"]), "'b' is not held"),
        (lambda: cache.batch(["a"], [1, 1]), "2 lengths for 1"),
        (lambda: PagedKvCache(SMALL, 4, num_layers=2).append("a", k, v, k_idx), "extend"),
        (lambda: PagedKvCache(SMALL, 0), "num_pages is 0"),
        (lambda: PagedKvCache(MsaConfig(num_q_heads=1, num_kv_heads=1, head_dim=16), 1), "index_dim is 0"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            call()
        assert_holds(cache, "a", (k, v, k_idx))


def test_repr_tells_how_full_it_is(rng):
    cache = poisoned_cache(3)
    cache.append("a", *rows(20, rng))
    assert "1 sequences, 2 of 3 pages in use" in repr(cache)


class AnyOrderOfOperations(RuleBasedStateMachine):
    """A cache against plain lists of tensors, over random operations."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator().manual_seed(0)
        self.cache = poisoned_cache(12)
        self.held: dict[int, tuple[torch.Tensor, ...]] = {}
        self.next_name = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.held)))

    @rule(n=st.sampled_from([0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 40]))
    def start(self, n: int) -> None:
        self.grow({self.next_name: n})
        self.next_name += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grow_some(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True))
        self.grow({name: data.draw(st.integers(0, 20)) for name in names})

    def grow(self, lengths: dict[int, int]) -> None:
        new = {name: rows(n, self.rng) for name, n in lengths.items()}
        try:
            step = self.cache.extend(list(lengths), list(lengths.values()))
        except OutOfPagesError:
            return
        step.write(*(torch.cat(parts) for parts in zip(*new.values())))
        for name, tensors in new.items():
            old = self.held.get(name, tuple(x[:0] for x in tensors))
            self.held[name] = tuple(torch.cat(pair) for pair in zip(old, tensors))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        source = self.pick(data)
        self.cache.copy(source, self.next_name)
        self.held[self.next_name] = self.held[source]
        self.next_name += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        name = self.pick(data)
        n = data.draw(st.integers(0, len(self.held[name][0])))
        self.cache.crop(name, n)
        self.held[name] = tuple(x[:n] for x in self.held[name])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = self.pick(data)
        self.cache.free(name)
        del self.held[name]

    @invariant()
    def holds_what_was_written(self) -> None:
        assert set(self.cache.seqs) == set(self.held)
        for name, tensors in self.held.items():
            assert_holds(self.cache, name, tensors)

    @invariant()
    def loses_no_page(self) -> None:
        table = self.cache.batch(list(self.held)).page_table if self.held else torch.empty(0, dtype=torch.int32)
        in_use = set(table.flatten().tolist()) - {-1}
        assert len(in_use) + self.cache.num_free_pages == self.cache.num_pages


TestAnyOrderOfOperations = AnyOrderOfOperations.TestCase
TestAnyOrderOfOperations.settings = settings(
    deadline=None, max_examples=30, stateful_step_count=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
