"""PagedKvCache on the GPU: what is written is what attention reads, without waiting, inside graphs, and on the caller's stream."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import golden  # noqa: E402
import openmsa  # noqa: E402
from cuda_support import needs_gpu, no_waiting  # noqa: E402
from golden import Layout  # noqa: E402
from openmsa import Batch, MsaConfig, PagedKvCache  # noqa: E402

pytestmark = needs_gpu

CONFIG = MsaConfig(num_q_heads=12, num_kv_heads=3, head_dim=64, index_dim=128, block_size=64, top_k=4)
BF16 = torch.bfloat16


def poisoned_cache(num_pages: int, **options) -> PagedKvCache:
    """Every slot that no token was written to holds NaN, as uninitialised memory may."""
    cache = PagedKvCache(CONFIG, num_pages, dtype=BF16, device="cuda", **options)
    for pool in (cache.k, cache.v, cache.k_idx):
        pool.fill_(float("nan"))
    return cache


def data_of(seqlens_q, seqlens_k, rng) -> golden.Data:
    data = golden.make_data(Layout(seqlens_q, seqlens_k), CONFIG, rng, BF16)
    return golden.Data(**{name: x.cuda() for name, x in vars(data).items()})


def attend(data: golden.Data, step, rows=slice(None), layer=0):
    k, v, k_idx = step.keys(layer)
    return openmsa.msa_attention(
        data.q[rows], k, v, data.q_idx[rows], k_idx, step.batch, CONFIG, return_lse=True, return_block_ids=True
    )


def assert_same(found, want):
    """Lists of exact data are equal; the rest up to the rounding of other tiles and of the stores: one step of bfloat16."""
    for x, y in zip(found[:2], want[:2]):
        assert not x.isnan().any()
        torch.testing.assert_close(x.float(), y.float(), atol=4e-3, rtol=2**-7)
    assert torch.equal(found[2], want[2])


@pytest.mark.parametrize("seqlens_q, seqlens_k", [([3, 1, 16], [700, 1, 640]), ([200, 0, 65], [641, 130, 65])])
def test_attention_over_the_cache_equals_packed_attention(seqlens_q, seqlens_k, rng):
    data = data_of(seqlens_q, seqlens_k, rng)
    cache = poisoned_cache(40)
    for seq, (_, tk, _) in enumerate(Layout(seqlens_q, seqlens_k).rows()):
        for first in range(tk.start, tk.stop, 150):  # in several pieces
            piece = slice(first, min(first + 150, tk.stop))
            cache.append(seq, data.k[piece], data.v[piece], data.k_idx[piece])
        for found, want in zip(cache.gather(seq), (data.k[tk], data.v[tk], data.k_idx[tk])):
            assert torch.equal(found, want)
    options = dict(return_lse=True, return_block_ids=True)
    batch = cache.batch([0, 1, 2], seqlens_q)
    found = openmsa.msa_attention(data.q, cache.k[0], cache.v[0], data.q_idx, cache.k_idx[0], batch, CONFIG, **options)
    packed = Batch.packed(seqlens_q, seqlens_k, device="cuda")
    assert_same(found, openmsa.msa_attention(data.q, data.k, data.v, data.q_idx, data.k_idx, packed, CONFIG, **options))
    host = golden.Data(**{name: x.cpu() for name, x in vars(data).items()})
    on_cpu = openmsa.msa_attention(host.q, host.k, host.v, host.q_idx, host.k_idx, packed.to("cpu"), CONFIG, **options)
    assert_same([x.cpu() for x in found], on_cpu)
    openmsa.synchronize("cuda")


def test_steps_do_not_wait_for_the_gpu(rng):
    """Prefill, decode, speculation with a rejected tail, copies that part ways: only what reads results back waits."""
    cache = poisoned_cache(60, num_layers=2)
    lengths = [[300, 200], [1, 1], [4, 4], [1, 1]]
    data = [data_of(n, n, rng) for n in lengths]
    torch.cuda.synchronize()
    outs = []
    with no_waiting():
        for n, x in zip(lengths, data):
            step = cache.extend(["a", "b"], n)
            for layer in range(2):
                step.write(x.k, x.v, x.k_idx, layer)
                outs.append(attend(x, step, layer=layer))
            if n == [4, 4]:
                cache.crop("a", cache.seqlen("a") - 3)
        cache.copy("b", "c")
        step = cache.extend(["b", "c"], [1, 1])
        for layer in range(2):
            step.write(data[1].k, data[1].v, data[1].k_idx, layer)
        cache.batch(["a", "b", "c"])
    openmsa.synchronize("cuda")
    for first, second in zip(outs[::2], outs[1::2]):
        for x, y in zip(first, second):
            assert torch.equal(x, y) and not x.float().isnan().any()
    assert cache.gather("a")[0].isfinite().all() and cache.gather("c")[0].isfinite().all()


@pytest.mark.parametrize("queries", [1, 4])
def test_a_graph_holds_a_step_and_is_replayed_with_others(queries, rng):
    """Captured once; replayed over page borders, with sequences in other places, and after a copy took pages of its own."""
    cache, other = poisoned_cache(60, num_layers=2), poisoned_cache(60, num_layers=2)
    prompt = data_of([126, 250], [126, 250], rng)
    for c in (cache, other):
        step = c.extend(["a", "b"], [126, 250])
        for layer in range(2):
            step.write(prompt.k, prompt.v, prompt.k_idx, layer)
        c.copy("b", "c")
    static = data_of([queries] * 2, [queries] * 2, rng)

    def both_layers(step):
        outs = []
        for layer in range(2):
            step.write(static.k, static.v, static.k_idx, layer)
            outs.append(attend(static, step, layer=layer))
        return outs

    step = cache.extend(["a", "b"], [queries] * 2, max_seqlen=640)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both_layers(step)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outs = both_layers(step)
    for seq in "ab":
        cache.crop(seq, cache.seqlen(seq) - queries)  # what was only tried
    for seqs in (["a", "b"], ["a", "b"], ["c", "a"], ["b", "a"], ["a", "c"]):
        for name, x in vars(data_of([queries] * 2, [queries] * 2, rng)).items():
            getattr(static, name).copy_(x)
        with no_waiting():
            step = cache.extend(seqs, [queries] * 2, into=step)
            graph.replay()
        for found, want in zip(outs, both_layers(other.extend(seqs, [queries] * 2))):
            assert_same(found, want)
    openmsa.synchronize("cuda")
    for seq in "abc":
        for layer in range(2):
            for x, y in zip(cache.gather(seq, layer), other.gather(seq, layer)):
                assert torch.equal(x, y)


@pytest.mark.parametrize("slots", [[-1, 5, 0], [3, -1, 200], [-1, -1, -1], [2, 1, 0]], ids=str)
def test_slots_of_a_serving_engine(slots, rng):
    """Padding is skipped without waiting and inside a graph, whatever the padding rows hold; slot 0 keeps what it had."""
    row = data_of([3], [3], rng)
    for x, slot in ((x, i) for x in (row.k, row.v, row.k_idx) for i, slot in enumerate(slots) if slot < 0):
        x[slot] = float("nan")
    old = data_of([256], [256], rng)
    where = torch.tensor(slots).cuda()
    for captured in (False, True):
        cache = poisoned_cache(4)
        cache.append("a", old.k, old.v, old.k_idx)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                cache.write(where, row.k, row.v, row.k_idx)
            graph.replay()
        else:
            with no_waiting():
                cache.write(where, row.k, row.v, row.k_idx)
        for found, before, new in zip(cache.gather("a"), (old.k, old.v, old.k_idx), (row.k, row.v, row.k_idx)):
            want = before.clone()
            for i, slot in enumerate(slots):
                if slot >= 0:
                    want[cache_row(cache, slot)] = new[i]
            assert torch.equal(found, want)
    openmsa.synchronize("cuda")


def cache_row(cache: PagedKvCache, slot: int) -> int:
    """The position in sequence "a" that a slot is."""
    pages = cache.batch(["a"]).page_table[0].tolist()
    return pages.index(slot // CONFIG.block_size) * CONFIG.block_size + slot % CONFIG.block_size


def test_refusals(rng):
    cache = poisoned_cache(4)
    row = data_of([1], [1], rng)
    with pytest.raises(openmsa.InvalidArgumentError, match="k lies on cpu, this cache on cuda:0"):
        cache.append("a", row.k.cpu(), row.v, row.k_idx)
    cache.write(torch.tensor([256]).cuda(), row.k, row.v, row.k_idx)
    with pytest.raises(openmsa.InvalidArgumentError, match=r"slots: \[0\] is 256, beyond the 4 pages"):
        openmsa.synchronize("cuda")
    assert cache.k.isnan().all() and cache.v.isnan().all() and cache.k_idx.isnan().all()
    assert cache.seqs == ()


def test_the_callers_stream_orders_everything(rng):
    """Inputs that a slow stream is still making: a step on that stream must see them, though the default stream is idle."""
    data = data_of([130], [130], rng)
    want = openmsa.msa_attention(
        data.q,
        data.k,
        data.v,
        data.q_idx,
        data.k_idx,
        Batch.single(130, device="cuda"),
        CONFIG,
        return_lse=True,
        return_block_ids=True,
    )
    late = golden.Data(**{name: torch.full_like(x, float("nan")) for name, x in vars(data).items()})
    cache = poisoned_cache(4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # about 50 ms
        for name, x in vars(data).items():
            getattr(late, name).copy_(x)
        step = cache.extend(["a"], [130])
        step.write(late.k, late.v, late.k_idx)
        found = attend(late, step)
        assert not stream.query()  # all of it was queued while the stream slept
    stream.synchronize()
    assert_same(found, want)
