"""Gradients and the index KL loss: against finite differences, against MSA written in plain PyTorch, and as PyTorch uses them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import golden
import openmsa
from golden import Layout
from openmsa import Batch, MsaConfig
from test_ops import CONFIGS, SMALL
from test_torch_ops import call_of

TINY = MsaConfig(num_q_heads=4, num_kv_heads=2, head_dim=3, index_dim=5, block_size=4, top_k=2, softmax_scale=0.9, index_scale=0.7)
LAYOUTS = {
    "pack": Layout([127, 129, 1, 2, 3, 5, 128], [127, 129, 1, 2, 3, 5, 128]),
    "chunk": Layout([33, 20], [97, 180]),
    "few_queries": Layout([1, 4], [130, 66]),
    "holes": Layout([0, 5, 0, 3, 0], [40, 5, 0, 0, 7]),
    "context_parallel": Layout([10, 12], [90, 64], [35, 60]),
    "no_queries": Layout([0], [20]),
}
OPS = ["sparse", "dense", "kl_selected", "kl_all"]
# Of the largest gradient, as docs/numerics.md has it of outputs of size one.
SMALL_TERM = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}
INPUTS = {"sparse": ("q", "k", "v"), "dense": ("q", "k", "v"), "kl_selected": ("q_idx", "k_idx"), "kl_all": ("q_idx", "k_idx")}


def run(op: str, data: golden.Data, batch: Batch, config: MsaConfig, block_ids: torch.Tensor, **options) -> torch.Tensor:
    """The differentiable result of one of OPS."""
    attention = {"return_lse": True, **options}
    if op in ("sparse", "kl_selected"):
        out, lse = openmsa.sparse_attention(data.q, data.k, data.v, block_ids, batch, config, **attention)
    else:
        block_ids = None
        out, lse = openmsa.dense_attention(data.q, data.k, data.v, batch, config, **attention)
    if op in ("sparse", "dense"):
        return out
    return openmsa.index_kl_loss(data.q, data.k, lse, data.q_idx, data.k_idx, batch, config, block_ids=block_ids, **options)


def plain(
    op: str, data: golden.Data, layout: Layout, config: MsaConfig, block_ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The same written out in PyTorch, computed in `dtype`, with gradients by autograd."""
    mask = golden.attention_mask(layout, config, block_ids if op in ("sparse", "kl_selected") else None)
    if op in ("sparse", "dense"):
        return golden.attention(data, config, mask, dtype)[0]
    return golden.index_kl_loss(data, config, mask, dtype)


def leaves(data: golden.Data, dtype: torch.dtype) -> golden.Data:
    return golden.Data(*(getattr(data, f.name).detach().to(dtype).requires_grad_() for f in dataclasses.fields(data)))


def gradients(op: str, result: torch.Tensor, data: golden.Data, weight: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    inputs = tuple(getattr(data, name) for name in INPUTS[op])
    return torch.autograd.grad(result, inputs, None if weight is None else weight.to(result.dtype))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "layout", [Layout([9, 1, 5], [9, 3, 7]), Layout([3, 0, 4], [12, 2, 9], [5, 0, 8])], ids=["pack", "fragments"]
)
def test_gradcheck(op, layout, rng):
    """The reference backend in float64 against finite differences."""
    batch = layout.batch()
    data = leaves(golden.make_data(layout, TINY, rng, torch.float64, exact_index=False), torch.float64)
    block_ids = openmsa.index_select(data.q_idx, data.k_idx, batch, TINY, backend="reference")

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        changed = dataclasses.replace(data, **dict(zip(INPUTS[op], inputs)))
        return run(op, changed, batch, TINY, block_ids, backend="reference")

    assert torch.autograd.gradcheck(function, [getattr(data, name) for name in INPUTS[op]])


def check_gradients(op, layout, config, dtype, backend, rng) -> None:
    """At most three times the error of plain PyTorch in the storage type, plus a small absolute term."""
    exact = golden.make_data(layout, config, rng, dtype, exact_index=False)
    block_ids = openmsa.index_select(exact.q_idx, exact.k_idx, layout.batch(), config, backend="reference")
    weight = torch.randn(exact.q.shape, generator=rng).to(dtype) if op in ("sparse", "dense") else None
    data, same, wide = leaves(exact, dtype), leaves(exact, dtype), leaves(exact, torch.float64)
    found = run(op, data, layout.batch(), config, block_ids, backend=backend)
    rough = plain(op, same, layout, config, block_ids, dtype)
    want = plain(op, wide, layout, config, block_ids, torch.float64)
    if op.startswith("kl"):
        assert found.shape == () and found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert abs(found.item() - want.item()) <= 1e-12 + (0 if dtype == torch.float64 else 3e-4 * abs(want.item()) + 1e-6)
    for name, x, y, z in zip(
        INPUTS[op], gradients(op, found, data, weight), gradients(op, rough, same, weight), gradients(op, want, wide, weight)
    ):
        assert x.dtype == dtype and x.shape == z.shape and x.isfinite().all()
        if x.numel():
            bound = 3 * (y.double() - z).abs().max().item() + SMALL_TERM[dtype] * max(z.abs().max().item(), 1e-3)
            assert (x.double() - z).abs().max().item() <= bound, name
            assert not x[idle_rows(name, op, layout, config, block_ids)].any(), f"{name}: a row that takes no part has a gradient"


def idle_rows(name: str, op: str, layout: Layout, config: MsaConfig, block_ids: torch.Tensor) -> torch.Tensor:
    """Which leading entries of an input see no key, or are seen by no query."""
    mask = golden.attention_mask(layout, config, block_ids if op in ("sparse", "kl_selected") else None)
    by_group = mask[:, :: config.group_size]
    return ~{
        "q": mask.any(-1), "k": by_group.any(0).T, "v": by_group.any(0).T, "q_idx": by_group.any(-1), "k_idx": mask.any((0, 1))
    }[name]  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64_gradients_of_the_reference(op, layout, rng):
    check_gradients(op, LAYOUTS[layout], SMALL, torch.float64, "reference", rng)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_the_cpu_engine(op, layout, dtype, rng):
    check_gradients(op, LAYOUTS[layout], SMALL, dtype, "cpu", rng)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("config", [name for name in CONFIGS if name != "small"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_gradients_of_other_sizes(op, config, backend, rng):
    check_gradients(op, Layout([40, 70], [150, 70]), CONFIGS[config], torch.float32, backend, rng)


@pytest.mark.parametrize("op", OPS)
def test_an_empty_batch_has_empty_gradients(op, backend, rng):
    data = leaves(golden.make_data(Layout([], []), SMALL, rng), torch.float32)
    ids = torch.empty(0, SMALL.num_kv_heads, SMALL.top_k, dtype=torch.int32)
    result = run(op, data, Batch.packed([]), SMALL, ids, backend=backend)
    assert result.sum().item() == 0.0
    assert all(x.numel() == 0 for x in gradients(op, result.sum(), data, None))


@pytest.mark.parametrize("config", [SMALL, dataclasses.replace(SMALL, top_k=50)], ids=["selects", "keeps_all"])
@pytest.mark.parametrize("num_q", [1, 4, 60])
def test_msa_attention_has_the_gradients_of_its_steps(config, num_q, rng):
    """Decode-sized batches too, whose own path has no gradients."""
    layout = Layout([num_q], [90])
    batch = layout.batch()
    data = leaves(golden.make_data(layout, config, rng), torch.float32)
    block_ids = openmsa.index_select(data.q_idx, data.k_idx, batch, config)
    want = gradients(
        "sparse", openmsa.sparse_attention(data.q, data.k, data.v, block_ids, batch, config).square().sum(), data, None
    )
    outs = [
        openmsa.msa_attention(data.q, data.k, data.v, data.q_idx, data.k_idx, batch, config),
        openmsa.sparse_decode(data.q, data.k, data.v, block_ids, batch, config),
    ]
    if config.top_k == 50:
        outs.append(openmsa.dense_attention(data.q, data.k, data.v, batch, config))
    for out in outs:
        for x, y in zip(gradients("sparse", out.square().sum(), data, None), want):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_ranks_that_hold_parts_of_a_document_add_up(rng):
    """Context parallelism: each rank has some queries (q_start) and all keys; gradients of keys and losses are sums over ranks."""
    whole = Layout([100], [100])
    exact = golden.make_data(whole, SMALL, rng)
    total = {}
    for parts in ([(0, 100)], [(0, 30), (30, 77), (77, 100)]):
        grads = [torch.zeros_like(x) for x in (exact.k, exact.v, exact.k_idx)]
        loss = 0.0
        for first, last in parts:
            data = leaves(exact, torch.float32)
            q, q_idx = data.q[first:last], data.q_idx[first:last]
            batch = Batch.packed([last - first], [100], [first])
            out, lse, ids = openmsa.msa_attention(
                q, data.k, data.v, q_idx, data.k_idx, batch, SMALL, return_lse=True, return_block_ids=True
            )
            kl = openmsa.index_kl_loss(q, data.k, lse, q_idx, data.k_idx, batch, SMALL, block_ids=ids, num_tokens=100)
            (out.square().sum() + kl).backward()
            loss += kl.item()
            grads = [x + y.grad for x, y in zip(grads, (data.k, data.v, data.k_idx))]
        total[len(parts)] = [torch.tensor(loss), *grads]
    for x, y in zip(total[1], total[3]):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_index_gradients_survive_a_mean_over_many_tokens(dtype, rng):
    """1 / (T * Hkv) of a long context is below what float16 holds; a loss scale must still find the gradients there."""
    layout = Layout([60], [60])
    exact = golden.make_data(layout, SMALL, rng, dtype, exact_index=False)
    loss_scale = 2.0**20
    found = {}
    for kind, backend in ((dtype, "cpu"), (torch.float64, "reference")):
        data = leaves(exact, kind)
        _, lse = openmsa.dense_attention(data.q, data.k, data.v, layout.batch(), SMALL, return_lse=True, backend=backend)
        args = (data.q, data.k, lse, data.q_idx, data.k_idx, layout.batch(), SMALL)
        loss = openmsa.index_kl_loss(*args, num_tokens=2**20, backend=backend)
        found[kind] = (loss, *gradients("kl_all", loss * loss_scale, data, None))
    torch.testing.assert_close(found[dtype][0].double(), found[torch.float64][0], rtol=1e-3, atol=0)
    for x, y in zip(found[dtype][1:], found[torch.float64][1:]):
        assert (x.double() - y).abs().max() < 0.02 * y.abs().max()


def sample(op: str, rng: torch.Generator) -> tuple:
    """Arguments of torch.ops.openmsa.<op>, differentiable ones first marked so."""
    layout = Layout([40, 3], [70, 49])
    batch = layout.batch()
    data = golden.make_data(layout, SMALL, rng)
    ids = openmsa.index_select(data.q_idx, data.k_idx, batch, SMALL)
    out, lse = openmsa.sparse_attention(data.q, data.k, data.v, ids, batch, SMALL, return_lse=True)
    leaf = leaves(data, torch.float32)
    tensors = {
        "sparse_attention": (leaf.q, leaf.k, leaf.v, ids),
        "dense_attention": (leaf.q, leaf.k, leaf.v, True),
        "index_kl_loss": (data.q, data.k, lse, leaf.q_idx, leaf.k_idx, ids, 50, True, False, 0.5),
        "sparse_attention_backward": (data.q, data.k, data.v, ids, out, lse, out, True),
        "dense_attention_backward": (data.q, data.k, data.v, out, lse, out, False),
    }
    return (*tensors[op], *call_of(batch))


@pytest.mark.parametrize(
    "op", ["sparse_attention", "dense_attention", "index_kl_loss", "sparse_attention_backward", "dense_attention_backward"]
)
def test_opcheck(op, rng):
    results = torch.library.opcheck(getattr(torch.ops.openmsa, op).default, sample(op, rng))
    assert set(results.values()) == {"SUCCESS"}


def both_losses(q, k, v, q_idx, k_idx, batch):
    out, lse, ids = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, SMALL, return_lse=True, return_block_ids=True)
    kl = openmsa.index_kl_loss(q, k, lse, q_idx, k_idx, batch, SMALL, block_ids=ids)
    dense, lse = openmsa.dense_attention(q, k, v, batch, SMALL, return_lse=True)
    return out.square().sum() + dense.sum(), kl + 3 * openmsa.index_kl_loss(q, k, lse, q_idx, k_idx, batch, SMALL)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_training_compiles_in_one_graph(compiler, rng):
    compiled = torch.compile(both_losses, fullgraph=True, backend=compiler)
    for layout in (Layout([40, 3], [70, 49]), Layout([64, 9], [130, 50]), Layout([1, 4], [20, 20]))[
        : 1 if compiler == "inductor" else 3
    ]:
        exact = golden.make_data(layout, SMALL, rng)
        found = []
        for function in (both_losses, compiled):
            data = leaves(exact, torch.float32)
            main, index = function(data.q, data.k, data.v, data.q_idx, data.k_idx, layout.batch())
            (main + index).backward()
            found.append([main, index, *(getattr(data, f.name).grad for f in dataclasses.fields(data))])
        for x, y in zip(*found):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def test_numpy_arrays_have_the_plain_operators(rng):
    layout = Layout([40, 3], [70, 49])
    data = golden.make_data(layout, SMALL, rng)
    ids = openmsa.index_select(data.q_idx, data.k_idx, layout.batch(), SMALL)

    def everything(convert, batch):
        q, k, v, q_idx, k_idx, lists = map(convert, (data.q, data.k, data.v, data.q_idx, data.k_idx, ids))
        out, lse = openmsa.sparse_attention(q, k, v, lists, batch, SMALL, return_lse=True)
        results = [*openmsa.sparse_attention_backward(q, k, v, lists, out, lse, out, batch, SMALL, deterministic=True)]
        results += openmsa.index_kl_loss(q, k, lse, q_idx, k_idx, batch, SMALL, block_ids=lists, return_gradients=True)
        out, lse = openmsa.dense_attention(q, k, v, batch, SMALL, return_lse=True)
        results += openmsa.dense_attention_backward(q, k, v, out, lse, out, batch, SMALL)
        results.append(openmsa.index_kl_loss(q, k, lse, q_idx, k_idx, batch, SMALL, num_tokens=7))
        return results

    of_torch = everything(lambda x: x, layout.batch())
    arrays = Batch(cu_seqlens_q=np.array([0, 40, 43], np.int32), cu_seqlens_k=np.array([0, 70, 119], np.int32))
    of_numpy = everything(lambda x: x.numpy(), arrays)
    assert len(of_torch) == 10
    for x, y in zip(of_torch, of_numpy):
        np.testing.assert_array_equal(x.numpy(), y)


def test_gradients_repeat_bit_for_bit(rng):
    layout = Layout([300], [300])
    exact = golden.make_data(layout, SMALL, rng)
    runs = []
    torch.use_deterministic_algorithms(True)
    try:
        for threads in (1, 2, 2, 5):
            data = leaves(exact, torch.float32)
            ids = openmsa.index_select(data.q_idx, data.k_idx, layout.batch(), SMALL)
            found = []
            for op in OPS:
                found += gradients(op, run(op, data, layout.batch(), SMALL, ids, num_threads=threads).sum(), data, None)
            runs.append(found)
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], other))


def test_what_carries_no_gradient(rng):
    layout = Layout([40], [70])
    batch = layout.batch()
    data = leaves(golden.make_data(layout, SMALL, rng), torch.float32)
    out, lse, ids = openmsa.msa_attention(
        data.q, data.k, data.v, data.q_idx, data.k_idx, batch, SMALL, return_lse=True, return_block_ids=True
    )
    assert out.requires_grad and not lse.requires_grad and not ids.requires_grad
    out.sum().backward()
    assert data.q_idx.grad is None and data.k_idx.grad is None
    dense = openmsa.dense_attention(data.q, data.k, data.v, batch, SMALL, return_lse=True, return_block_max=True)
    assert [x.requires_grad for x in dense] == [True, False, False]
    for x in (data.q, data.k, data.v):
        x.grad = None
    kl = openmsa.index_kl_loss(data.q, data.k, lse, data.q_idx, data.k_idx, batch, SMALL, block_ids=ids)
    kl.backward()
    assert data.q.grad is None and data.k.grad is None and data.q_idx.grad is not None and data.k_idx.grad is not None
    # Queries and keys that want gradients do not make a loss over constant index vectors differentiable.
    constant = openmsa.index_kl_loss(data.q, data.k, lse, data.q_idx.detach(), data.k_idx.detach(), batch, SMALL, block_ids=ids)
    assert not constant.requires_grad and torch.equal(constant, kl)
    only_index = openmsa.msa_attention(data.q.detach(), data.k.detach(), data.v.detach(), data.q_idx, data.k_idx, batch, SMALL)
    assert not only_index.requires_grad


def test_saved_tensors_are_guarded(rng):
    layout = Layout([40], [70])
    batch = layout.batch()
    data = leaves(golden.make_data(layout, SMALL, rng), torch.float32)
    out = openmsa.dense_attention(data.q, data.k, data.v, batch, SMALL)
    batch.cu_seqlens_q.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_refused(rng):
    layout = Layout([40], [70])
    data = leaves(golden.make_data(layout, SMALL, rng), torch.float32)
    out = openmsa.dense_attention(data.q, data.k, data.v, layout.batch(), SMALL)
    (d_q,) = torch.autograd.grad(out.square().sum(), data.q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_q.sum().backward()


def test_refusals(rng):
    layout = Layout([5], [70])
    exact = golden.make_data(layout, SMALL, rng)
    pages, paged = golden.to_pages(exact, layout, SMALL, rng)
    q = exact.q.clone().requires_grad_()
    for call in (
        lambda: openmsa.msa_attention(q, pages.k, pages.v, pages.q_idx, pages.k_idx, paged, SMALL),
        lambda: openmsa.dense_attention(q, pages.k, pages.v, paged, SMALL),
    ):
        with pytest.raises(
            openmsa.UnsupportedError, match=r"q requires a gradient, but batch has paged keys.*torch.no_grad\(\)"
        ) as error:
            call()
        assert error.value.argument == "q"
        with torch.no_grad():
            call()
    q_idx = exact.q_idx.clone().requires_grad_()
    with pytest.raises(openmsa.UnsupportedError, match=r"q_idx requires a gradient, but block scores carry none.*index_kl_loss"):
        openmsa.block_scores(q_idx, exact.k_idx, layout.batch(), SMALL)
    assert torch.equal(
        openmsa.index_select(q_idx, exact.k_idx, layout.batch(), SMALL),
        openmsa.index_select(exact.q_idx, exact.k_idx, layout.batch(), SMALL),
    )
    with pytest.raises(openmsa.InvalidArgumentError, match="batch.page_table is given, but training takes packed keys alone"):
        lse = torch.zeros(5, SMALL.num_q_heads)
        openmsa.index_kl_loss(exact.q, pages.k, lse, exact.q_idx, pages.k_idx, paged, SMALL)
    with pytest.raises(openmsa.InvalidArgumentError, match="lse"):
        openmsa.index_kl_loss(exact.q, exact.k, torch.zeros(4, 4), exact.q_idx, exact.k_idx, layout.batch(), SMALL)


def test_gradients_on_a_gpu_are_refused_before_anything_runs():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from openmsa.torch_ops import CUDA_STAGES

    if "dense_attention_backward" in CUDA_STAGES:
        pytest.skip("this build has training kernels for GPUs")
    with FakeTensorMode():
        q = torch.empty(5, 4, 16, device="cuda", requires_grad=True)
        k = torch.empty(5, 2, 16, device="cuda")
        batch = Batch(cu_seqlens_q=torch.empty(2, dtype=torch.int32, device="cuda"),
                      cu_seqlens_k=torch.empty(2, dtype=torch.int32, device="cuda"), max_seqlen_q=5, max_seqlen_k=5)  # fmt: skip
        with pytest.raises(openmsa.UnsupportedError, match="this build has no training kernels for GPUs. Train on the CPU"):
            openmsa.dense_attention(q, k, k, batch, SMALL)
