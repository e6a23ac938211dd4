"""What the GPU tests share: the reason to skip without a usable GPU, random batches, the oracle, and the rules of docs/numerics.md."""

from __future__ import annotations

import contextlib
import os
import random

import pytest
import torch

import openmsa
from openmsa import Batch

_gpu = {backend.backend: backend for backend in openmsa.list_backends()}["cuda"]
NO_GPU = "" if _gpu.available else f"no usable GPU: {_gpu.detail}"
needs_gpu = pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)

# OPENMSA_TEST_DEVICE=cpu runs the bodies of the training tests on the CPU engine: a rehearsal where there is no GPU.
TRAINING_DEVICE = os.environ.get("OPENMSA_TEST_DEVICE", "cuda")

REFERENCE_MODEL = dict(num_q_heads=64, num_kv_heads=4, head_dim=128, index_dim=128)
SMALL = dict(num_q_heads=32, num_kv_heads=2, head_dim=128, index_dim=128, block_size=128, top_k=4)


on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
"""A training test that is small enough to run on the CPU always, next to the GPU where there is one."""


@contextlib.contextmanager
def no_waiting():
    """Raises where PyTorch would make the host wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def make(seqlens_q, seqlens_k, config, dtype=torch.bfloat16, seed=0, paged=False, integers=False, q_start=None):
    """Random tensors of a batch on the GPU; paged keys lie shuffled in a pool whose unused slots are NaN."""
    gen = torch.Generator().manual_seed(seed)
    total_q, total_k = sum(seqlens_q), sum(seqlens_k)

    def draw(*shape):
        x = torch.randint(-3, 4, shape, generator=gen).float() if integers else torch.randn(shape, generator=gen)
        return x.to(dtype).cuda()

    hq, hkv, d, di, bk = config.num_q_heads, config.num_kv_heads, config.head_dim, config.index_dim, config.block_size
    q, q_idx = draw(total_q, hq, d), draw(total_q, hkv, di)
    k, v, k_idx = draw(total_k, hkv, d), draw(total_k, hkv, d), draw(total_k, di)
    if not paged:
        return q, k, v, q_idx, k_idx, Batch.packed(seqlens_q, seqlens_k, q_start=q_start, device="cuda")
    num_blocks = [-(-n // bk) for n in seqlens_k]
    pages = list(range(sum(num_blocks) + 3))
    random.Random(seed).shuffle(pages)
    width = max(num_blocks, default=0) + 2
    table = torch.full((len(seqlens_k), width), -1, dtype=torch.int32)
    pool = [torch.full((len(pages), *shape), float("nan"), dtype=dtype).cuda() for shape in ((hkv, bk, d), (hkv, bk, d), (bk, di))]
    start = 0
    for s, n in enumerate(seqlens_k):
        for b in range(num_blocks[s]):
            page = pages.pop()
            table[s, b] = page
            rows = slice(start + b * bk, start + min((b + 1) * bk, n))
            size = rows.stop - rows.start
            pool[0][page, :, :size] = k[rows].transpose(0, 1)
            pool[1][page, :, :size] = v[rows].transpose(0, 1)
            pool[2][page, :size] = k_idx[rows]
        start += n
    batch = Batch(
        cu_seqlens_q=Batch.packed(seqlens_q).to("cuda").cu_seqlens_q, seqlens_k=torch.tensor(seqlens_k, dtype=torch.int32).cuda(),
        page_table=table.cuda(), q_start=None if q_start is None else torch.tensor(q_start, dtype=torch.int32).cuda(),
    )  # fmt: skip
    return q, *pool[:2], q_idx, pool[2], batch


def oracle(function, *args, **kwargs):
    batch = kwargs.pop("batch")
    host = [a.cpu().double() if a.is_floating_point() else a.cpu() for a in args]
    return function(*host, batch.to("cpu"), kwargs.pop("config"), backend="reference", **kwargs)


def assert_selection(ids, scores, config, batch, slack):
    """SPEC: what was chosen is at least as good as what was not, up to the accumulation error; ids ascending; counts right."""
    ids, scores = ids.cpu().long(), scores.clone()
    reference = openmsa.select_blocks(scores, batch.to("cpu"), config, backend="reference").long()
    assert ((ids >= 0).sum(-1) == (reference >= 0).sum(-1)).all()
    ordered = (ids[..., 1:] > ids[..., :-1]) | (ids[..., 1:] == -1)
    assert ordered.all()
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(-1, ids.clamp(min=0), ids >= 0) if scores.shape[-1] else None
    wanted = torch.zeros_like(chosen)
    wanted.scatter_(-1, reference.clamp(min=0), reference >= 0) if scores.shape[-1] else None
    # Blocks that only one side chose must be within the bound of the other side's.
    extra = torch.where(chosen & ~wanted, scores, torch.inf).amin(-1)
    missing = torch.where(wanted & ~chosen, scores, -torch.inf).amax(-1)
    assert (extra >= missing - 2 * slack).logical_or(torch.isinf(extra)).all()


def assert_attention(out, lse, reference, reference_lse, plain, scale=2.0):
    error = (out.cpu().double() - reference).abs().max().item() if out.numel() else 0.0
    allowed = scale * (plain.double() - reference).abs().max().item() + 2e-3 if out.numel() else 0.0
    assert error <= allowed, (error, allowed)
    assert not out.isnan().any()
    finite = torch.isfinite(reference_lse)
    assert torch.equal(torch.isfinite(lse.cpu()), finite)
    assert (lse.cpu().double()[finite] - reference_lse[finite]).abs().max().item() < 1e-3 if finite.any() else True
