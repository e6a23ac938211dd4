"""write_pages against torch's own indexing: dtypes, strides, padding, NumPy; inside PyTorch: opcheck, torch.compile, autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import openmsa
from openmsa import InvalidArgumentError
from test_ops import SMALL

PAGES, HEADS, BLOCK, DIM, INDEX_DIM = 5, SMALL.num_kv_heads, SMALL.block_size, SMALL.head_dim, SMALL.index_dim
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_pools(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    shapes = ((PAGES, HEADS, BLOCK, DIM), (PAGES, HEADS, BLOCK, DIM), (PAGES, BLOCK, INDEX_DIM))
    return tuple(torch.full(shape, 7.0, dtype=dtype) for shape in shapes)


def make_rows(n: int, rng: torch.Generator, dtype: torch.dtype = torch.float32, lead: int = 0) -> tuple[torch.Tensor, ...]:
    """k, v and k_idx as views of a fused projection, which starts with `lead` other elements."""
    width = HEADS * DIM
    fused = torch.randn(n, lead + 2 * width + INDEX_DIM, generator=rng).to(dtype)
    k, v, k_idx = fused[:, lead:].split([width, width, INDEX_DIM], dim=1)
    return k.view(n, HEADS, DIM), v.view(n, HEADS, DIM), k_idx


def expected(pools, slots, rows) -> tuple[torch.Tensor, ...]:
    """Row by row."""
    pools = tuple(pool.clone() for pool in pools)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, place = divmod(slot, BLOCK)
            for pool, x in zip(pools, rows):
                pool[page, ..., place, :] = x[t]
    return pools


def assert_equal(found, want) -> None:
    for x, y in zip(found, want):
        assert torch.equal(x, y)


SLOTS = {
    "one": [17],
    "padding": [5, -1, 0, -100, 79],
    "only_padding": [-1, -1],
    "none": [],
    "again": [3, 40, 3, 3],  # on the CPU the last stays
    "many": list(range(79, -1, -1)),
}


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [0, 3])
def test_rows_go_to_their_slots(slots, dtype, lead, backend, rng):
    pools, rows, slots = make_pools(dtype), make_rows(len(slots), rng, dtype, lead), torch.tensor(slots, dtype=torch.int64)
    for x in rows:
        x[slots < 0] = torch.nan
    want = expected(pools, slots, rows)
    arrays = [x.clone().numpy() for x in pools] if dtype != torch.bfloat16 else None
    assert openmsa.write_pages(*rows, slots, *pools, backend=backend) is None
    assert_equal(pools, want)
    if arrays:
        openmsa.write_pages(*(x.numpy() for x in rows), slots.numpy(), *arrays, backend=backend)
        assert_equal([torch.from_numpy(x) for x in arrays], want)


def test_a_pool_of_keys_beside_values(rng):
    """[num_pages, 2, Hkv, Bk, D], as some engines lay their cache out."""
    both, (_, _, k_idx_pages) = torch.full((PAGES, 2, HEADS, BLOCK, DIM), 7.0), make_pools()
    rows, slots = make_rows(9, rng), torch.arange(30, 39)
    pools = (both[:, 0], both[:, 1], k_idx_pages)
    want = expected(pools, slots, rows)
    openmsa.write_pages(*rows, slots, *pools)
    assert_equal(pools, want)


def test_threads_change_nothing(rng):
    pools, rows, slots = make_pools(), make_rows(3000, rng), torch.randint(-5, PAGES * BLOCK, (3000,), generator=rng)
    want = expected(pools, slots, rows)
    for num_threads in (1, 2, 5):
        found = make_pools()
        openmsa.write_pages(*rows, slots, *found, num_threads=num_threads)
        assert_equal(found, want)


def test_wrong_arguments_write_nothing(backend, rng):
    pools, (k, v, k_idx), slots = make_pools(), make_rows(3, rng), torch.tensor([1, 2, 3])
    for change, argument, text in (
        (dict(k=k.bfloat16()), "k", "has dtype bfloat16, but k_pages has float32"),
        (dict(v=v[:, :1]), "v", r"axis 1 \(Hkv\) is 1 but must be 2 = k_pages.shape\[1\]"),
        (dict(k_idx=k_idx[:2]), "k_idx", r"is 2 but must be 3 = k.shape\[0\]"),
        (dict(k_idx=k_idx[:, :8]), "k_idx", r"is 8 but must be 16 = k_idx_pages.shape\[2\]"),
        (dict(k=k.transpose(1, 2).contiguous().transpose(1, 2)), "k", "stride 2 on its last axis"),
        (dict(slots=slots.int()), "slots", "has dtype int32; it must be one of: int64"),
        (dict(slots=slots[None]), "slots", "rank 2"),
        (dict(slots=torch.tensor([1, 80, 3])), "slots", r"slots\[1\] is 80, but k_pages has 80 slots"),
        (dict(slots=torch.tensor([1, 2, 2**63 - 1])), "slots", r"slots\[2\] is 9223372036854775807"),
        (dict(v_pages=pools[0]), "k_pages", "shares memory with v_pages"),
        (dict(k_idx=k_idx.numpy()), "k_idx", "expected a PyTorch tensor"),
        (dict(slots=[1, 2, 3]), "slots", "expected a PyTorch tensor"),
    ):
        call = dict(k=k, v=v, k_idx=k_idx, slots=slots, k_pages=pools[0], v_pages=pools[1], k_idx_pages=pools[2]) | change
        with pytest.raises(InvalidArgumentError, match=text) as error:
            openmsa.write_pages(**call, backend=backend)
        assert error.value.argument == argument
        assert all((x == 7).all() for x in pools)


def test_read_only_arrays(rng):
    """Rows may be, pages may not."""
    pools, rows = [x.numpy() for x in make_pools()], [x.numpy() for x in make_rows(2, rng)]
    for x in rows:
        x.flags.writeable = False
    openmsa.write_pages(*rows, np.array([4, 5]), *pools)
    pools[1].flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="v_pages is read-only"):
        openmsa.write_pages(*rows, np.array([4, 5]), *pools)


def test_opcheck(rng):
    args = (*make_rows(3, rng), torch.tensor([1, -1, 70]), *make_pools(), "auto", 0, False)
    results = torch.library.opcheck(torch.ops.openmsa.write_pages.default, args)
    assert set(results.values()) == {"SUCCESS"}


def step(fused, slots, cache):
    """A layer's: what it writes is what it reads, and the other layer keeps what it has."""
    k, v, k_idx = fused.split([HEADS * DIM, HEADS * DIM, INDEX_DIM], dim=1)
    k = (2 * k).view(-1, HEADS, DIM)
    cache.write(slots, k, v.view(-1, HEADS, DIM), k_idx, 1)
    return cache.k[1].sum() + cache.k_idx[1].sum()


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_writes_in_place(compiler, rng):
    """In one graph, over changing lengths, and into the pool itself rather than into a copy that is copied back."""
    from torch._inductor.utils import run_and_get_code

    cache, other = (openmsa.PagedKvCache(SMALL, PAGES, num_layers=2) for _ in range(2))
    for x in (cache.k, cache.v, cache.k_idx, other.k, other.v, other.k_idx):
        x.zero_()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for n in (4, 1, 7):
        fused = torch.randn(n, 2 * HEADS * DIM + INDEX_DIM, generator=rng)
        slots = torch.randperm(PAGES * BLOCK, generator=rng)[:n]
        slots[n // 2] = -1
        found, code = run_and_get_code(compiled, fused, slots, cache)
        torch.testing.assert_close(found, step(fused, slots, other))
        assert_equal((cache.k, cache.v, cache.k_idx), (other.k, other.v, other.k_idx))
        for text in code:
            assert "openmsa.write_pages" in text
            assert f"empty_strided_cpu((2, {PAGES}" not in text and f"empty_strided_cpu(({PAGES}" not in text


def test_no_gradient_passes_and_autograd_sees_the_write(rng):
    pools, (k, v, k_idx), slots = make_pools(), make_rows(3, rng), torch.tensor([1, 2, 3])
    k.requires_grad_()
    weight = torch.ones(PAGES, HEADS, BLOCK, DIM, requires_grad=True)
    product = (weight * pools[0]).sum()  # keeps the pool for its backward pass
    openmsa.write_pages(k, v, k_idx, slots, *pools)
    assert not any(x.requires_grad for x in pools)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        openmsa.write_pages(k, v, k_idx, slots + 20, *pools)
    assert_equal(pools, expected(make_pools(), torch.cat([slots, slots + 20]), [torch.cat([x, x]) for x in (k, v, k_idx)]))
