"""Every operator on every backend against the golden computation, over layouts, dtypes, strides and array kinds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import golden
import openmsa
from golden import Layout
from openmsa import Batch, MsaConfig

SMALL = MsaConfig(num_q_heads=4, num_kv_heads=2, head_dim=16, index_dim=16, block_size=16, top_k=3)
CONFIGS = {
    "small": SMALL,
    "init_and_local": MsaConfig(
        num_q_heads=6, num_kv_heads=2, head_dim=32, index_dim=48, block_size=32, top_k=4, num_init_blocks=1, num_local_blocks=2
    ),
    "scaled": MsaConfig(num_q_heads=3, num_kv_heads=3, head_dim=64, index_dim=16, block_size=16, top_k=1, softmax_scale=0.3),
    "one_group": MsaConfig(num_q_heads=16, num_kv_heads=1, head_dim=128, index_dim=128, block_size=48, top_k=2),
    "no_forced": MsaConfig(num_q_heads=4, num_kv_heads=4, head_dim=16, index_dim=32, block_size=16, top_k=2, num_local_blocks=0),
}
LAYOUTS = {
    "prefill": Layout([100], [100]),
    "pack": Layout([127, 129, 1, 2, 3, 5, 128], [127, 129, 1, 2, 3, 5, 128]),
    "chunk": Layout([33, 20], [97, 180]),
    "decode": Layout([1, 1, 1], [130, 1, 49]),
    "speculative": Layout([4, 4], [130, 66]),
    "holes": Layout([0, 5, 0, 3, 0], [40, 5, 0, 0, 7]),
    "more_queries_than_keys": Layout([9], [5]),
    "tokens_equal_groups": Layout([2], [70]),
    "context_parallel": Layout([10, 12], [90, 64], [35, 60]),
    "nothing": Layout([0], [0]),
    "empty_batch": Layout([], []),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def all_outputs(data: golden.Data, batch: Batch, config: MsaConfig, **options) -> dict:
    """What every operator says about one input."""
    scores = openmsa.block_scores(data.q_idx, data.k_idx, batch, config, **options)
    block_ids = openmsa.index_select(data.q_idx, data.k_idx, batch, config, **options)
    sparse = openmsa.sparse_attention(data.q, data.k, data.v, block_ids, batch, config, return_lse=True, **options)
    decode = openmsa.sparse_decode(data.q, data.k, data.v, block_ids, batch, config, return_lse=True, **options)
    dense = openmsa.dense_attention(data.q, data.k, data.v, batch, config, return_lse=True, return_block_max=True, **options)
    whole = openmsa.msa_attention(
        data.q, data.k, data.v, data.q_idx, data.k_idx, batch, config, return_lse=True, return_block_ids=True, **options
    )
    return {
        "scores": scores,
        "selected": openmsa.select_blocks(scores, batch, config, **options),
        "block_ids": block_ids,
        "sparse": sparse,
        "decode": decode,
        "dense": dense,
        "whole": whole,
    }


def check_all(found: dict, data: golden.Data, layout: Layout, config: MsaConfig) -> None:
    scores = golden.block_scores(data, layout, config)
    assert torch.equal(found["scores"].double(), scores)
    block_ids = golden.select(scores, layout, config)
    assert torch.equal(found["selected"], block_ids)
    assert torch.equal(found["block_ids"], block_ids)
    assert torch.equal(found["whole"][2], block_ids)
    mask = golden.attention_mask(layout, config, block_ids)
    for name in ("sparse", "decode", "whole"):
        golden.assert_attention(*found[name][:2], data, config, mask)
    golden.assert_attention(*found["dense"][:2], data, config, golden.attention_mask(layout, config, None))
    torch.testing.assert_close(found["dense"][2].double(), golden.block_max(data, layout, config), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_layouts(layout, paged, backend, rng):
    data = golden.make_data(layout, SMALL, rng)
    inputs, batch = golden.to_pages(data, layout, SMALL, rng) if paged else (data, layout.batch())
    check_all(all_outputs(inputs, batch, SMALL, backend=backend), data, layout, SMALL)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_configs_and_dtypes(config, dtype, backend, rng):
    layout = Layout([60, 3], [230, 130])
    data = golden.make_data(layout, config, rng, dtype)
    check_all(all_outputs(data, layout.batch(), config, backend=backend), data, layout, config)


def test_float64_on_the_reference_backend(rng):
    layout = Layout([60, 3], [230, 130])
    data = golden.make_data(layout, SMALL, rng, torch.float64)
    found = all_outputs(data, layout.batch(), SMALL, backend="reference")
    check_all(found, data, layout, SMALL)
    assert found["scores"].dtype == found["sparse"][1].dtype == torch.float64


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view with gaps in every axis but the last, poisoned between them."""
    big = torch.full([2 * n for n in tensor.shape[:-1]] + [tensor.shape[-1] + 8], math.nan, dtype=tensor.dtype)
    view = big[tuple(slice(None, None, 2) for _ in tensor.shape[:-1])][..., : tensor.shape[-1]]
    view.copy_(tensor)
    assert not view.is_contiguous()
    return view


@pytest.mark.parametrize("layout", [Layout([1], [130]), Layout([5], [130]), Layout([40, 2], [130, 67])], ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_strided_inputs(layout, paged, backend, rng):
    data = golden.make_data(layout, SMALL, rng)
    inputs, batch = golden.to_pages(data, layout, SMALL, rng) if paged else (data, layout.batch())
    want = all_outputs(inputs, batch, SMALL, backend=backend)
    views = golden.Data(*(strided(getattr(inputs, name)) for name in ("q", "k", "v", "q_idx", "k_idx")))
    found = all_outputs(views, batch, SMALL, backend=backend)
    assert torch.equal(found["block_ids"], want["block_ids"])
    assert torch.equal(found["sparse"][0], want["sparse"][0]) and torch.equal(found["dense"][0], want["dense"][0])
    # A list that is a view, and lists given by hand.
    big = torch.full((*want["block_ids"].shape[:2], 2 * SMALL.top_k), 7, dtype=torch.int32)
    big[:, :, : SMALL.top_k] = want["block_ids"]
    lists = big[:, :, : SMALL.top_k]
    for attend in (openmsa.sparse_attention, openmsa.sparse_decode):
        out = attend(views.q, views.k, views.v, lists, batch, SMALL, backend=backend)
        torch.testing.assert_close(out, want["sparse"][0])


def test_own_block_is_causal(backend):
    """KNOWN_FAULTS 13: a huge value one token ahead, in the query's own block, must not move the output."""
    config = MsaConfig(num_q_heads=1, num_kv_heads=1, head_dim=16, index_dim=16, block_size=128, top_k=2)
    for prefix in (0, 128):
        q, k, v = torch.ones(1, 1, 16), torch.ones(prefix + 8, 1, 16), torch.zeros(prefix + 8, 1, 16)
        v[prefix + 6] = 1e4
        batch = Batch.packed([1], [prefix + 8], [prefix + 5])
        for attend in (openmsa.sparse_attention, openmsa.sparse_decode):
            lists = torch.tensor([[[0, 1] if prefix else [0, -1]]], dtype=torch.int32)
            assert not attend(q, k, v, lists, batch, config, backend=backend).any()


def test_groups_select_independently(backend):
    """KNOWN_FAULTS 14: four groups that each prefer another block."""
    config = MsaConfig(num_q_heads=4, num_kv_heads=4, head_dim=16, index_dim=16, block_size=16, top_k=2)
    q_idx, k_idx = torch.zeros(1, 4, 16), torch.zeros(96, 16)
    for g in range(4):
        q_idx[0, g, g] = 1
        k_idx[16 * g + 5, g] = 9
    block_ids = openmsa.index_select(q_idx, k_idx, Batch.single(1, 96), config, backend=backend)
    assert block_ids.tolist() == [[[g, 5] for g in range(4)]]


def test_far_block_is_found(backend):
    """KNOWN_FAULTS 10: 8,192 blocks, the best one is number 8,000."""
    config = MsaConfig(num_q_heads=1, num_kv_heads=1, head_dim=16, index_dim=16, block_size=16, top_k=2)
    k_idx = torch.zeros(8192 * 16, 16)
    k_idx[8000 * 16 + 3] = 1
    block_ids = openmsa.index_select(torch.ones(1, 1, 16), k_idx, Batch.single(1, len(k_idx)), config, backend=backend)
    assert block_ids.tolist() == [[[8000, 8191]]]


def test_speculative_rows_equal_single_steps(backend, rng):
    """KNOWN_FAULTS 25."""
    layout = Layout([4], [130])
    data = golden.make_data(layout, SMALL, rng)
    together = all_outputs(data, layout.batch(), SMALL, backend=backend)["whole"]
    for t in range(4):
        one = Batch.packed([1], [130], [126 + t])
        single = openmsa.msa_attention(
            data.q[t : t + 1], data.k, data.v, data.q_idx[t : t + 1], data.k_idx, one, SMALL,
            return_lse=True, return_block_ids=True, backend=backend,
        )  # fmt: skip
        for whole, part in zip(together, single):
            assert torch.equal(whole[t : t + 1], part)


def test_decode_and_prefill_paths_of_msa_attention_agree(backend, rng):
    limit = openmsa.ops.MAX_DECODE_QUERIES
    for num_q in (limit, limit + 1):
        layout = Layout([num_q], [200])
        data = golden.make_data(layout, SMALL, rng)
        check_all(all_outputs(data, layout.batch(), SMALL, backend=backend), data, layout, SMALL)


@pytest.mark.parametrize("layout", [Layout([1], [130]), Layout([4, 1, 0, 2], [130, 49, 20, 1]), Layout([3], [2])], ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_few_queries_equal_the_two_steps(layout, paged, kind, backend, rng):
    """msa_attention is index_select and sparse_decode here, in one call."""
    data = golden.make_data(layout, SMALL, rng, exact_index=False)
    data, batch = golden.to_pages(data, layout, SMALL, rng) if paged else (data, layout.batch())
    data = as_numpy(data) if kind == "numpy" else data
    args = (data.q, data.k, data.v, data.q_idx, data.k_idx, batch, SMALL)
    ids = openmsa.index_select(data.q_idx, data.k_idx, batch, SMALL, backend=backend)
    out, lse = openmsa.sparse_decode(data.q, data.k, data.v, ids, batch, SMALL, return_lse=True, backend=backend)
    for with_lse in (False, True):
        for with_ids in (False, True):
            found = openmsa.msa_attention(*args, return_lse=with_lse, return_block_ids=with_ids, backend=backend)
            want = (out, *((lse,) if with_lse else ()), *((ids,) if with_ids else ()))
            for x, y in zip(want, found if isinstance(found, tuple) else (found,), strict=True):
                assert type(x) is type(y) and x.dtype == y.dtype
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_defaults_come_from_shapes(rng):
    config = MsaConfig(num_q_heads=4, num_kv_heads=2, head_dim=16, index_dim=32)
    data = golden.make_data(Layout([300], [300]), config, rng)
    tensors = (data.q, data.k, data.v, data.q_idx, data.k_idx)
    assert torch.equal(openmsa.msa_attention(*tensors), openmsa.msa_attention(*tensors, Batch.single(300), config))


def test_results_do_not_depend_on_threads(backend, rng):
    layout = Layout([150, 3], [150, 77])
    data = golden.make_data(layout, SMALL, rng, torch.bfloat16)
    one = all_outputs(data, layout.batch(), SMALL, backend=backend, num_threads=1)
    for threads in (2, 3, 5):
        many = all_outputs(data, layout.batch(), SMALL, backend=backend, num_threads=threads)
        assert torch.equal(one["block_ids"], many["block_ids"])
        for name in ("sparse", "decode", "dense"):
            assert torch.equal(one[name][0], many[name][0]) and torch.equal(one[name][1], many[name][1])


def as_numpy(data: golden.Data) -> golden.Data:
    return golden.Data(*(getattr(data, name).numpy() for name in ("q", "k", "v", "q_idx", "k_idx")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_numpy_in_numpy_out(dtype, paged, backend, rng):
    layout = Layout([60, 3], [230, 130])
    data = golden.make_data(layout, SMALL, rng, dtype)
    if paged:
        data, batch = golden.to_pages(data, layout, SMALL, rng)
    else:
        batch = layout.batch()
    fields = {name: getattr(batch, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table", "q_start")}
    numpy_batch = Batch(**{name: None if value is None else value.numpy() for name, value in fields.items()})
    want = all_outputs(data, batch, SMALL, backend=backend)
    for b in (batch, numpy_batch):
        found = all_outputs(as_numpy(data), b, SMALL, backend=backend)
        for name, value in want.items():
            pairs = zip(value, found[name]) if isinstance(value, tuple) else [(value, found[name])]
            for x, y in pairs:
                assert isinstance(y, np.ndarray)
                np.testing.assert_array_equal(x.numpy(), y)
    # And an array batch serves tensors.
    assert torch.equal(all_outputs(data, numpy_batch, SMALL, backend=backend)["whole"][0], want["whole"][0])


def test_numpy_bfloat16(rng):
    """bfloat16 arrays of the ml_dtypes package, whose memory NumPy itself cannot name."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    layout = Layout([60], [60])
    data = golden.make_data(layout, SMALL, rng, torch.bfloat16)
    arrays = [getattr(data, name).view(torch.int16).numpy().view(bfloat16) for name in ("q", "k", "v", "q_idx", "k_idx")]
    found = openmsa.msa_attention(*arrays, layout.batch(), SMALL)
    want = openmsa.msa_attention(data.q, data.k, data.v, data.q_idx, data.k_idx, layout.batch(), SMALL)
    assert found.dtype == bfloat16 and torch.equal(torch.from_numpy(found.view(np.int16)), want.view(torch.int16))


def test_read_only_arrays_are_taken(rng):
    data = as_numpy(golden.make_data(Layout([20], [20]), SMALL, rng))
    for name in ("q", "k", "v", "q_idx", "k_idx"):
        getattr(data, name).flags.writeable = False
    assert openmsa.msa_attention(data.q, data.k, data.v, data.q_idx, data.k_idx, Batch.single(20), SMALL).shape == data.q.shape


def test_batch_from_lists_equals_batch_from_tensors():
    lists = Batch(cu_seqlens_q=[0, 1, 3], seqlens_k=[5, 40], page_table=[[0, -1, -1], [2, 1, 3]], q_start=[4, 38])
    assert lists.cu_seqlens_q.dtype == torch.int32 and lists.page_table.shape == (2, 3)
    assert (lists.max_seqlen_q, lists.max_seqlen_k, lists.num_seqs, lists.is_paged) == (2, 40, 2, True)
    assert lists.positions().tolist() == [4, 38, 39]
    assert Batch.packed([2, 0, 3], [6, 1, 3]).positions().tolist() == [4, 5, 0, 1, 2]
    assert "paged" in repr(lists) and "max_seqlen_k=40" in repr(lists)
    mixed = Batch(cu_seqlens_q=np.array([0, 2], dtype=np.int32), cu_seqlens_k=[0, 9])
    assert isinstance(mixed.cu_seqlens_k, np.ndarray) and mixed.max_seqlen_k == 9
