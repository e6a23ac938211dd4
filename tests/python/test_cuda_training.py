"""Gradients and the index KL loss of the Hopper kernels. Skipped, with the library's reason, where a GPU gives no gradients.

Small shapes against the fp64 oracle, large ones against plain PyTorch in float64 or the CPU engine. A small part runs on the CPU
always; `OPENMSA_TEST_DEVICE=cpu` rehearses the rest there.
"""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import golden  # noqa: E402
import openmsa  # noqa: E402
from cuda_support import (  # noqa: E402
    NO_GPU,
    REFERENCE_MODEL,
    TRAINING_DEVICE,
    make,
    needs_gpu,
    no_waiting,
    on_both,
)
from golden import Layout  # noqa: E402
from openmsa import Batch, MsaConfig, _core  # noqa: E402
from openmsa.nn import MsaAttention  # noqa: E402
from test_training import INPUTS, OPS, gradients, leaves, run  # noqa: E402
from training_support import assert_gradient, attention_mask, check_training, poison, to, unit_of  # noqa: E402

BF16, F16 = torch.bfloat16, torch.float16
SMALL = MsaConfig(num_q_heads=8, num_kv_heads=2, head_dim=64, index_dim=64, block_size=64, top_k=4)
MODEL = MsaConfig(**REFERENCE_MODEL)
LAYOUTS = {
    "rows with one key": Layout([1, 1, 1], [1, 1, 1]),
    "documents": Layout([127, 129, 1, 2, 3, 5, 128], [127, 129, 1, 2, 3, 5, 128]),
    "chunk after a prefix": Layout([200, 20], [775, 180]),
    "few queries": Layout([1, 4, 16], [130, 66, 600]),
    "empty sequences": Layout([0, 7, 0, 130, 0], [140, 7, 0, 300, 9]),
    "fragments": Layout([100, 120, 40], [390, 264, 10], [135, 60, -30]),
    "more queries than keys": Layout([40], [10]),
    "layout mix-up": Layout([2], [700]),
    "no queries": Layout([0], [200]),
}


@pytest.fixture
def device() -> str:
    if TRAINING_DEVICE == "cuda" and NO_GPU:
        pytest.skip(NO_GPU)
    return TRAINING_DEVICE


@pytest.fixture(autouse=True)
def _no_fault_was_found():
    yield
    if torch.cuda.is_available():
        openmsa.synchronize("cuda")
        torch.cuda.empty_cache()  # several processes may run these tests on one GPU


def inputs(layout: Layout, config: MsaConfig, device: str, rng: torch.Generator, dtype: torch.dtype = BF16) -> tuple:
    """(data, batch, block_ids) where the operators run."""
    data = to(golden.make_data(layout, config, rng, dtype, exact_index=False), device)
    batch = layout.batch().to(device)
    return data, batch, openmsa.index_select(data.q_idx, data.k_idx, batch, config)


def training_step(data: golden.Data, batch: Batch, config: MsaConfig, **loss_options) -> list[torch.Tensor]:
    """[out, loss, d_q, d_k, d_v, d_q_idx, d_k_idx] of msa_attention with the index loss; out is its own gradient."""
    data = leaves(data, data.q.dtype)
    out, lse, ids = openmsa.msa_attention(
        data.q, data.k, data.v, data.q_idx, data.k_idx, batch, config, return_lse=True, return_block_ids=True
    )
    loss = openmsa.index_kl_loss(data.q, data.k, lse, data.q_idx, data.k_idx, batch, config, block_ids=ids, **loss_options)
    main = torch.autograd.grad(out, (data.q, data.k, data.v), out.detach())
    return [out.detach(), loss.detach(), *main, *torch.autograd.grad(loss, (data.q_idx, data.k_idx))]


# Against the oracle


@on_both
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device, rng):
    check_training(LAYOUTS[layout], SMALL, BF16, device, rng)


@on_both
@pytest.mark.parametrize("op", OPS)
def test_an_empty_batch_has_empty_gradients(op, device, rng):
    data, batch, ids = inputs(Layout([], []), SMALL, device, rng)
    leaf = leaves(data, BF16)
    result = run(op, leaf, batch, SMALL, ids)
    assert result.sum().item() == 0.0
    assert all(x.numel() == 0 for x in gradients(op, result.sum(), leaf, None))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_model(layout, dtype, device, rng):
    """The reference model's heads, two of its four groups."""
    config = dataclasses.replace(MODEL, num_q_heads=32, num_kv_heads=2, top_k=4)
    check_training(LAYOUTS[layout], config, dtype, device, rng)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 12, 16])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_groups_and_dims(group, dim, device, rng):
    layout = Layout([70, 3, 260], [300, 3, 517])
    for index_dim, block_size, dtype in ((dim, 64, BF16), (224 - dim if dim != 96 else 64, 128, F16)):
        config = MsaConfig(
            num_q_heads=2 * group, num_kv_heads=2, head_dim=dim, index_dim=min(index_dim, 128), block_size=block_size, top_k=4
        )
        check_training(layout, config, dtype, device, rng)


@pytest.mark.parametrize("index_dim", [64, 96, 128])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_every_pair_of_dims(head_dim, index_dim, device, rng):
    config = MsaConfig(num_q_heads=32, num_kv_heads=2, head_dim=head_dim, index_dim=index_dim, block_size=128, top_k=4)
    check_training(Layout([150, 9], [150, 400]), config, BF16, device, rng, ops=("kl_selected", "kl_all"))


@pytest.mark.parametrize("top_k", [1, 4, 5, 8, 16, 32])
@pytest.mark.parametrize("block_size", [64, 128])
def test_block_sizes_and_top_k(block_size, top_k, device, rng):
    config = dataclasses.replace(SMALL, num_q_heads=4, block_size=block_size, top_k=top_k)
    check_training(Layout([300, 9], [2600, 1500]), config, BF16, device, rng)


@pytest.mark.parametrize("scales", [(0.3, 0.02), (0.02, 0.5)], ids=str)
def test_scales(scales, device, rng):
    config = dataclasses.replace(SMALL, softmax_scale=scales[0], index_scale=scales[1])
    check_training(LAYOUTS["documents"], config, BF16, device, rng)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 2047, 2048, 2049, 2175, 8192, 8320])
def test_lengths(length, device, rng):
    config = MsaConfig(num_q_heads=4, num_kv_heads=1, head_dim=128, index_dim=128, block_size=128, top_k=8)
    check_training(Layout([length], [length]), config, BF16, device, rng)


@pytest.mark.parametrize("queries", [5000, 9000])
def test_a_block_that_every_query_chose(queries, device, rng):
    """Block 0 is in every list: more visitors than one work item or one chunk of queries holds."""
    config = MsaConfig(num_q_heads=4, num_kv_heads=1, head_dim=64, index_dim=64, block_size=64, top_k=2, num_init_blocks=1)
    check_training(Layout([queries], [queries]), config, BF16, device, rng)


@on_both
def test_a_block_that_some_sequences_all_chose(device, rng):
    config = dataclasses.replace(SMALL, top_k=2, num_init_blocks=1)
    check_training(Layout([300, 5, 700], [300, 70, 700]), config, BF16, device, rng)


@on_both
def test_more_slots_than_blocks_is_dense_attention(device, rng):
    layout, config = Layout([200, 1, 90], [200, 1, 333]), dataclasses.replace(SMALL, top_k=32)
    check_training(layout, config, BF16, device, rng)
    data, batch, ids = inputs(layout, config, device, rng)
    for sparse, dense in (("sparse", "dense"), ("kl_selected", "kl_all")):
        found = []
        for op in (sparse, dense):
            leaf = leaves(data, BF16)
            found.append(gradients(op, run(op, leaf, batch, config, ids), leaf, data.q if op in ("sparse", "dense") else None))
        for name, x, y in zip(INPUTS[sparse], *found):
            assert (x.float() - y.float()).abs().max() <= 2**-6 * y.float().abs().max(), f"{sparse}, d_{name}"


# Against the CPU engine


def check_against_cpu_engine(data: golden.Data, batch: Batch, config: MsaConfig, device: str) -> None:
    """SPEC's rule with the CPU engine: exact in float32, its error in the storage type as the measure."""
    ids = openmsa.index_select(data.q_idx, data.k_idx, batch, config)
    dtype = data.q.dtype
    for op in ("sparse", "kl_selected", "kl_all"):
        results = []
        for where, kind in ((device, dtype), ("cpu", dtype), ("cpu", torch.float32)):
            leaf = leaves(to(data, where), kind)
            poison(where)
            result = run(op, leaf, batch.to(where), config, ids.to(where))
            grads = gradients(op, result, leaf, leaf.q.detach() if op == "sparse" else None)
            results.append((result.detach(), grads))
        (found, found_grads), (_, rough_grads), (want, want_grads) = results
        if op != "sparse":
            assert abs(found.item() - want.item()) <= 1e-3 * abs(want.item()) + 1e-5, op
        for name, x, y, z in zip(INPUTS[op], found_grads, rough_grads, want_grads):
            assert_gradient(f"{op}, d_{name}", x, y.to(x.device), z, unit_of(op, len(data.q), config))


@pytest.mark.parametrize("clustered", [False, True])
def test_the_model_against_the_cpu_engine(clustered, device, rng):
    """Chunk of a long document, as the reference model sees it."""
    queries, keys = (1500, 16500) if device == "cuda" else (100, 3000)
    data, batch, _ = inputs(Layout([queries], [keys]), MODEL, device, rng)
    if clustered:
        data.q_idx = data.q_idx[:1] + 0.02 * data.q_idx
    check_against_cpu_engine(data, batch, MODEL, device)


def test_the_answer_at_the_far_end(device, rng):
    """More than 4,096 blocks; every query chooses number 4,000, which no other key comes near."""
    blocks = 4100 if device == "cuda" else 300
    config = MsaConfig(num_q_heads=16, num_kv_heads=1, head_dim=128, index_dim=128, top_k=4)
    data, batch, _ = inputs(Layout([20], [blocks * 128 - 3]), config, device, rng)
    data.q_idx = data.q_idx[:1].expand_as(data.q_idx).contiguous()
    far = blocks - 100
    data.k_idx[far * 128 + 77] = 3 * data.q_idx[0, 0]
    ids = openmsa.index_select(data.q_idx, data.k_idx, batch, config)
    assert (ids == far).any(-1).all()
    check_against_cpu_engine(data, batch, config, device)
    _, _, _, d_k, d_v, _, d_k_idx = training_step(data, batch, config)
    chosen = torch.zeros(blocks, dtype=torch.bool, device=device)
    chosen[ids.unique().clamp(min=0).long()] = True
    reached = (d_v != 0).flatten(1).any(-1).nonzero().flatten() // 128
    assert torch.equal(reached.unique(), chosen.nonzero().flatten())
    assert d_k[far * 128 : far * 128 + 128].any() and d_k_idx[far * 128 + 77].any()


# Properties


@on_both
@pytest.mark.parametrize("support", ["kl_selected", "kl_all"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_index_loss_in_parts(support, dtype, device, rng):
    """The value alone, the gradients alone, all together: the same bits. num_tokens divides."""
    layout = Layout([260, 3, 40], [260, 70, 390])
    data, batch, ids = inputs(layout, SMALL, device, rng, dtype)
    if support == "kl_selected":
        _, lse = openmsa.sparse_attention(data.q, data.k, data.v, ids, batch, SMALL, return_lse=True)
    else:
        _, lse = openmsa.dense_attention(data.q, data.k, data.v, batch, SMALL, return_lse=True)
        ids = None
    args = (data.q, data.k, lse, data.q_idx, data.k_idx, batch, SMALL)
    loss, d_q_idx, d_k_idx = openmsa.index_kl_loss(*args, block_ids=ids, return_gradients=True)
    assert loss > 0 and d_q_idx.any() and d_k_idx.any()
    poison(device)
    # With autograd in sight float16 keeps its gradients larger and scales the loss back.
    torch.testing.assert_close(openmsa.index_kl_loss(*args, block_ids=ids), loss, rtol=0 if dtype == BF16 else 1e-6, atol=0)
    alone = [torch.full_like(data.q_idx, float("nan")), torch.full_like(data.k_idx, float("nan"))]
    _core.index_kl_loss(
        data.q, data.k, lse, data.q_idx, data.k_idx, ids, None, *alone, sum(layout.seqlens_q), False, None,
        batch.cu_seqlens_q, batch.cu_seqlens_k, None, None, None, batch.max_seqlen_q, batch.max_seqlen_k,
        list(SMALL._sizes), None, "auto", torch.get_num_threads(), False,
    )  # fmt: skip
    assert torch.equal(alone[0], d_q_idx) and torch.equal(alone[1], d_k_idx)
    other, d_q_other, d_k_other = openmsa.index_kl_loss(
        *args, block_ids=ids, num_tokens=4 * sum(layout.seqlens_q), return_gradients=True, deterministic=True
    )
    torch.testing.assert_close(4 * other, loss, rtol=1e-6, atol=0)
    if dtype == BF16:  # float16 has not the range for it
        assert torch.equal(4 * d_q_other, d_q_idx) and torch.equal(4 * d_k_other, d_k_idx)


@on_both
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_index_gradients_survive_a_mean_over_many_tokens(dtype, device, rng):
    """1 / (T * Hkv) of a long context is below what float16 holds; a loss scale must still find the gradients there."""
    layout = Layout([260], [260])
    exact = golden.make_data(layout, SMALL, rng, dtype, exact_index=False)
    found = {}
    for where, kind, backend in ((device, dtype, "auto"), ("cpu", torch.float64, "reference")):
        data, batch = leaves(to(exact, where), kind), layout.batch().to(where)
        _, lse = openmsa.dense_attention(data.q, data.k, data.v, batch, SMALL, return_lse=True, backend=backend)
        args = (data.q, data.k, lse, data.q_idx, data.k_idx, batch, SMALL)
        loss = openmsa.index_kl_loss(*args, num_tokens=2**20, backend=backend)
        found[backend] = [x.cpu().double() for x in (loss, *gradients("kl_all", loss * 2.0**20, data, None))]
    torch.testing.assert_close(found["auto"][0], found["reference"][0], rtol=1e-3, atol=0)
    for x, y in zip(found["auto"][1:], found["reference"][1:]):
        assert (x - y).abs().max() < 0.02 * y.abs().max()


@on_both
@pytest.mark.parametrize("block_size", [64, 128])
def test_keys_that_nobody_sees_may_hold_nan(block_size, device, rng):
    """A document without queries between two others, blocks behind the last query, blocks that nobody chose."""
    config = dataclasses.replace(SMALL, block_size=block_size, top_k=2)
    layout = Layout([100, 0, 61, 70], [100, 77, 61, 1000], [0, 0, 0, 300])
    data, batch, _ = inputs(layout, config, device, rng)
    last = data.q_idx[-70:]
    last[:] = last[:1].clone()  # the long sequence's queries agree, so most of its blocks are idle
    ids = openmsa.index_select(data.q_idx, data.k_idx, batch, config)
    for op in OPS:
        mask = attention_mask(layout, config, ids if op in ("sparse", "kl_selected") else None, device)
        used = mask[:, :: config.group_size].any(0).any(0)
        # Every key of a block that somebody visits counts as used, up to the end of its sequence.
        unused = ~used
        for _, tk, _ in layout.rows():
            for first in range(tk.start, tk.stop, block_size):
                block = slice(first, min(first + block_size, tk.stop))
                unused[block] = not used[block].any()
        assert unused[100:177].all() and unused.sum() > (500 if op in ("sparse", "kl_selected") else 350)
        runs = []
        for poisoned in (False, True):
            changed = copy.deepcopy(data)
            for x in (changed.k, changed.v, changed.k_idx) if poisoned else ():
                x[unused] = float("nan")
            leaf = leaves(changed, BF16)
            result = run(op, leaf, batch, config, ids)
            runs.append([result, *gradients(op, result, leaf, data.q if op in ("sparse", "dense") else None)])
        for x, y in zip(*runs):
            assert torch.equal(x, y), op


@on_both
@pytest.mark.parametrize("cuts", [[0, 700], [0, 64, 130, 131, 512, 700]], ids=str)
def test_fragments_add_up(cuts, device, rng):
    """Context parallelism on one device: every fragment has some queries (q_start) and all keys."""
    config = dataclasses.replace(SMALL, top_k=3)
    data, batch, _ = inputs(Layout([700], [700]), config, device, rng)
    want = training_step(data, batch, config)
    parts = []
    for first, last in zip(cuts, cuts[1:]):
        part = dataclasses.replace(data, q=data.q[first:last], q_idx=data.q_idx[first:last])
        parts.append(training_step(part, Batch.packed([last - first], [700], [first], device=device), config, num_tokens=700))
    out, loss, d_q, d_k, d_v, d_q_idx, d_k_idx = zip(*parts)
    d_k, d_v, d_k_idx = (sum(x.float() for x in shares) for shares in (d_k, d_v, d_k_idx))
    found = [torch.cat(out), sum(loss), torch.cat(d_q), d_k, d_v, torch.cat(d_q_idx), d_k_idx]
    for name, x, y in zip(("out", "loss", "d_q", "d_k", "d_v", "d_q_idx", "d_k_idx"), found, want):
        # Every fragment rounds its share.
        assert (x.float() - y.float()).abs().max() <= len(parts) * 2**-8 * y.float().abs().max(), name


@on_both
@pytest.mark.parametrize("num_q", [1, 4, 16, 100])
def test_msa_attention_has_the_gradients_of_its_steps(num_q, device, rng):
    """Decode-sized batches too, whose own path has no gradients."""
    data, batch, ids = inputs(Layout([num_q], [400]), SMALL, device, rng)
    leaf = leaves(data, BF16)
    outs = [
        openmsa.sparse_attention(leaf.q, leaf.k, leaf.v, ids, batch, SMALL),
        openmsa.msa_attention(leaf.q, leaf.k, leaf.v, leaf.q_idx, leaf.k_idx, batch, SMALL),
        openmsa.sparse_decode(leaf.q, leaf.k, leaf.v, ids, batch, SMALL),
    ]
    found = [gradients("sparse", out, leaf, data.q) for out in outs]
    lse = openmsa.sparse_attention(data.q, data.k, data.v, ids, batch, SMALL, return_lse=True)[1]
    tensors = (data.q, data.k, data.v, ids, outs[0].detach(), lse, data.q)
    found.append(openmsa.sparse_attention_backward(*tensors, batch, SMALL, deterministic=True))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other))
    leaf = leaves(data, BF16)
    out, lse = openmsa.dense_attention(leaf.q, leaf.k, leaf.v, batch, SMALL, return_lse=True)
    direct = openmsa.dense_attention_backward(data.q, data.k, data.v, out, lse, data.q, batch, SMALL)
    assert all(torch.equal(x, y) for x, y in zip(gradients("dense", out, leaf, data.q), direct))


@on_both
def test_what_carries_no_gradient(device, rng):
    data, batch, _ = inputs(Layout([100], [270]), SMALL, device, rng)
    leaf = leaves(data, BF16)
    out, lse, ids = openmsa.msa_attention(
        leaf.q, leaf.k, leaf.v, leaf.q_idx, leaf.k_idx, batch, SMALL, return_lse=True, return_block_ids=True
    )
    assert out.requires_grad and not lse.requires_grad and not ids.requires_grad
    out.sum().backward()
    assert leaf.q_idx.grad is None and leaf.k_idx.grad is None and leaf.q.grad.any() and leaf.k.grad.any() and leaf.v.grad.any()
    dense = openmsa.dense_attention(leaf.q, leaf.k, leaf.v, batch, SMALL, return_lse=True, return_block_max=True)
    assert [x.requires_grad for x in dense] == [True, False, False]
    for x in (leaf.q, leaf.k, leaf.v):
        x.grad = None
    loss = openmsa.index_kl_loss(leaf.q, leaf.k, lse, leaf.q_idx, leaf.k_idx, batch, SMALL, block_ids=ids)
    loss.backward()
    assert leaf.q.grad is None and leaf.k.grad is None and leaf.q_idx.grad.any() and leaf.k_idx.grad.any()
    constant = openmsa.index_kl_loss(leaf.q, leaf.k, lse, data.q_idx, data.k_idx, batch, SMALL, block_ids=ids)
    assert not constant.requires_grad and torch.equal(constant, loss)


def test_many_runs_give_the_same_bits(device, rng):
    """Chosen blocks that nearly all share and blocks that few share, over more tokens than one chunk holds; switch on or off."""
    tokens = 20000 if device == "cuda" else 1500
    config = dataclasses.replace(MODEL, num_q_heads=32, num_kv_heads=2, num_init_blocks=1)
    data, batch, _ = inputs(Layout([tokens, 3, 777], [tokens, 3, 777]), config, device, rng)
    runs = []
    for deterministic in (False, False, True, False):
        torch.use_deterministic_algorithms(deterministic)
        try:
            poison(device)
            runs.append(training_step(data, batch, config))
        finally:
            torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], other))
    assert all(x.isfinite().all() for x in runs[0])


# As PyTorch uses them


def both_losses(q, k, v, q_idx, k_idx, batch):
    out, lse, ids = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, SMALL, return_lse=True, return_block_ids=True)
    kl = openmsa.index_kl_loss(q, k, lse, q_idx, k_idx, batch, SMALL, block_ids=ids)
    dense, lse = openmsa.dense_attention(q, k, v, batch, SMALL, return_lse=True)
    main = out.float().square().mean() + dense.float().mean()
    return main, kl + 3 * openmsa.index_kl_loss(q, k, lse, q_idx, k_idx, batch, SMALL)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_training_compiles_in_one_graph(compiler, device, rng):
    compiled = torch.compile(both_losses, fullgraph=True, backend=compiler)
    for layout in (Layout([140, 3], [270, 49]), Layout([64, 90], [130, 350]))[: 1 if compiler == "inductor" else 2]:
        data, batch, _ = inputs(layout, SMALL, device, rng)
        found = []
        for function in (both_losses, compiled):
            leaf = leaves(data, BF16)
            main, index = function(leaf.q, leaf.k, leaf.v, leaf.q_idx, leaf.k_idx, batch)
            (main + index).backward()
            found.append([main, index, *(getattr(leaf, f.name).grad for f in dataclasses.fields(leaf))])
        for x, y in zip(*found):
            assert (x.float() - y.float()).abs().max() <= 2**-6 * x.float().abs().max()


def sample(op: str, device: str, rng: torch.Generator) -> tuple:
    """Arguments of torch.ops.openmsa.<op>."""
    data, batch, ids = inputs(Layout([100, 3], [270, 49]), SMALL, device, rng)
    out, lse = openmsa.sparse_attention(data.q, data.k, data.v, ids, batch, SMALL, return_lse=True)
    leaf = leaves(data, BF16)
    tensors = {
        "sparse_attention": (leaf.q, leaf.k, leaf.v, ids),
        "dense_attention": (leaf.q, leaf.k, leaf.v, True),
        "index_kl_loss": (data.q, data.k, lse, leaf.q_idx, leaf.k_idx, ids, 50, True, False, 0.5),
        "sparse_attention_backward": (data.q, data.k, data.v, ids, out, lse, out, True),
        "dense_attention_backward": (data.q, data.k, data.v, out, lse, out, False),
    }
    return (
        *tensors[op], batch.cu_seqlens_q, batch.cu_seqlens_k, None, None, None, batch.max_seqlen_q, batch.max_seqlen_k,
        list(SMALL._sizes), None, "auto", 0, False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "op", ["sparse_attention", "dense_attention", "index_kl_loss", "sparse_attention_backward", "dense_attention_backward"]
)
def test_opcheck(op, device, rng):
    results = torch.library.opcheck(getattr(torch.ops.openmsa, op).default, sample(op, device, rng))
    assert set(results.values()) == {"SUCCESS"}


@needs_gpu
def test_a_step_does_not_wait(rng):
    data, batch, _ = inputs(Layout([500, 3], [500, 3]), SMALL, "cuda", rng)
    leaf = leaves(data, BF16)
    training_step(data, batch, SMALL)
    torch.cuda.synchronize()
    with no_waiting():
        training_step(data, batch, SMALL)
        for op in ("dense", "kl_all"):
            gradients(op, run(op, leaf, batch, SMALL, None), leaf, data.q if op == "dense" else None)


@needs_gpu
def test_a_step_in_a_graph(rng):
    """Captured once, replayed with other contents and other lengths of no more tokens, on poisoned outputs."""
    layout = Layout([500, 300], [500, 300])
    data, batch, _ = inputs(layout, SMALL, "cuda", rng)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        training_step(data, batch, SMALL)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = training_step(data, batch, SMALL)
    for cut in (500, 400):
        other, other_batch, _ = inputs(Layout([cut, 800 - cut], [cut, 800 - cut]), SMALL, "cuda", rng)
        for f in dataclasses.fields(data):
            getattr(data, f.name).detach().copy_(getattr(other, f.name))
        batch.cu_seqlens_q.copy_(other_batch.cu_seqlens_q)
        batch.cu_seqlens_k.copy_(other_batch.cu_seqlens_k)
        for x in found:
            x.fill_(float("nan"))
        graph.replay()
        for x, y in zip(found, training_step(other, other_batch, SMALL)):
            assert torch.equal(x, y)


@needs_gpu
def test_memory_grows_with_tokens_alone(rng):
    """Tensors and scratch of a step over sequences of twice the tokens: at most twice as much."""
    config = dataclasses.replace(MODEL, num_q_heads=32, num_kv_heads=2)
    peaks = []
    for tokens in (16384, 32768, 65536):
        data, batch, _ = inputs(Layout([tokens], [tokens]), config, "cuda", rng)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        training_step(data, batch, config)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del data, batch
    assert peaks[1] <= 2.1 * peaks[0] and peaks[2] <= 2.1 * peaks[1], peaks


@needs_gpu
@pytest.mark.parametrize("bad, words", [(99, "must be a block"), (-5, "must be a block"), (0, "ascending")])
def test_bad_block_ids_are_reported(bad, words, rng):
    data, batch, ids = inputs(Layout([100], [1500]), SMALL, "cuda", rng)
    out, lse = openmsa.sparse_attention(data.q, data.k, data.v, ids, batch, SMALL, return_lse=True)
    ids[70, 1, 2 if bad == 0 else 3] = bad
    for call in (
        lambda: openmsa.sparse_attention_backward(data.q, data.k, data.v, ids, out, lse, out, batch, SMALL),
        lambda: openmsa.index_kl_loss(data.q, data.k, lse, data.q_idx, data.k_idx, batch, SMALL, block_ids=ids),
    ):
        call()
        with pytest.raises(openmsa.InvalidArgumentError, match=words):
            openmsa.synchronize("cuda")
        openmsa.synchronize("cuda")  # told once


@needs_gpu
def test_refusals_name_the_rule(rng):
    q, k, v, q_idx, k_idx, batch = make([40], [300], SMALL, paged=True)
    with pytest.raises(openmsa.UnsupportedError, match="q requires a gradient, but batch has paged keys"):
        openmsa.msa_attention(q.requires_grad_(), k, v, q_idx, k_idx, batch, SMALL)
    data, batch, ids = inputs(Layout([40], [300]), SMALL, "cuda", rng)
    wide = leaves(data, torch.float32)
    with pytest.raises(openmsa.UnsupportedError, match="float32"):
        openmsa.sparse_attention(wide.q, wide.k, wide.v, ids, batch, SMALL)


# nn.MsaAttention

WIDTH = 256
LAYER = MsaConfig(num_q_heads=16, num_kv_heads=2, head_dim=64, index_dim=64, block_size=64, top_k=4)
LENGTHS = [300, 1, 99]
PHASES = ["dense", "warmup", "sparse"]
INDEX = {"q_idx_proj", "k_idx_proj", "q_idx_norm", "k_idx_norm"}
MAIN = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}


def make_layer(device: str, dtype: torch.dtype = BF16) -> MsaAttention:
    torch.manual_seed(7)
    return MsaAttention(WIDTH, LAYER, rotary_dim=32, rope_theta=1e4, dtype=BF16).to(device, dtype)


def hidden_states(device: str, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(sum(LENGTHS), WIDTH, generator=rng).to(device, BF16)


def grads(layer: MsaAttention) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def reached(layer: MsaAttention) -> set[str]:
    return {name.removesuffix(".weight") for name, grad in grads(layer).items() if grad.any()}


@on_both
@pytest.mark.parametrize("phase", PHASES)
def test_phases_of_the_layer(phase, device, rng):
    """Each loss reaches its own parameters; output, loss and gradients are those of the same layer in float32 on the CPU."""
    batch, hidden = Batch.packed(LENGTHS, device=device), hidden_states(device, rng)
    results = []
    for where, dtype in ((device, BF16), ("cpu", torch.float32)):
        layer, x = make_layer(where, dtype), hidden.clone().to(where, dtype).requires_grad_()
        layer.phase = phase
        out, index_kl = layer(x, batch.to(where), return_index_kl=True)
        out.float().square().mean().backward(retain_graph=True)
        assert reached(layer) == MAIN and x.grad.any() and grads(layer).keys() == {f"{name}.weight" for name in MAIN}
        d_hidden, main = x.grad.clone(), grads(layer)
        layer.zero_grad()
        x.grad = None
        if phase != "dense":
            index_kl.backward()
            assert reached(layer) == INDEX and x.grad is None
        else:
            assert index_kl == 0 and not index_kl.requires_grad
        results.append([out.detach(), index_kl.detach(), d_hidden, *main.values(), *grads(layer).values()])
    assert len(results[0]) == len(results[1]) == (9 if phase == "dense" else 13)
    # Rounded projections choose another block where two scores nearly tie, so this bounds the typical error.
    for x, y in zip(*results):
        x, y = x.cpu().float(), y.float()
        assert x.isfinite().all() and (x - y).norm() <= 0.1 * y.norm()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(phase, use_reentrant, device, rng):
    """Two layers, recomputed in the backward pass: the losses and gradients are the same to the last bit."""
    layer, batch, hidden = make_layer(device), Batch.packed(LENGTHS, device=device), hidden_states(device, rng)
    layer.phase = phase
    results = []
    for wrap in (lambda f, x: f(x), functools.partial(checkpoint, use_reentrant=use_reentrant)):
        x = hidden.clone().requires_grad_()
        block = functools.partial(layer, batch=batch, return_index_kl=True)
        first, kl_1 = wrap(block, x)
        second, kl_2 = wrap(block, x + first)
        (second.float().square().mean() + 0.1 * (kl_1 + kl_2)).backward()
        results.append([second, kl_1, kl_2, x.grad, *grads(layer).values()])
        layer.zero_grad()
    assert len(results[0]) == len(results[1]) == (10 if phase == "dense" else 14)
    assert all(torch.equal(x, y) for x, y in zip(*results))


def test_phases_switch_under_torch_compile(device, rng):
    layer, hidden = make_layer(device), hidden_states(device, rng)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for phase in ("warmup", "sparse", "dense"):
        layer.phase = phase
        results = []
        for function in (layer, compiled):
            out, index_kl = function(hidden, Batch.packed(LENGTHS, device=device), return_index_kl=True)
            (out.float().square().mean() + index_kl).backward()
            results.append([out, index_kl, *grads(layer).values()])
            layer.zero_grad()
        assert len(results[0]) == len(results[1]) == (8 if phase == "dense" else 12)
        for x, y in zip(*results):
            assert (x.float() - y.float()).norm() <= 0.02 * x.float().norm()


@pytest.mark.parametrize("phase", ["warmup", "sparse"])
def test_autocast_of_float32_parameters(phase, device, rng):
    layer, hidden = make_layer(device, torch.float32), hidden_states(device, rng).float()
    layer.phase = phase
    with torch.autocast(device, BF16):
        out, index_kl = layer(hidden, Batch.packed(LENGTHS, device=device), return_index_kl=True)
    assert out.dtype == BF16 and index_kl.dtype == torch.float32
    (out.float().square().mean() + index_kl).backward()
    assert reached(layer) == MAIN | INDEX
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads(layer).values())


def test_the_index_branch_learns(device, rng):
    """Warm-up, then the sparse phase: the loss falls, and the main branch stays as it was to the last bit."""
    layer, batch = make_layer(device, torch.float32), Batch.packed(LENGTHS, device=device)
    hidden = hidden_states(device, rng).float()
    main = copy.deepcopy({name: p for name, p in layer.named_parameters() if name.split(".")[0] in MAIN})
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for phase, steps in (("warmup", 30), ("sparse", 15)):
        layer.phase = phase
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device, BF16):
                loss = layer(hidden, batch, return_index_kl=True)[1]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[29] < 0.5 * losses[0] and losses[-1] < losses[30]
    assert all(torch.equal(p, main[name]) for name, p in layer.named_parameters() if name in main)
