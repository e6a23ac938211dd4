"""The operators inside PyTorch: opcheck, fake tensors, torch.compile, grad modes, threads, and what a call costs."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest
import torch

import golden
import openmsa
from golden import Layout
from openmsa import Batch
from test_ops import SMALL

LAYOUT = Layout([40, 3], [70, 49])
OPS = ["block_scores", "select_blocks", "index_select", "sparse_attention", "sparse_decode", "msa_attention", "dense_attention"]


def call_of(batch: Batch, backend: str = "auto") -> tuple:
    return (
        batch.cu_seqlens_q, batch.cu_seqlens_k, batch.seqlens_k, batch.page_table, batch.q_start,
        batch.max_seqlen_q, batch.max_seqlen_k, list(SMALL._sizes), SMALL.softmax_scale, backend, 0, False,
    )  # fmt: skip


def sample(op: str, paged: bool, rng: torch.Generator) -> tuple:
    """Arguments of torch.ops.openmsa.<op>."""
    data = golden.make_data(LAYOUT, SMALL, rng)
    data, batch = golden.to_pages(data, LAYOUT, SMALL, rng) if paged else (data, LAYOUT.batch())
    scores = openmsa.block_scores(data.q_idx, data.k_idx, batch, SMALL)
    block_ids = openmsa.select_blocks(scores, batch, SMALL)
    tensors = {
        "block_scores": (data.q_idx, data.k_idx),
        "select_blocks": (scores,),
        "index_select": (data.q_idx, data.k_idx),
        "sparse_attention": (data.q, data.k, data.v, block_ids),
        "sparse_decode": (data.q, data.k, data.v, block_ids),
        "msa_attention": (data.q, data.k, data.v, data.q_idx, data.k_idx, True),
        "dense_attention": (data.q, data.k, data.v, True),
    }
    return (*tensors[op], *call_of(batch))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_opcheck(op, paged, rng):
    # Pages that no token owns hold NaN; opcheck compares inputs before and after, and NaN differs from itself.
    args = tuple(a.nan_to_num(0) if isinstance(a, torch.Tensor) and a.is_floating_point() and a.isnan().any() else a
                 for a in sample(op, paged, rng))  # fmt: skip
    results = torch.library.opcheck(getattr(torch.ops.openmsa, op).default, args)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op, wanted", [*((op, True) for op in OPS), ("msa_attention", False), ("dense_attention", False)])
def test_fake_tensors_have_the_shapes_of_real_ones(op, wanted, rng):
    """An output that is not wanted is empty."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    args = tuple(wanted if a is True else a for a in sample(op, False, rng))
    real = getattr(torch.ops.openmsa, op)(*args)
    with FakeTensorMode() as mode:
        fake = getattr(torch.ops.openmsa, op)(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    real, fake = (x if isinstance(x, tuple) else (x,) for x in (real, fake))
    assert [(x.shape, x.dtype, x.stride()) for x in real] == [(x.shape, x.dtype, x.stride()) for x in fake]


def whole(q, k, v, q_idx, k_idx, batch):
    return openmsa.msa_attention(2 * q, k, v, q_idx, k_idx, batch, SMALL, return_lse=True, return_block_ids=True)


def test_compile_fullgraph(rng):
    """One graph, over changing lengths, with the batch made outside."""
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    for layout in (LAYOUT, Layout([41, 3], [77, 49]), Layout([64, 1], [130, 50]), Layout([1, 1], [20, 20])):
        data = golden.make_data(layout, SMALL, rng)
        args = (data.q, data.k, data.v, data.q_idx, data.k_idx, layout.batch())
        for want, found in zip(whole(*args), compiled(*args)):
            assert torch.equal(want, found)


def test_compile_with_inductor_and_the_batch_made_inside(rng):
    def step(q, k, v, q_idx, k_idx):
        batch = Batch.single(q.shape[0], k.shape[0])
        scores = openmsa.block_scores(q_idx, k_idx, batch, SMALL)
        block_ids = openmsa.select_blocks(scores, batch, SMALL)
        out = openmsa.sparse_decode(q, k, v, block_ids, batch, SMALL)
        return out + openmsa.dense_attention(q, k, v, batch, SMALL)

    data = golden.make_data(Layout([5], [70]), SMALL, rng)
    args = (data.q, data.k, data.v, data.q_idx, data.k_idx)
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(*args), step(*args))


def run_python(code: str, **env: str) -> str:
    path = os.pathsep.join([str(pathlib.Path(openmsa.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_compile_when_pytorch_is_imported_last():
    """The operators are then registered by the first call, which here is being traced."""
    out = run_python(
        "import openmsa, torch\n"
        "config = openmsa.MsaConfig(num_q_heads=2, num_kv_heads=1, head_dim=16)\n"
        "f = torch.compile(lambda q, k, b: openmsa.dense_attention(q, k, k, b, config), fullgraph=True, backend='eager')\n"
        "q, k, b = torch.ones(3, 2, 16), torch.ones(3, 1, 16), openmsa.Batch.single(3)\n"
        "print(torch.equal(f(q, k, b), torch.ones(3, 2, 16)))\n"
    )
    assert out.strip() == "True"


def test_grad_modes(rng):
    data = golden.make_data(LAYOUT, SMALL, rng)
    q = data.q.clone().requires_grad_()
    args = (data.k, data.v, data.q_idx, data.k_idx, LAYOUT.batch(), SMALL)
    want = openmsa.msa_attention(data.q, *args)
    with torch.no_grad():
        assert torch.equal(openmsa.msa_attention(q, *args), want)
    with torch.inference_mode():
        assert torch.equal(openmsa.msa_attention(q, *args), want)
    assert torch.equal(openmsa.msa_attention(torch.nn.Parameter(q.detach(), requires_grad=False), *args), want)
    found = openmsa.msa_attention(q, *args)
    assert found.requires_grad and torch.equal(found, want)


def test_lazily_negated_tensors_are_read_right(rng):
    """torch keeps some negations as a flag on the tensor; reading its memory as it lies would miss the sign."""
    data = golden.make_data(LAYOUT, SMALL, rng)
    out = openmsa.dense_attention(data.q, data.k, -data.v, LAYOUT.batch(), SMALL)
    lazy = torch._neg_view(data.v)
    assert lazy.is_neg() and lazy.stride(-1) == 1
    assert torch.equal(openmsa.dense_attention(data.q, data.k, lazy, LAYOUT.batch(), SMALL), out)


def test_concurrent_calls(rng):
    data = golden.make_data(Layout([120], [120]), SMALL, rng)
    args = (data.q, data.k, data.v, data.q_idx, data.k_idx, Batch.single(120), SMALL)
    want = openmsa.msa_attention(*args)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: openmsa.msa_attention(*args, num_threads=2), range(64)):
            assert torch.equal(found, want)


def test_the_gil_is_released(rng):
    """Another Python thread goes on while an operator runs: it sees the operator both begin and not yet end."""
    layout = Layout([1500], [1500])
    data = golden.make_data(layout, SMALL, rng)
    seen, running = [], threading.Event()

    def work() -> None:
        running.set()
        openmsa.dense_attention(data.q, data.k, data.v, layout.batch(), SMALL, backend="reference", num_threads=1)
        running.clear()

    worker = threading.Thread(target=work)
    worker.start()
    running.wait()
    while running.is_set():
        seen.append(time.perf_counter())
        time.sleep(0.001)
    worker.join()
    assert len(seen) > 10


def test_a_call_costs_little(rng):
    """Python and dispatcher overhead of one operator on one token: about 12 us on the machines tried; the limit leaves room."""
    data = golden.make_data(Layout([1], [1]), SMALL, rng)
    batch = Batch.single(1)

    def per_call(repeats: int = 300) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            openmsa.index_select(data.q_idx, data.k_idx, batch, SMALL, num_threads=1)
        return (time.perf_counter() - start) / repeats

    assert min(per_call() for _ in range(7)) < 100e-6
