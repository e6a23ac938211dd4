"""sparse_topk_select: from a score tensor to lists of blocks."""

from __future__ import annotations

import math
import operator

import torch

from .. import ops
from ..batch import Batch
from ..errors import InvalidArgumentError
from . import arguments

_BLOCK_SIZE = 128  # only positions count in blocks here, so any size that every backend takes would do
_CHUNK_ELEMENTS = 1 << 25  # scores brought into token-major order at a time: 128 MiB


def sparse_topk_select(
    max_score: torch.Tensor,
    topk: int,
    num_valid_pages: int | torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
    max_score_layout: str = "HKT",
) -> torch.Tensor:
    """The ``topk`` best blocks of every token and head: [T, H, topk] int32, ascending, -1 in the tail.

    Heads are independent. Equal scores: the lower block wins. A block whose score is -inf is not chosen unless forced, so rows that
    see fewer than ``topk`` blocks end in -1 (their kernel may list such blocks; attention masks them). NaN ranks below -inf.

    :param max_score: float32 [H, blocks, T] as fmha_sm100 returns it, or [T, H, blocks] with ``max_score_layout="THK"``, which saves
        a transposed copy
    :param num_valid_pages: only blocks below this number may be chosen; one number, or a tensor [T] with one per token
    :param output: int32 [T, H, topk] to write to
    :param force_begin_blocks: the first blocks, always in
    :param force_end_blocks: the last blocks below ``num_valid_pages``, always in. With one number for the whole call this is the end
        of the sequence and not the query's own block; give ``num_valid_pages`` per token for that.
    """
    arguments.refuse_low_precision(max_score=max_score)
    if max_score.dtype != torch.float32:
        raise InvalidArgumentError(f"max_score has dtype {str(max_score.dtype).removeprefix('torch.')}; it must be float32.", "max_score")
    layout = str(max_score_layout).upper()
    if layout not in ("HKT", "THK"):
        raise InvalidArgumentError(f"max_score_layout is {max_score_layout!r}; it must be 'HKT' or 'THK'.", "max_score_layout")
    arguments.require_shape("max_score", max_score, [(letter, None) for letter in layout])
    by_token = max_score if layout == "THK" else max_score.permute(2, 0, 1)
    num_tokens, num_heads, num_blocks = by_token.shape
    topk, begin, end = operator.index(topk), operator.index(force_begin_blocks), operator.index(force_end_blocks)
    if topk < 1:
        raise InvalidArgumentError(f"topk is {topk}; it must be at least 1.", "topk")
    if min(begin, end) < 0 or begin + end > topk:
        raise InvalidArgumentError(
            f"force_begin_blocks is {begin} and force_end_blocks is {end}; they must be 0 or more and together at most topk = {topk}.",
            "force_begin_blocks",
        )
    limits = None
    if isinstance(num_valid_pages, torch.Tensor) and num_valid_pages.ndim > 0:
        arguments.require_one_device(max_score, "max_score", num_valid_pages=num_valid_pages)
        arguments.require_shape("num_valid_pages", num_valid_pages, [("T", num_tokens)])
        limits = arguments.int32("num_valid_pages", num_valid_pages)
    elif num_valid_pages is not None:
        num_valid = int(num_valid_pages)
        if not 0 <= num_valid <= num_blocks:
            raise InvalidArgumentError(
                f"num_valid_pages is {num_valid}; max_score has {num_blocks} blocks, so it must be 0 to {num_blocks}.",
                "num_valid_pages",
            )
        by_token, num_blocks = by_token[..., :num_valid], num_valid
    if output is not None:
        arguments.require_one_device(max_score, "max_score", output=output)
        arguments.require_shape("output", output, [("T", num_tokens), ("H", num_heads), ("topk", topk)])
        if output.dtype != torch.int32:
            raise InvalidArgumentError(f"output has dtype {str(output.dtype).removeprefix('torch.')}; it must be int32.", "output")
    if 0 in (num_blocks, num_heads, num_tokens):
        nothing = torch.full((num_tokens, num_heads, topk), -1, dtype=torch.int32, device=max_score.device)
        return nothing if output is None else output.copy_(nothing)
    is_read_only = limits is None and begin == end == 0
    in_place = is_read_only and by_token.stride(-1) == 1
    chunk = max(num_tokens if in_place else _CHUNK_ELEMENTS // (num_heads * num_blocks), 1)
    if output is None and chunk < num_tokens:
        output = torch.empty(num_tokens, num_heads, topk, dtype=torch.int32, device=max_score.device)
    for first in range(0, num_tokens, chunk):
        rows = slice(first, first + chunk)
        scores = by_token[rows] if in_place else by_token[rows].clone(memory_format=torch.contiguous_format)
        if not is_read_only:
            _apply_limits(scores, num_blocks if limits is None else limits[rows, None, None], begin, end)
        ids = _select(scores, topk)
        if output is None:
            return ids
        output[rows] = ids
    return output


def _apply_limits(scores: torch.Tensor, limits: int | torch.Tensor, begin: int, end: int) -> None:
    """Writes into the scores what the caller asked for: +inf forces a block, -inf takes out one that is beyond its token's limit."""
    blocks = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.int32)
    scores.masked_fill_((blocks < begin) | (blocks >= limits - end), math.inf)
    scores.masked_fill_(blocks >= limits, -math.inf)


def _select(scores: torch.Tensor, topk: int) -> torch.Tensor:
    num_tokens, num_heads, num_blocks = scores.shape
    # All tokens as one sequence behind its keys, where everything is visible: what a token must not see is -inf already. The offsets
    # are made on the device, so there is nothing to copy and a graph can capture it.
    num_keys = num_blocks * _BLOCK_SIZE
    cu_seqlens_q, cu_seqlens_k = (
        torch.arange(0, n + 1, n, dtype=torch.int32, device=scores.device) for n in (num_tokens, num_keys)
    )
    batch = Batch(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, q_start=cu_seqlens_k[1:], max_seqlen_q=num_tokens, max_seqlen_k=num_keys
    )
    config = arguments.config(
        num_q_heads=num_heads, num_kv_heads=num_heads, head_dim=_BLOCK_SIZE, block_size=_BLOCK_SIZE, top_k=topk, num_local_blocks=0
    )
    ids = ops.select_blocks(scores, batch, config)
    # The operator fills up with blocks of -inf, which it was told are visible. Where there are fewer blocks than slots, it ends in -1.
    seen = scores.gather(-1, ids.clamp(min=0).long() if num_blocks < topk else ids.long()) != -math.inf
    if num_blocks < topk:
        seen &= ids >= 0
    return arguments.ascending(ids, seen)
