"""MsaAttention on the GPU: as right as on the CPU, cached, chunked, inside a graph, and without waiting."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import openmsa  # noqa: E402
from cuda_support import needs_gpu, no_waiting  # noqa: E402
from openmsa import Batch, MsaConfig, PagedKvCache  # noqa: E402
from openmsa.nn import MsaAttention  # noqa: E402

pytestmark = needs_gpu

WIDTH = 256
CONFIG = MsaConfig(num_q_heads=16, num_kv_heads=2, head_dim=64, index_dim=64, block_size=64, top_k=4)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def layers() -> tuple[MsaAttention, MsaAttention, MsaAttention]:
    """The same rounded weights: bfloat16 on the GPU, bfloat16 on the CPU, float32 on the CPU."""
    torch.manual_seed(7)
    layer = MsaAttention(WIDTH, CONFIG, rotary_dim=32, rope_theta=1e4, dtype=BF16)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                parameter.normal_(std=0.3)
    return copy.deepcopy(layer).cuda().eval(), layer.eval(), copy.deepcopy(layer).float().eval()


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def hidden_states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed)).to(BF16)


def assert_rows_agree(found: torch.Tensor, want: torch.Tensor, tolerance: float = 0.03) -> None:
    """Rounded projections may choose another block where two scores nearly tie, so one row in twenty may be off."""
    found, want = found.float().flatten(0, -2), want.float().flatten(0, -2)
    assert found.isfinite().all()
    error = (found - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.quantile(0.95) < tolerance, error.quantile(0.95)


def test_as_right_as_on_the_cpu(layers):
    """Typical error against float32: not above twice that of the same bfloat16 layer on the CPU."""
    gpu, cpu, exact = layers
    hidden = hidden_states(900)
    want = exact(hidden.float())

    def error(out: torch.Tensor) -> float:
        return ((out.cpu().float() - want).norm(dim=-1) / want.norm(dim=-1)).median().item()

    batch = Batch.packed([600, 1, 299])
    found, on_cpu = gpu(hidden.cuda()), cpu(hidden)
    assert 0 < error(found) <= 2 * error(on_cpu)
    want = exact(hidden.float(), batch)
    assert error(gpu(hidden.cuda(), batch.to("cuda"))) <= 2 * error(cpu(hidden, batch))


@pytest.mark.parametrize("cuts", [[400], [300, *[1] * 100], [64, 336], [255, 1, 16, 128], [200, 4, 4, 8, 184]], ids=str)
def test_cached_steps_equal_one_pass(layers, cuts):
    layer = layers[0]
    hidden = hidden_states(2, 400).cuda()
    cache = PagedKvCache(CONFIG, 14, dtype=BF16, device="cuda")
    for pool in (cache.k, cache.v, cache.k_idx):
        pool.fill_(float("nan"))
    outs, first = [], 0
    for n in cuts:
        outs.append(layer(hidden[:, first : first + n], step=cache.extend(["x", "y"], [n, n])))
        first += n
    assert_rows_agree(torch.cat(outs, dim=1), layer(hidden))
    openmsa.synchronize("cuda")


def test_no_call_waits(layers):
    layer = layers[0]
    hidden = hidden_states(2, 300).cuda()
    cache = PagedKvCache(CONFIG, 20, dtype=BF16, device="cuda")
    torch.cuda.synchronize()
    with no_waiting():
        layer(hidden)
        layer(hidden[0], Batch.packed([100, 200], device="cuda"))
        layer(hidden, step=cache.extend(["x", "y"], [300, 300]))
        for i in range(4):
            layer(hidden[:, i : i + 1], step=cache.extend(["x", "y"], [1, 1]))


def test_a_layer_in_a_graph(layers):
    """Without a batch the layer counts out its own, which a graph can hold; decoding steps are refilled between replays."""
    layer = layers[0]
    hidden = hidden_states(2, 300).cuda()
    want = layer(hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(hidden)
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)

    cache, other = (PagedKvCache(CONFIG, 20, dtype=BF16, device="cuda") for _ in range(2))
    for c in (cache, other):
        layer(hidden, step=c.extend(["x", "y"], [300, 300]))
    token = hidden_states(2, 1, seed=1).cuda()
    step = cache.extend(["x", "y"], [1, 1], max_seqlen=512)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        out = layer(token, step=step)
    for seq in "xy":
        cache.crop(seq, 300)
    for i in range(70):  # over a page border
        token.copy_(hidden[:, i : i + 1])
        step = cache.extend(["x", "y"], [1, 1], into=step)
        graph.replay()
        want = layer(token, step=other.extend(["x", "y"], [1, 1]))
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-3)


def test_float32_is_refused_by_name(layers):
    with pytest.raises(openmsa.UnsupportedError, match="float32 is not one of bfloat16|float16.*Change the dtype"):
        copy.deepcopy(layers[2]).cuda()(hidden_states(100).float().cuda())
