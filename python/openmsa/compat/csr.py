"""build_k2q_csr and sparse_atten_func: lists by key block, and attention over them."""

from __future__ import annotations

import dataclasses
import math

import torch

from ..batch import Batch
from ..errors import InvalidArgumentError
from . import arguments


@dataclasses.dataclass(frozen=True)
class SparseAttentionSchedule:
    """What build_k2q_csr prepares for sparse_atten_func beyond the lists by key block; opaque to callers.

    OpenMSA's kernels start from the lists by query, so a schedule holds those, and attention need not invert the CSR again.
    """

    block_ids: torch.Tensor
    """int32 [T, Hkv, k], ascending, -1 in the tail."""


@dataclasses.dataclass(frozen=True)
class _Rows:
    """How CSR rows are numbered: first block 0 of every sequence that has one, then block 1 of every sequence, and so on."""

    row_of_block: torch.Tensor  # int64 [levels, B]; `capacity` where a sequence has no such block
    capacity: int


def _number_rows(cu_seqlens_k: torch.Tensor, block_size: int, num_levels: int, capacity: int) -> _Rows:
    num_blocks = arguments.blocks_of(cu_seqlens_k.diff(), block_size)
    levels = torch.arange(num_levels, device=cu_seqlens_k.device)
    exists = levels[:, None] < num_blocks
    rows = exists.flatten().cumsum(0).view_as(exists) - 1
    return _Rows(torch.where(exists & (rows < capacity), rows, capacity), capacity)


def _check_offsets(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None) -> None:
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is None:
            continue
        if not isinstance(offsets, torch.Tensor) or offsets.dtype != torch.int32 or offsets.ndim != 1 or offsets.shape[0] < 1:
            raise InvalidArgumentError(f"{name} must be an int32 tensor [B+1], from 0 to the number of tokens.", name)
        if offsets.shape != cu_seqlens_q.shape:
            raise InvalidArgumentError(
                f"{name} has {offsets.shape[0]} entries, but cu_seqlens_q has {cu_seqlens_q.shape[0]}; both have B+1.", name
            )


def build_k2q_csr(
    q2k_indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    kv_block_size: int,
    *,
    total_k: int | None = None,
    max_seqlen_k: int | None = None,
    max_seqlen_q: int | None = None,
    total_rows: int | None = None,
    qhead_per_kv: int = 1,
    return_schedule: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, SparseAttentionSchedule]:
    """Inverts lists by query into lists by key block: ``(row_ptr, q_indices)``, with ``return_schedule`` also a schedule.

    Row r of head h is ``q_indices[h, row_ptr[h, r] : row_ptr[h, r + 1]]``: the queries that chose the row's block, ascending, counted
    from the start of their own sequence. Rows go by block number first and sequence second: block 0 of every sequence that has one,
    then block 1 of every sequence, and so on. Behind the last row stands -1. Pass the schedule on to sparse_atten_func, which then
    has nothing left to invert.

    :param q2k_indices: int32 [Hkv, T, k], ``sparse_topk_select(...).transpose(0, 1)``: block numbers within the token's sequence, in
        any order; negative entries are unused
    :param cu_seqlens_q: int32 [B+1], as cu_seqlens_k
    :param total_k: keys of the batch; without it and ``total_rows``, offsets on a GPU are waited for
    :param max_seqlen_k: longest sequence, if known; ``max_seqlen_q`` and ``qhead_per_kv`` are accepted without effect
    :param total_rows: rows to allocate, at least the number of blocks of all sequences. Derived from ``total_k`` this is an upper
        bound, and the surplus rows are empty
    """
    arguments.refuse_low_precision(q2k_indices=q2k_indices)
    arguments.require_shape("q2k_indices", q2k_indices, [("Hkv", None), ("T", None), ("k", None)])
    _check_offsets(cu_seqlens_q, cu_seqlens_k)
    arguments.require_one_device(q2k_indices, "q2k_indices", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if kv_block_size < 1:
        raise InvalidArgumentError(f"kv_block_size is {kv_block_size}; it must be at least 1.", "kv_block_size")
    ids = arguments.int32("q2k_indices", q2k_indices)
    num_heads, num_tokens, topk = ids.shape
    num_seqs = cu_seqlens_k.shape[0] - 1
    if cu_seqlens_k.device.type == "cpu" or (total_k is None and total_rows is None):
        lengths = cu_seqlens_k.diff().tolist()
        max_seqlen_k = max(lengths, default=0)
        num_rows = sum(-(-n // kv_block_size) for n in lengths)
    elif total_k is not None:
        num_rows = (int(total_k) + num_seqs * (kv_block_size - 1)) // kv_block_size
    else:
        num_rows = int(total_rows)
    if total_rows is not None:
        if cu_seqlens_k.device.type == "cpu" and total_rows < num_rows:
            raise InvalidArgumentError(f"total_rows is {total_rows}, but the sequences have {num_rows} blocks.", "total_rows")
        num_rows = int(total_rows)
    num_levels = num_rows if max_seqlen_k is None else min(num_rows, -(-int(max_seqlen_k) // kv_block_size))
    row_ptr = torch.zeros(num_heads, num_rows + 1, dtype=torch.int32, device=ids.device)
    q_indices = torch.full((num_heads, num_tokens * topk), -1, dtype=torch.int32, device=ids.device)
    if num_levels > 0 and q_indices.numel() > 0:
        _invert(ids, cu_seqlens_q, _number_rows(cu_seqlens_k, kv_block_size, num_levels, num_rows), row_ptr, q_indices)
    if ids.device.type == "cpu" and int(row_ptr[:, -1].sum()) != int((ids >= 0).sum()):
        raise InvalidArgumentError(
            "q2k_indices names blocks that its sequences do not have; ids count blocks within the token's own sequence.", "q2k_indices"
        )
    if not return_schedule:
        return row_ptr, q_indices
    return row_ptr, q_indices, SparseAttentionSchedule(arguments.ascending(ids, ids >= 0).transpose(0, 1))


def _invert(
    ids: torch.Tensor, cu_seqlens_q: torch.Tensor, rows: _Rows, row_ptr: torch.Tensor, q_indices: torch.Tensor
) -> None:
    num_heads, num_tokens, _ = ids.shape
    seq = arguments.sequence_of_token(cu_seqlens_q, num_tokens)
    known = (ids >= 0) & (ids < rows.row_of_block.shape[0])
    row = rows.row_of_block[torch.where(known, ids, 0).long(), seq[None, :, None]]
    row = torch.where(known, row, rows.capacity).flatten(1)
    counts = torch.zeros(num_heads, rows.capacity + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(1, row, torch.ones_like(row, dtype=torch.int32))
    row_ptr[:, 1:] = counts[:, :-1].cumsum(1)
    local = torch.arange(num_tokens, device=ids.device, dtype=torch.int32) - cu_seqlens_q[seq]
    # A stable sort keeps the queries of a row ascending; what belongs to no row comes last.
    row, order = row.sort(dim=1, stable=True)
    chosen = local[order // ids.shape[2]]
    q_indices.copy_(torch.where(row < rows.capacity, chosen, -1))


def _revert(
    row_ptr: torch.Tensor, q_indices: torch.Tensor, topk: int, cu_seqlens_q: torch.Tensor, rows: _Rows, num_tokens: int
) -> torch.Tensor:
    """Block ids [T, Hkv, k] from lists by key block. Rows ascend by block, so every token meets its blocks in order."""
    num_heads, num_edges = q_indices.shape
    num_levels, num_seqs = rows.row_of_block.shape
    device, capacity = q_indices.device, rows.capacity
    if num_edges == 0 or num_levels == 0 or num_seqs == 0:
        return torch.full((num_tokens, num_heads, topk), -1, dtype=torch.int32, device=device)
    block_of_row, seq_of_row = (
        torch.zeros(capacity + 1, dtype=torch.int64, device=device).scatter_(
            0, rows.row_of_block.flatten(), index.expand(num_levels, num_seqs).flatten()
        )
        for index in (torch.arange(num_levels, device=device)[:, None], torch.arange(num_seqs, device=device))
    )
    edges = torch.arange(num_edges, device=device, dtype=torch.int32).expand(num_heads, -1).contiguous()
    row = torch.searchsorted(row_ptr[:, 1:].contiguous(), edges, right=True)  # capacity for what stands behind the last row
    local, seq = q_indices.long(), seq_of_row[row]
    begin, end = cu_seqlens_q[:-1].long()[seq], cu_seqlens_q[1:].long()[seq]
    token = torch.where((row < capacity) & (local >= 0) & (begin + local < end.clamp(max=num_tokens)), begin + local, num_tokens)
    token, order = token.sort(dim=1, stable=True)
    slot = torch.arange(num_edges, device=device) - torch.searchsorted(token, token)
    # One more element takes everything that has no place.
    place = torch.where((token < num_tokens) & (slot < topk), token * topk + slot, num_tokens * topk)
    ids = torch.full((num_heads, num_tokens * topk + 1), -1, dtype=torch.int32, device=device)
    ids.scatter_(1, place, block_of_row[row.gather(1, order)].int())
    return ids[:, :-1].view(num_heads, num_tokens, topk).transpose(0, 1)


def sparse_atten_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k2q_row_ptr: torch.Tensor,
    k2q_q_indices: torch.Tensor,
    topK: int,  # noqa: N803, their name
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int = 128,
    causal: bool = False,
    softmax_scale: float | None = None,
    lse_temperature_scale: float = 1.0,
    return_temperature_lse: bool = False,
    partial_dtype: torch.dtype = torch.bfloat16,
    return_softmax_lse: bool = False,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    schedule: SparseAttentionSchedule | None = None,
    usable_SM_count: int = -1,  # noqa: N803
    qk_dtype: torch.dtype | None = None,
    pv_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attention over the blocks that build_k2q_csr inverted: ``out``, ``(out, lse)`` or ``(out, lse, temperature_lse)``.

    out is [T, Hq, D] in q's dtype; lse is [T, Hq] float32, the natural log of the sum of exponentials of the scaled scores, -inf
    where a query sees no key (out is 0 there). Note the default of theirs: ``causal=False``. Nothing here waits for a GPU.

    :param q: [T, Hq, D]
    :param k: [S, Hkv, D], or with ``page_table`` [pages, Hkv, blk_kv, D]; v alike
    :param k2q_row_ptr: [Hkv, rows+1] and ``k2q_q_indices`` [Hkv, T * topK] from build_k2q_csr for the same offsets
    :param cu_seqlens_k: int32 [B+1]; also numbers the CSR's rows, so only a call with a schedule and ``seqused_k`` can do without
    :param max_seqlen_k: longest sequence (an upper bound will do), as ``max_seqlen_q``
    :param causal: queries stand at the end of their sequence's keys, and see no later ones
    :param lse_temperature_scale: temperature_lse is the lse with ``softmax_scale / lse_temperature_scale``; one more pass if not 1
    :param page_table: int32 [B, max_pages]
    :param seqused_k: int32 [B]: keys in use, for paged keys; default by cu_seqlens_k
    :param schedule: from ``build_k2q_csr(..., return_schedule=True)``; without one the CSR is inverted back first
    :param partial_dtype: accepted without effect (partial results keep the precision they need), as is ``usable_SM_count``
    """
    arguments.refuse_low_precision(q=q, k=k, v=v)
    arguments.refuse_unknown("sparse_atten_func", options)
    for name, dtype in (("partial_dtype", partial_dtype), ("qk_dtype", qk_dtype), ("pv_dtype", pv_dtype)):
        if dtype is not None and arguments.is_low_precision(dtype):
            raise arguments.not_yet(name, f"is {dtype}")
    _check_offsets(cu_seqlens_q, cu_seqlens_k)
    tensors = {"k": k, "v": v, "k2q_row_ptr": k2q_row_ptr, "k2q_q_indices": k2q_q_indices, "cu_seqlens_q": cu_seqlens_q,
               "cu_seqlens_k": cu_seqlens_k, "page_table": page_table, "seqused_k": seqused_k}  # fmt: skip
    arguments.require_one_device(q, "q", **tensors)
    num_axes = 3 if page_table is None else 4
    if q.ndim != 3 or k.ndim != num_axes:
        raise InvalidArgumentError(
            f"k has shape {list(k.shape)} and q {list(q.shape)}; q is [T, Hq, D], k is [S, Hkv, D], or with page_table "
            "[pages, Hkv, blk_kv, D].",
            "k",
        )
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if num_axes == 4 and k.shape[2] != blk_kv:
        raise InvalidArgumentError(f"blk_kv is {blk_kv}, but k has pages of {k.shape[2]} tokens; they must be equal.", "blk_kv")
    if return_temperature_lse and not return_softmax_lse:
        raise InvalidArgumentError("return_temperature_lse needs return_softmax_lse=True.", "return_temperature_lse")
    if not (math.isfinite(lse_temperature_scale) and lse_temperature_scale > 0):
        raise InvalidArgumentError(
            f"lse_temperature_scale is {lse_temperature_scale}; it must be finite and positive.", "lse_temperature_scale"
        )
    if cu_seqlens_k is None and (schedule is None or page_table is None or seqused_k is None):
        raise InvalidArgumentError("cu_seqlens_k is missing; it is int32 [B+1], from 0 to the number of keys.", "cu_seqlens_k")
    arguments.require_shape("k2q_row_ptr", k2q_row_ptr, [("Hkv", num_kv_heads), ("rows + 1", None)])
    arguments.require_shape("k2q_q_indices", k2q_q_indices, [("Hkv", num_kv_heads), ("T * topK", None)])
    max_seqlen_q, max_seqlen_k, topk = int(max_seqlen_q), int(max_seqlen_k), int(topK)
    seqlens_k = cu_seqlens_k.diff() if seqused_k is None or page_table is None else arguments.int32("seqused_k", seqused_k)
    arguments.require_shape("seqused_k", seqlens_k, [("B", cu_seqlens_q.shape[0] - 1)])
    keys = {"cu_seqlens_k": cu_seqlens_k} if page_table is None else {"seqlens_k": seqlens_k, "page_table": page_table}
    # Not causal: queries that stand behind the last key see all of them.
    batch = Batch(
        cu_seqlens_q=cu_seqlens_q, q_start=None if causal else seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **keys
    )
    if schedule is not None:
        if not isinstance(schedule, SparseAttentionSchedule):
            raise InvalidArgumentError(f"schedule is a {type(schedule).__name__}; pass what build_k2q_csr returned.", "schedule")
        ids = schedule.block_ids
    else:
        rows = _number_rows(cu_seqlens_k, blk_kv, -(-max_seqlen_k // blk_kv), k2q_row_ptr.shape[1] - 1)
        ids = _revert(k2q_row_ptr, k2q_q_indices, topk, cu_seqlens_q, rows, num_tokens)
    arguments.require_shape("schedule.block_ids", ids, [("T", num_tokens), ("Hkv", num_kv_heads), ("topK", topk)])
    visible, existing = arguments.block_limits(batch, seqlens_k, num_tokens, blk_kv)
    if cu_seqlens_k is not None:  # blocks behind seqused_k do exist, only not yet
        existing = torch.maximum(existing, arguments.block_limits(batch, cu_seqlens_k.diff(), num_tokens, blk_kv)[1])
    ids = arguments.drop_unseen(ids, visible, existing)
    sizes = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": blk_kv, "top_k": topk,
             "num_local_blocks": 0}  # fmt: skip
    config = arguments.config(**sizes, softmax_scale=softmax_scale)
    result, lse = arguments.attend(q, k, v, ids, batch, config)
    if out is not None:
        arguments.require_shape("out", out, [("T", num_tokens), ("Hq", num_q_heads), ("D", head_dim)])
        result = out.copy_(result)
    if not return_softmax_lse:
        return result
    if not return_temperature_lse:
        return result, lse
    if lse_temperature_scale == 1:
        return result, lse, lse
    cooler = arguments.config(**sizes, softmax_scale=config.effective_softmax_scale / lse_temperature_scale)
    return result, lse, arguments.attend(q, k, v, ids, batch, cooler)[1]
