"""write_pages on the GPU against the CPU: every width of copy, slots it must refuse, graphs, streams, torch.compile. No call waits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import openmsa  # noqa: E402
from cuda_support import needs_gpu, no_waiting  # noqa: E402

pytestmark = needs_gpu

BF16 = torch.bfloat16


def draw(n, heads, dim, index_dim, dtype=BF16, lead=0, seed=0):
    """k, v and k_idx as views of a fused projection on the GPU, which starts with `lead` other elements."""
    gen = torch.Generator().manual_seed(seed)
    width = heads * dim
    fused = torch.randn(n, lead + 2 * width + index_dim, generator=gen).to(dtype).cuda()
    k, v, k_idx = fused[:, lead:].split([width, width, index_dim], dim=1)
    return k.view(n, heads, dim), v.view(n, heads, dim), k_idx


def nan_pools(pages, heads, block, dim, index_dim, dtype=BF16):
    shapes = ((pages, heads, block, dim), (pages, heads, block, dim), (pages, block, index_dim))
    return tuple(torch.full(shape, float("nan"), dtype=dtype, device="cuda") for shape in shapes)


def some_slots(n, num_slots, seed=0):
    """Different slots, every fourth row or so a padding row."""
    gen = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_slots, generator=gen)[:n]
    slots[torch.rand(n, generator=gen) < 0.25] = -1
    return slots.cuda()


def assert_written(pools, rows, slots, before):
    """As the reference backend writes them, NaN in untouched slots included."""
    want = [x.cpu() for x in before]
    openmsa.write_pages(*(x.cpu() for x in rows), slots.cpu(), *want, backend="reference")
    for found, right in zip(pools, want):
        kind = torch.int16 if found.element_size() == 2 else torch.int32
        assert torch.equal(found.cpu().view(kind), right.view(kind))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "n, heads, dim, index_dim, block, lead",
    [
        (1, 4, 128, 128, 128, 0),
        (256, 4, 128, 128, 128, 8192),  # a batch of decoding steps, behind the queries of a fused projection
        (5000, 4, 128, 128, 128, 0),
        (33, 2, 96, 64, 64, 4),
        (33, 3, 64, 64, 64, 2),
        (33, 1, 64, 128, 64, 1),
        (20, 5, 7, 3, 5, 0),
    ],
)
def test_rows_go_to_their_slots(n, heads, dim, index_dim, block, lead, dtype):
    num_pages = n // block + 2
    rows, pools = draw(n, heads, dim, index_dim, dtype, lead), nan_pools(num_pages, heads, block, dim, index_dim, dtype)
    slots, before = some_slots(n, num_pages * block), [x.clone() for x in pools]
    torch.cuda.synchronize()
    with no_waiting():
        openmsa.write_pages(*rows, slots, *pools)
    openmsa.synchronize("cuda")
    assert_written(pools, rows, slots, before)


def test_a_pool_of_keys_beside_values():
    """[num_pages, 2, Hkv, Bk, D], as some engines lay their cache out."""
    both = torch.full((6, 2, 2, 64, 64), float("nan"), dtype=BF16, device="cuda")
    pools = (both[:, 0], both[:, 1], nan_pools(6, 2, 64, 64, 64)[2])
    rows, slots, before = draw(50, 2, 64, 64), some_slots(50, 6 * 64), [x.clone() for x in pools]
    openmsa.write_pages(*rows, slots, *pools)
    openmsa.synchronize("cuda")
    assert_written(pools, rows, slots, before)


@pytest.mark.parametrize("bad", [6 * 64, 2**31 + 3, 2**32 + 3, 2**63 - 1])
def test_a_slot_beyond_the_pool_is_told_and_not_written(bad):
    rows, pools, slots = draw(40, 2, 64, 64), nan_pools(6, 2, 64, 64, 64), some_slots(40, 6 * 64)
    before = [x.clone() for x in pools]
    slots[7] = bad
    with no_waiting():
        openmsa.write_pages(*rows, slots, *pools)
    with pytest.raises(openmsa.InvalidArgumentError, match=rf"slots: \[7\] is {bad}, beyond the 6 pages"):
        openmsa.synchronize("cuda")
    openmsa.synchronize("cuda")  # told once
    slots[7] = -1
    assert_written(pools, rows, slots, before)


def test_graph_replay_with_other_slots_and_padding():
    """Captured once; the host never looks at a slot, so a bad one is told after its replay, and the next replay is sound again."""
    rows, pools, slots = draw(24, 4, 128, 128), nan_pools(5, 4, 128, 128, 128), some_slots(24, 5 * 128)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    before = [x.clone() for x in pools]
    openmsa.write_pages(*rows, torch.full_like(slots, -1), *pools)  # what a first call sets up, a capture must find
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        openmsa.write_pages(*rows, slots, *pools)
    assert all(x.isnan().all() for x in pools)
    for seed in range(1, 5):
        for x, y in zip(rows, draw(24, 4, 128, 128, seed=seed)):
            x.copy_(y)
        slots.copy_(some_slots(24, 5 * 128, seed) if seed != 3 else torch.full_like(slots, -1))
        torch.cuda.synchronize()
        with no_waiting():
            graph.replay()
        openmsa.synchronize("cuda")
        assert_written(pools, rows, slots, before)
        before = [x.clone() for x in pools]
    slots[0] = 5 * 128
    graph.replay()
    with pytest.raises(openmsa.InvalidArgumentError, match="slots"):
        openmsa.synchronize("cuda")
    slots.copy_(some_slots(24, 5 * 128, 9))
    graph.replay()
    openmsa.synchronize("cuda")


def test_the_callers_stream_orders_it():
    late, pools, slots = draw(30, 2, 64, 64), nan_pools(4, 2, 64, 64, 64), some_slots(30, 4 * 64)
    before, rows = [x.clone() for x in pools], draw(30, 2, 64, 64, seed=5)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # about 50 ms
        for x, y in zip(late, rows):
            x.copy_(y)
        openmsa.write_pages(*late, slots, *pools)
        assert not stream.query()  # queued while the stream slept
    stream.synchronize()
    assert_written(pools, rows, slots, before)


def test_page_offsets_are_64_bit():
    """Page 131,072 times a stride of 16,384 elements is 2^31."""
    far = 131072
    pools = [torch.empty(far + 1, 1, 128, 128, dtype=BF16, device="cuda") for _ in range(2)]
    pools.append(torch.empty(far + 1, 128, 128, dtype=BF16, device="cuda"))
    for pool in pools:
        pool[0], pool[far] = 5, 6  # page 0 is where a product of 32 bits would end
    k, v, k_idx = draw(2, 1, 128, 128)
    openmsa.write_pages(k, v, k_idx, torch.tensor([far * 128 + 127, far * 128], device="cuda"), *pools)
    openmsa.synchronize("cuda")
    for pool, x in zip(pools, (k[:, 0], v[:, 0], k_idx)):
        page = pool[far].view(128, 128)
        assert (pool[0] == 5).all() and torch.equal(page[127], x[0]) and torch.equal(page[0], x[1]) and (page[1:127] == 6).all()


def test_refusals():
    (k, v, k_idx), pools, slots = draw(3, 2, 64, 64), nan_pools(4, 2, 64, 64, 64), torch.arange(3, device="cuda")
    for call, text in (
        ((k.cpu(), v, k_idx, slots, *pools), "k is on cpu, but k_pages is on cuda:0"),
        ((k, v, k_idx, slots.cpu(), *pools), "slots is on cpu"),
        ((k, v.half(), k_idx, slots, *pools), "v has dtype float16, but k_pages has bfloat16"),
        ((k, v, k_idx, slots.int(), *pools), "slots has dtype int32"),
        ((k, v, k_idx, slots, pools[0], pools[0], pools[2]), "shares memory"),
    ):
        with pytest.raises(openmsa.InvalidArgumentError, match=text):
            openmsa.write_pages(*call)
    openmsa.synchronize("cuda")
    assert all(x.isnan().all() for x in pools)


def test_opcheck():
    pools = tuple(x.nan_to_num(0) for x in nan_pools(4, 2, 64, 64, 64))  # opcheck compares, and NaN differs from itself
    args = (*draw(3, 2, 64, 64), torch.tensor([1, -1, 70], device="cuda"), *pools, "auto", 0, False)
    results = torch.library.opcheck(torch.ops.openmsa.write_pages.default, args)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile_in_one_graph(mode):
    def step(fused, slots, *pools):
        k, v, k_idx = (2 * fused).split([128, 128, 64], dim=1)
        openmsa.write_pages(k.view(-1, 2, 64), v.view(-1, 2, 64), k_idx, slots, *pools)
        return fused.sum()

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    pools, others = nan_pools(4, 2, 64, 64, 64), nan_pools(4, 2, 64, 64, 64)
    for seed in range(4):  # reduce-overhead warms up, captures, and then replays
        fused = torch.randn(9, 320, generator=torch.Generator().manual_seed(seed)).to(BF16).cuda()
        slots = some_slots(9, 4 * 64, seed)
        compiled(fused, slots, *pools)
        step(fused, slots, *others)
    openmsa.synchronize("cuda")
    for x, y in zip(pools, others):
        assert torch.equal(x.view(torch.int16), y.view(torch.int16)) and not x.isnan().all()
