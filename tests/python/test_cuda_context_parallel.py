"""Context parallelism: two processes hold a half each of a pack of documents; together they get what one process gets.

On two GPUs over NCCL, and always on the CPU over gloo.
"""

from __future__ import annotations

import datetime
import pathlib

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

import golden  # noqa: E402
import openmsa  # noqa: E402
from cuda_support import REFERENCE_MODEL, needs_gpu  # noqa: E402
from golden import Layout  # noqa: E402
from openmsa import Batch, MsaConfig  # noqa: E402

RANKS = 2
NAMES = ("out", "loss", "d_q", "d_k", "d_v", "d_q_idx", "d_k_idx")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"{torch.cuda.device_count()} GPUs, needs {RANKS}")
# Documents across the cut, one of a single token, ones that a rank has no query of; a rank holds half of the tokens.
CASES = {
    "cpu": (
        MsaConfig(num_q_heads=4, num_kv_heads=2, head_dim=32, index_dim=32, block_size=16, top_k=3), [70, 1, 129, 30], torch.float32,
    ),
    "cuda": (MsaConfig(**REFERENCE_MODEL), [700, 129, 1, 15000, 554], torch.bfloat16),
}  # fmt: skip


class AllGather(torch.autograd.Function):
    """Keys of every rank, in order of ranks; backward adds up what the ranks found for them and hands each its own."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty(RANKS * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous())
        return whole

    @staticmethod
    def backward(ctx, d_whole: torch.Tensor) -> torch.Tensor:
        own = d_whole.new_empty(d_whole.shape[0] // RANKS, *d_whole.shape[1:], dtype=torch.float32)
        if dist.get_backend() == "nccl":
            dist.reduce_scatter_tensor(own, d_whole.float())
        else:
            total = d_whole.float()
            dist.all_reduce(total)
            own.copy_(total.view(RANKS, *own.shape)[dist.get_rank()])
        return own.to(d_whole.dtype)


def fragment(documents: list[int], first: int, last: int) -> Batch:
    """The queries first to last of a pack of documents, against all of its keys."""
    seqlens_q, q_start, start = [], [], 0
    for length in documents:
        begin, end = (min(max(x - start, 0), length) for x in (first, last))
        seqlens_q.append(end - begin)
        q_start.append(begin)
        start += length
    return Batch.packed(seqlens_q, documents, q_start)


def step(data: golden.Data, batch: Batch, config: MsaConfig, num_tokens: int, gather=lambda x: x) -> list[torch.Tensor]:
    """NAMES for these queries and keys, whose `gather` the attention sees; out is its own gradient."""
    leaf = golden.Data(*(getattr(data, name).detach().requires_grad_() for name in ("q", "k", "v", "q_idx", "k_idx")))
    k, v, k_idx = gather(leaf.k), gather(leaf.v), gather(leaf.k_idx)
    out, lse, ids = openmsa.msa_attention(leaf.q, k, v, leaf.q_idx, k_idx, batch, config, return_lse=True, return_block_ids=True)
    loss = openmsa.index_kl_loss(leaf.q, k, lse, leaf.q_idx, k_idx, batch, config, block_ids=ids, num_tokens=num_tokens)
    out.backward(out.detach())
    loss.backward()
    return [out.detach(), loss.detach(), *(x.grad for x in (leaf.q, leaf.k, leaf.v, leaf.q_idx, leaf.k_idx))]


def run_rank(rank: int, device_type: str, folder: str) -> None:
    config, documents, dtype = CASES[device_type]
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    try:
        total = sum(documents)
        rng = torch.Generator().manual_seed(5)
        whole = golden.make_data(Layout(documents, documents), config, rng, dtype, exact_index=False)
        whole = golden.Data(*(getattr(whole, name).to(device) for name in ("q", "k", "v", "q_idx", "k_idx")))
        first, last = rank * total // RANKS, (rank + 1) * total // RANKS
        own = golden.Data(*(getattr(whole, name)[first:last] for name in ("q", "k", "v", "q_idx", "k_idx")))
        found = step(own, fragment(documents, first, last).to(device), config, total, AllGather.apply)
        dist.all_reduce(found[1])
        want = step(whole, fragment(documents, 0, total).to(device), config, total)
        if device_type == "cuda":
            openmsa.synchronize(device)
        errors = {}
        for name, x, y in zip(NAMES, found, want):
            y = y if name == "loss" else y[first:last]
            errors[name] = ((x.float() - y.float()).abs().max() / y.float().abs().max()).item()
        torch.save(errors, f"{folder}/errors{rank}")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=[needs_gpu, needs_two_gpus])])
def test_two_ranks_get_what_one_gets(device_type, tmp_path: pathlib.Path):
    mp.spawn(run_rank, (device_type, str(tmp_path)), nprocs=RANKS)
    # Each rank rounds its share of the key gradients to the storage type.
    allowed = RANKS * torch.finfo(CASES[device_type][2]).eps if device_type == "cuda" else 1e-5
    for rank in range(RANKS):
        errors = torch.load(tmp_path / f"errors{rank}")
        assert errors.keys() == set(NAMES)
        assert all(error <= allowed for error in errors.values()), (rank, errors)


def test_fragments_cut_documents_where_the_ranks_meet():
    batch = fragment([70, 1, 129, 30], 115, 230)
    assert batch.cu_seqlens_q.tolist() == [0, 0, 0, 85, 115]
    assert batch.cu_seqlens_k.tolist() == [0, 70, 71, 200, 230]
    assert batch.q_start.tolist() == [70, 1, 44, 0]
