"""What the training tests on the GPU share: MSA in plain PyTorch on any device, SPEC's rule for gradients, and poisoned memory."""

from __future__ import annotations

import dataclasses

import torch

import golden
import openmsa
from golden import Layout
from openmsa import MsaConfig
from test_training import INPUTS, OPS, SMALL_TERM, gradients, leaves, run

# Of scores, query heads times queries times keys. Up to here float64 gradients come from the reference backend, above from PyTorch.
ORACLE_PAIRS = 24 * 2**20


def to(data: golden.Data, device: str, dtype: torch.dtype | None = None) -> golden.Data:
    return golden.Data(*(getattr(data, f.name).to(device, dtype) for f in dataclasses.fields(data)))


def attention_mask(layout: Layout, config: MsaConfig, block_ids: torch.Tensor | None, device: str) -> torch.Tensor:
    """golden.attention_mask made on `device` without its [T, Hkv, S, k] array: bool [T, Hq, S]."""
    num_q, num_k, size = sum(layout.seqlens_q), sum(layout.seqlens_k), config.block_size
    mask = torch.zeros((num_q, config.num_kv_heads, num_k), dtype=torch.bool, device=device)
    for tq, tk, positions in layout.rows():
        keys = torch.arange(tk.stop - tk.start, device=device)
        allowed = (keys <= positions.to(device)[:, None])[:, None].expand(-1, config.num_kv_heads, -1)
        if block_ids is not None:
            ids = block_ids[tq].long()
            num_blocks = -(-len(keys) // size)
            chosen = torch.zeros((*ids.shape[:2], num_blocks + 1), dtype=torch.bool, device=device)
            chosen.scatter_(2, torch.where(ids < 0, num_blocks, ids), True)
            allowed = allowed & chosen[:, :, keys // size]
        mask[tq, :, tk] = allowed
    return mask.repeat_interleave(config.group_size, dim=1)


def plain(op: str, data: golden.Data, config: MsaConfig, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The differentiable result of one of OPS over the keys of `mask`, computed in `dtype` where the data lie."""
    if op in ("sparse", "dense"):
        return golden.attention(data, config, mask, dtype)[0]
    return golden.index_kl_loss(data, config, mask, dtype)


def idle_rows(name: str, config: MsaConfig, mask: torch.Tensor) -> torch.Tensor:
    """Which leading entries of an input see no key, or are seen by no query."""
    by_group = mask[:, :: config.group_size]
    return ~{
        "q": lambda: mask.any(-1), "k": lambda: by_group.any(0).T, "v": lambda: by_group.any(0).T,
        "q_idx": lambda: by_group.any(-1), "k_idx": lambda: by_group.any(0).any(0),
    }[name]()  # fmt: skip


def poison(device: str) -> None:
    """PyTorch hands freed memory out again: fills a piece of it with NaN, which the next outputs and scratch then begin with."""
    if device == "cuda":
        torch.full((256 << 20,), float("nan"), device=device)
        torch.full((1 << 18,), float("nan"), device=device)


def assert_gradient(
    name: str, found: torch.Tensor, rough: torch.Tensor, want: torch.Tensor, unit: float = 1.0, idle: torch.Tensor | None = None
) -> None:
    """At most three times the error of plain PyTorch in the storage type, at worst and on the whole, plus a small term.

    `unit` is the size that one pair of a query and a key can have in a sum: what rounds to nothing may still have noise of it.
    """
    dtype = found.dtype
    assert dtype == rough.dtype and found.shape == want.shape and found.isfinite().all(), name
    if not found.numel():
        return
    want = want.to(found.device).double()
    error, measure = found.double() - want, rough.double() - want
    for what, norm, one in (
        ("largest", lambda x: x.abs().max().item(), 1.0),
        ("total", lambda x: x.norm().item(), want.numel() ** 0.5),
    ):
        bound = 3 * norm(measure) + SMALL_TERM[dtype] * max(norm(want), 0.1 * unit * one)
        assert norm(error) <= bound, (
            f"{name}: {what} error {norm(error):.3g}, allowed {bound:.3g}, {what} gradient {norm(want):.3g}"
        )
    assert idle is None or not found[idle].any(), f"{name}: a row that takes no part has a gradient"


def unit_of(op: str, num_tokens: int, config: MsaConfig) -> float:
    return 1.0 if op in ("sparse", "dense") else 1 / (max(num_tokens, 1) * config.num_kv_heads)


def check_training(
    layout: Layout, config: MsaConfig, dtype: torch.dtype, device: str, rng: torch.Generator,
    ops: tuple[str, ...] = tuple(OPS), block_ids: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Losses and gradients of `ops` by SPEC's rule, zero where nothing takes part, and the same bits when asked again."""
    exact = golden.make_data(layout, config, rng, dtype, exact_index=False)
    batch, here = layout.batch().to(device), to(exact, device)
    if block_ids is None:
        block_ids = openmsa.index_select(here.q_idx, here.k_idx, batch, config)
    weight = torch.randn(exact.q.shape, generator=rng).to(dtype).to(device)
    by_oracle = config.num_q_heads * sum(layout.seqlens_q) * sum(layout.seqlens_k) <= ORACLE_PAIRS
    for op in ops:
        d_out = weight if op in ("sparse", "dense") else None
        mask = attention_mask(layout, config, block_ids if op in ("sparse", "kl_selected") else None, device)

        def ours():
            data = leaves(here, dtype)
            poison(device)
            result = run(op, data, batch, config, block_ids)
            poison(device)
            return result, gradients(op, result, data, d_out)

        result, found = ours()
        for x, y in zip([result, *found], [(again := ours())[0], *again[1]]):
            assert torch.equal(x, y), f"{op}: a second run gave other bits"
        rough_data = leaves(here, dtype)
        rough = gradients(op, plain(op, rough_data, config, mask, dtype), rough_data, d_out)
        if by_oracle:
            wide = leaves(to(exact, "cpu"), torch.float64)
            want = run(op, wide, layout.batch(), config, block_ids.cpu(), backend="reference")
            want_grads = gradients(op, want, wide, None if d_out is None else d_out.cpu())
        else:
            wide = leaves(here, torch.float64)
            want = plain(op, wide, config, mask, torch.float64)
            want_grads = gradients(op, want, wide, d_out)
        if op.startswith("kl"):
            assert result.shape == () and result.dtype == torch.float32
            assert abs(result.item() - want.item()) <= 1e-3 * abs(want.item()) + 1e-5, op
        for name, x, y, z in zip(INPUTS[op], found, rough, want_grads):
            assert_gradient(f"{op}, d_{name}", x, y, z, unit_of(op, len(here.q), config), idle_rows(name, config, mask))
        del rough, want, want_grads, wide, rough_data
