"""MsaAttention: against the layer written out in plain PyTorch, and against itself cached, chunked, batched and compiled."""

from __future__ import annotations

import pytest
import torch

import golden
import openmsa
from golden import Layout
from openmsa import Batch, MsaConfig, PagedKvCache
from openmsa.nn import HeadRmsNorm, MsaAttention
from test_ops import SMALL

WIDTH = 48
CONFIG = MsaConfig(num_q_heads=4, num_kv_heads=2, head_dim=32, index_dim=16, block_size=16, top_k=3)


@pytest.fixture
def layer() -> MsaAttention:
    torch.manual_seed(7)
    layer = MsaAttention(WIDTH, CONFIG, rotary_dim=8, rope_theta=1e4)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                parameter.normal_(std=0.3)
    return layer.eval()


def plain_layer(layer: MsaAttention, hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The layer in float64, written out from its description: complex rotation, golden attention."""
    hidden = hidden.double()
    positions = torch.cat([p for _, _, p in layout.rows()])

    def head_vectors(projection, norm, heads):
        x = (hidden @ projection.weight.double().T).view(len(hidden), heads, -1)
        if norm is None:
            return x
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.eps) * (1 + norm.weight.double())
        half = layer.rotary_dim // 2
        frequency = layer.rope_theta ** -(torch.arange(half).double() * 2 / layer.rotary_dim)
        turn = torch.polar(torch.ones(len(hidden), 1, half, dtype=torch.float64), (positions[:, None] * frequency)[:, None])
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)

    data = golden.Data(
        q=head_vectors(layer.q_proj, layer.q_norm, CONFIG.num_q_heads),
        k=head_vectors(layer.k_proj, layer.k_norm, CONFIG.num_kv_heads),
        v=head_vectors(layer.v_proj, None, CONFIG.num_kv_heads),
        q_idx=head_vectors(layer.q_idx_proj, layer.q_idx_norm, CONFIG.num_kv_heads),
        k_idx=head_vectors(layer.k_idx_proj, layer.k_idx_norm, 1)[:, 0],
    )
    block_ids = golden.select(golden.block_scores(data, layout, CONFIG), layout, CONFIG)
    assert (block_ids[-1] >= 0).all() and layout.seqlens_k[-1] > CONFIG.block_size * CONFIG.top_k  # blocks really are dropped
    out, _ = golden.attention(data, CONFIG, golden.attention_mask(layout, CONFIG, block_ids))
    return out.flatten(1) @ layer.o_proj.weight.double().T


@torch.no_grad()
def test_layer_equals_its_description(layer, rng):
    layout = Layout([30, 110], [30, 110])
    hidden = torch.randn(140, WIDTH, generator=rng)
    torch.testing.assert_close(layer(hidden, layout.batch()).double(), plain_layer(layer, hidden, layout), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_rows_of_a_batch_are_sequences_of_their_own(layer, rng):
    hidden = torch.randn(3, 90, WIDTH, generator=rng)
    out = layer(hidden)
    assert out.shape == hidden.shape
    for row in range(3):
        torch.testing.assert_close(out[row], layer(hidden[row]), rtol=1e-5, atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("cuts", [[100], [1] * 100, [64, 36], [63, 1, 1, 35], [17, 40, 4, 4, 35]], ids=str)
def test_cached_steps_equal_one_pass(layer, cuts, rng):
    """Prefill in chunks, decode one by one, speculative steps: the same outputs as one pass over everything."""
    hidden = torch.randn(2, 100, WIDTH, generator=rng)
    cache = PagedKvCache(CONFIG, 14)
    outs, first = [], 0
    for n in cuts:
        outs.append(layer(hidden[:, first : first + n], step=cache.extend(["x", "y"], [n, n])))
        first += n
    torch.testing.assert_close(torch.cat(outs, dim=1), layer(hidden), rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_rejected_speculation_leaves_no_trace(layer, rng):
    hidden = torch.randn(80, WIDTH, generator=rng)
    cache = PagedKvCache(CONFIG, 8)
    layer(hidden[:70], step=cache.extend(["x"], [70]))
    layer(torch.full((9, WIDTH), 1e3), step=cache.extend(["x"], [9]))
    cache.crop("x", 70)
    found = layer(hidden[70:], step=cache.extend(["x"], [10]))
    torch.testing.assert_close(found, layer(hidden)[70:], rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_layers_share_one_step(rng):
    torch.manual_seed(3)
    layers = [MsaAttention(WIDTH, CONFIG, layer_index=i) for i in range(3)]
    hidden = torch.randn(100, WIDTH, generator=rng)

    def stack(x, step=None):
        for layer in layers:
            x = x + layer(x, step=step)
        return x

    cache = PagedKvCache(CONFIG, 7, num_layers=3)
    found = [stack(hidden[a:b], cache.extend(["x"], [b - a])) for a, b in ((0, 60), (60, 61), (61, 100))]
    torch.testing.assert_close(torch.cat(found), stack(hidden), rtol=1e-4, atol=1e-5)


def test_norm_with_zero_weight_has_gain_one():
    """KNOWN_FAULTS 21."""
    x = torch.tensor([[3.0, -4.0]])
    norm = HeadRmsNorm(2, eps=0.0)
    torch.testing.assert_close(norm(x), x / 12.5**0.5)
    norm.weight.data.fill_(1.0)
    torch.testing.assert_close(norm(x), 2 * x / 12.5**0.5)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_the_index_branch_sees_the_hidden_state_detached(layer, rng):
    hidden = torch.randn(20, WIDTH, generator=rng).requires_grad_()
    q, k, v, q_idx, k_idx = layer.project(hidden, torch.arange(20))
    (q_idx.square().sum() + k_idx.square().sum()).backward()
    assert hidden.grad is None and layer.q_idx_proj.weight.grad is not None and layer.q_proj.weight.grad is None
    (q.sum() + k.sum() + v.sum()).backward()
    assert hidden.grad is not None


@torch.no_grad()
def test_bfloat16_layer(rng):
    torch.manual_seed(5)
    layer = MsaAttention(WIDTH, CONFIG, dtype=torch.bfloat16)
    assert layer.q_norm.weight.dtype == torch.float32
    hidden = torch.randn(90, WIDTH, generator=rng, dtype=torch.bfloat16)
    out = layer(hidden)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    wide = MsaAttention(WIDTH, CONFIG)
    wide.load_state_dict(layer.state_dict())
    # Selections may differ where scores are close, so the typical row is compared.
    assert (out.float() - wide(hidden.float())).abs().amax(-1).median() < 0.02


@torch.no_grad()
def test_layer_compiles_in_one_graph(layer, rng):
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for shape in ((100, WIDTH), (77, WIDTH), (64, WIDTH)):
        hidden = torch.randn(*shape, generator=rng)
        torch.testing.assert_close(compiled(hidden), layer(hidden))


@torch.no_grad()
def test_a_cached_step_compiles_in_one_graph(layer, rng):
    """Writing to the cache and reading from it, over steps of several lengths."""
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    hidden = torch.randn(2, 100, WIDTH, generator=rng)
    cache = PagedKvCache(CONFIG, 14)
    outs, first = [], 0
    for n in (60, 1, 1, 20, 1, 17):
        outs.append(compiled(hidden[:, first : first + n], step=cache.extend(["x", "y"], [n, n])))
        first += n
    torch.testing.assert_close(torch.cat(outs, dim=1), layer(hidden), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_wrong_arguments(layer, rng):
    hidden = torch.randn(5, WIDTH, generator=rng)
    step = PagedKvCache(CONFIG, 2).extend(["x"], [5])
    with pytest.raises(openmsa.InvalidArgumentError, match="step brings its own batch"):
        layer(hidden, Batch.single(5), step=step)
    with pytest.raises(openmsa.InvalidArgumentError, match="hidden has 1 axes"):
        layer(hidden[0])
    with pytest.raises(openmsa.InvalidArgumentError, match="layer is 1"):
        MsaAttention(WIDTH, CONFIG, layer_index=1)(hidden, step=step)
    with pytest.raises(openmsa.InvalidArgumentError, match="rotary_dim is 18"):
        MsaAttention(WIDTH, CONFIG, rotary_dim=18)
    with pytest.raises(openmsa.InvalidArgumentError, match="index_dim is 0"):
        MsaAttention(WIDTH, MsaConfig(num_q_heads=1, num_kv_heads=1, head_dim=16))
    assert "rotary_dim=8" in repr(layer) and SMALL is not CONFIG
