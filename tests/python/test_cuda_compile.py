"""The operators inside PyTorch on the GPU: opcheck, fake tensors, torch.compile in one graph, CUDA-graph trees."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import openmsa  # noqa: E402
from cuda_support import make, needs_gpu  # noqa: E402
from openmsa import Batch, MsaConfig, PagedKvCache  # noqa: E402
from openmsa.nn import MsaAttention  # noqa: E402

pytestmark = needs_gpu

CONFIG = MsaConfig(num_q_heads=8, num_kv_heads=2, head_dim=64, index_dim=64, block_size=64, top_k=4)
OPS = ["block_scores", "select_blocks", "index_select", "sparse_attention", "sparse_decode", "msa_attention", "dense_attention"]


def sample(op: str, paged: bool) -> tuple:
    """Arguments of torch.ops.openmsa.<op>."""
    q, k, v, q_idx, k_idx, batch = make([40, 3], [400, 449], CONFIG, paged=paged)
    # opcheck compares inputs before and after, and the NaN of unused slots differs from itself.
    k, v, k_idx = (x.nan_to_num(0) for x in (k, v, k_idx))
    scores = openmsa.block_scores(q_idx, k_idx, batch, CONFIG)
    block_ids = openmsa.select_blocks(scores, batch, CONFIG)
    tensors = {
        "block_scores": (q_idx, k_idx),
        "select_blocks": (scores,),
        "index_select": (q_idx, k_idx),
        "sparse_attention": (q, k, v, block_ids),
        "sparse_decode": (q, k, v, block_ids),
        "msa_attention": (q, k, v, q_idx, k_idx, True),
        "dense_attention": (q, k, v, True),
    }
    return (
        *tensors[op], batch.cu_seqlens_q, batch.cu_seqlens_k, batch.seqlens_k, batch.page_table, batch.q_start,
        batch.max_seqlen_q, batch.max_seqlen_k, list(CONFIG._sizes), CONFIG.softmax_scale, "auto", 0, False,
    )  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_opcheck(op, paged):
    results = torch.library.opcheck(getattr(torch.ops.openmsa, op).default, sample(op, paged))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", OPS)
def test_fake_tensors_have_the_shapes_of_real_ones(op):
    from torch._subclasses.fake_tensor import FakeTensorMode

    args = sample(op, False)
    real = getattr(torch.ops.openmsa, op)(*args)
    with FakeTensorMode() as mode:
        fake = getattr(torch.ops.openmsa, op)(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    real, fake = (x if isinstance(x, tuple) else (x,) for x in (real, fake))
    about = [[(x.shape, x.dtype, x.stride(), x.device) for x in outputs] for outputs in (real, fake)]
    assert about[0] == about[1]


def whole(q, k, v, q_idx, k_idx, batch):
    return openmsa.msa_attention(2 * q, k, v, q_idx, k_idx, batch, CONFIG, return_lse=True, return_block_ids=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_in_one_graph(backend):
    """Over changing lengths and both paths, with the batch made outside."""
    compiled = torch.compile(whole, fullgraph=True, backend=backend)
    for seqlens in (([40, 3], [400, 449]), ([41, 3], [477, 449]), ([1, 1], [320, 20]), ([16, 16], [900, 20])):
        args = make(*seqlens, CONFIG, paged=True)
        for want, found in zip(whole(*args), compiled(*args)):
            assert torch.equal(want, found)


def test_compile_with_the_batch_made_inside():
    def step(q, k, v, q_idx, k_idx):
        out = openmsa.msa_attention(q, k, v, q_idx, k_idx, config=CONFIG)
        return out + openmsa.dense_attention(q, k, v, Batch.single(q.shape[0], k.shape[0], device=q.device), CONFIG)

    q, k, v, q_idx, k_idx, _ = make([5], [700], CONFIG)
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(q, k, v, q_idx, k_idx), step(q, k, v, q_idx, k_idx))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_layer_compiles_in_one_graph(mode):
    torch.manual_seed(0)
    layer = MsaAttention(128, CONFIG, dtype=torch.bfloat16, device="cuda").eval()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for seed in range(4):  # reduce-overhead warms up, captures, and then replays
        hidden = torch.randn(500, 128, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()
        want = layer(hidden).float()
        error = (compiled(hidden).float() - want).norm(dim=-1) / want.norm(dim=-1)
        assert error.quantile(0.95) < 0.03  # fused norms round otherwise, so a near tie may fall the other way


@torch.no_grad()
def test_cached_steps_compile_in_one_graph():
    torch.manual_seed(0)
    layer = MsaAttention(128, CONFIG, dtype=torch.bfloat16, device="cuda").eval()
    compiled = torch.compile(layer, fullgraph=True)
    hidden = torch.randn(2, 300, 128, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    cache = PagedKvCache(CONFIG, 14, dtype=torch.bfloat16, device="cuda")
    outs, first = [], 0
    for n in (250, 1, 1, 20, 1, 27):
        outs.append(compiled(hidden[:, first : first + n], step=cache.extend(["x", "y"], [n, n])))
        first += n
    found, want = torch.cat(outs, dim=1).float(), layer(hidden).float()
    error = (found - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.quantile(0.95) < 0.03
    openmsa.synchronize("cuda")
