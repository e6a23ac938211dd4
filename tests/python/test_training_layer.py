"""nn.MsaAttention in training: its three phases, whom each loss reaches, checkpoints, compilation, autocast."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import openmsa
from golden import Layout
from openmsa import Batch, MsaConfig, PagedKvCache
from openmsa.nn import MsaAttention

WIDTH = 48
CONFIG = MsaConfig(num_q_heads=4, num_kv_heads=2, head_dim=32, index_dim=16, block_size=16, top_k=3)
LAYOUT = Layout([30, 1, 109], [30, 1, 109])
PHASES = ["dense", "warmup", "sparse"]


@pytest.fixture
def layer() -> MsaAttention:
    torch.manual_seed(7)
    return MsaAttention(WIDTH, CONFIG, rotary_dim=8, rope_theta=1e4)


@pytest.fixture
def hidden(rng) -> torch.Tensor:
    return torch.randn(140, WIDTH, generator=rng)


def grads(layer: MsaAttention) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def reached(layer: MsaAttention) -> set[str]:
    return {name.removesuffix(".weight") for name, grad in grads(layer).items() if grad is not None and grad.any()}


INDEX = {"q_idx_proj", "k_idx_proj", "q_idx_norm", "k_idx_norm"}
MAIN = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}


@pytest.mark.parametrize("phase", PHASES)
def test_output_and_loss_of_each_phase(layer, hidden, phase):
    layer.phase = phase
    batch = LAYOUT.batch()
    out, index_kl = layer(hidden, batch, return_index_kl=True)
    q, k, v, q_idx, k_idx = layer.project(hidden, batch.positions())
    if phase == "sparse":
        want, lse, ids = openmsa.msa_attention(
            q, k, v, q_idx, k_idx, batch, CONFIG, return_lse=True, return_block_ids=True, backend="reference"
        )
    else:
        want, lse = openmsa.dense_attention(q, k, v, batch, CONFIG, return_lse=True, backend="reference")
        ids = None
    torch.testing.assert_close(out, layer.o_proj(want.flatten(1)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(hidden, batch), out)
    assert index_kl.shape == () and index_kl.dtype == torch.float32
    if phase == "dense":
        assert index_kl == 0 and not index_kl.requires_grad
    else:
        loss = openmsa.index_kl_loss(q, k, lse, q_idx, k_idx, batch, CONFIG, block_ids=ids, backend="reference")
        assert loss > 0.01
        torch.testing.assert_close(index_kl, loss, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("phase", PHASES)
def test_each_loss_reaches_its_own_parameters(layer, hidden, phase):
    layer.phase = phase
    hidden.requires_grad_()
    out, index_kl = layer(hidden, LAYOUT.batch(), return_index_kl=True)
    out.square().mean().backward(retain_graph=True)
    assert reached(layer) == MAIN and hidden.grad.any()
    assert all(parameter.grad is None for parameter in layer.index_parameters())
    layer.zero_grad()
    hidden.grad = None
    if phase == "dense":
        return
    index_kl.backward()
    assert reached(layer) == INDEX and hidden.grad is None
    assert all(grad is None for name, grad in grads(layer).items() if name.split(".")[0] in MAIN)
    assert {id(parameter) for parameter in layer.index_parameters()} == {id(getattr(layer, name).weight) for name in INDEX}


def test_the_index_loss_falls_when_its_parameters_are_trained(layer, hidden):
    """And the output of the warm-up stays what it was, as nothing else moves."""
    layer.phase = "warmup"
    optimizer = torch.optim.Adam(layer.index_parameters(), lr=1e-2)
    before, first = layer(hidden, LAYOUT.batch(), return_index_kl=True)
    for _ in range(30):
        optimizer.zero_grad()
        layer(hidden, LAYOUT.batch(), return_index_kl=True)[1].backward()
        optimizer.step()
    after, last = layer(hidden, LAYOUT.batch(), return_index_kl=True)
    assert torch.equal(before, after) and last < 0.5 * first


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(layer, hidden, phase, use_reentrant):
    """Two layers, recomputed in the backward pass: the losses and gradients are the same to the last bit."""
    layer.phase = phase
    batch = LAYOUT.batch()
    results = []
    for wrap in (lambda f, x: f(x), functools.partial(checkpoint, use_reentrant=use_reentrant)):
        x = hidden.clone().requires_grad_()
        block = functools.partial(layer, batch=batch, return_index_kl=True)
        first, kl_1 = wrap(block, x)
        second, kl_2 = wrap(block, x + first)
        (second.square().mean() + 0.1 * (kl_1 + kl_2)).backward()
        results.append([second, kl_1, kl_2, x.grad, *(grad for grad in grads(layer).values() if grad is not None)])
        layer.zero_grad()
    assert len(results[0]) == len(results[1]) == (10 if phase == "dense" else 14)
    for want, found in zip(*results):
        assert torch.equal(want, found)


def test_phases_switch_under_torch_compile(layer, hidden):
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for phase in ("warmup", "sparse", "dense", "sparse"):
        layer.phase = phase
        results = []
        for function in (layer, compiled):
            out, index_kl = function(hidden, LAYOUT.batch(), return_index_kl=True)
            (out.square().mean() + index_kl).backward()
            results.append([out, index_kl, *(grad for grad in grads(layer).values() if grad is not None)])
            layer.zero_grad()
        assert len(results[0]) == len(results[1])
        for want, found in zip(*results):
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_reads_a_cache(layer, hidden, phase):
    """The index keys are written in each, so that a cache filled in one phase serves another."""
    layer.phase = phase
    with torch.inference_mode():
        cache = PagedKvCache(CONFIG, 9)
        outs = [layer(hidden[a:b], step=cache.extend(["x"], [b - a])) for a, b in ((0, 90), (90, 91), (91, 139))]
        torch.testing.assert_close(torch.cat(outs), layer(hidden[:139]), rtol=1e-5, atol=1e-6)
        layer.phase = "sparse"
        last = layer(hidden[139:], step=cache.extend(["x"], [1]))
        torch.testing.assert_close(last, layer(hidden)[139:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("phase", ["warmup", "sparse"])
def test_bfloat16_autocast(layer, hidden, phase):
    layer.phase = phase
    with torch.autocast("cpu", torch.bfloat16):
        out, index_kl = layer(hidden, LAYOUT.batch(), return_index_kl=True)
    assert out.dtype == torch.bfloat16 and index_kl.dtype == torch.float32
    (out.float().square().mean() + index_kl).backward()
    assert reached(layer) == MAIN | INDEX
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads(layer).values())


def test_wrong_arguments(layer, hidden):
    with pytest.raises(openmsa.InvalidArgumentError, match=r"phase is 'warm-up'; it must be one of 'dense', 'warmup', 'sparse'"):
        layer.phase = "warm-up"
    assert layer.phase == "sparse" and "phase='sparse'" in repr(layer)
    assert MsaAttention(WIDTH, CONFIG, phase="dense").phase == "dense"
    step = PagedKvCache(CONFIG, 9).extend(["x"], [140])
    with torch.no_grad(), pytest.raises(openmsa.InvalidArgumentError, match="Pass a batch instead of a step"):
        layer(hidden, step=step, return_index_kl=True)
    with pytest.raises(openmsa.UnsupportedError, match=r"q requires a gradient, but batch has paged keys.*torch.no_grad\(\)"):
        layer(hidden, step=step)
    assert layer(hidden, Batch.single(140)).requires_grad
