"""Checks and small tensor work that the functions of openmsa.compat share."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from .. import ops
from ..batch import Batch
from ..config import MsaConfig
from ..errors import InvalidArgumentError, UnsupportedError

INT32_MAX = 2**31 - 1


@functools.lru_cache(maxsize=256)
def config(**sizes: Any) -> MsaConfig:
    return MsaConfig(**sizes)


def is_low_precision(dtype: torch.dtype) -> bool:
    """FP8, FP4, and the bytes that FP4 is packed into."""
    return dtype.itemsize == 1


def refuse_low_precision(**tensors: Any) -> None:
    """Also turns away what is no tensor at all."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"{name} is a {type(tensor).__name__}; it must be a PyTorch tensor.", name)
        if is_low_precision(tensor.dtype):
            raise not_yet(name, f"has dtype {str(tensor.dtype).removeprefix('torch.')}")


def refuse_scales(**scales: Any) -> None:
    """Scale factors of quantised tensors: 1 is what BF16 callers pass, anything else belongs to FP8 or FP4."""
    for name, scale in scales.items():
        if scale is not None and not (isinstance(scale, (int, float)) and scale == 1):
            raise not_yet(name, f"is {scale!r}" if isinstance(scale, (int, float)) else "is given")


def not_yet(name: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} {found}; FP8 and FP4 are not supported yet. Pass bfloat16 or float16 tensors without scale factors.", name
    )


def refuse_unknown(function: str, options: dict[str, Any]) -> None:
    """The tail of keywords that other versions of their package take. Quantisation is named as such, the rest as a plain mistake."""
    for name, value in options.items():
        if any(word in name for word in ("scale", "fp8", "fp4", "_sf", "kv_dtype")):
            if value is None or value is False:
                continue
            raise not_yet(name, "is given")
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def require_one_device(reference: torch.Tensor, reference_name: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"{name} is a {type(tensor).__name__}; it must be a PyTorch tensor.", name)
        if tensor.device != reference.device:
            raise InvalidArgumentError(
                f"{name} is on {tensor.device}, but {reference_name} is on {reference.device}; all tensors of a call lie on one "
                "device. Move one of them.",
                name,
            )


def require_shape(name: str, tensor: torch.Tensor, shape: Iterable[tuple[str, int | None]]) -> None:
    """``shape``: a letter and a size, or None for any, per axis."""
    shape = list(shape)
    fits = tensor.ndim == len(shape) and all(want is None or want == size for (_, want), size in zip(shape, tensor.shape))
    if not fits:
        wanted = ", ".join(letter if want is None else f"{letter} = {want}" for letter, want in shape)
        raise InvalidArgumentError(f"{name} has shape {list(tensor.shape)}; it must be [{wanted}].", name)


def int32(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}; it must be int32.", name)
    return tensor.to(torch.int32)


def sequence_of_token(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """int64 [T]. By search, so that offsets that contradict num_tokens give a wrong number but no fault on a GPU."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return (torch.searchsorted(cu_seqlens, tokens, right=True) - 1).clamp_(0, max(cu_seqlens.shape[0] - 2, 0))


def block_limits(batch: Batch, seqlens_k: torch.Tensor, num_tokens: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [T] twice: how many blocks each token sees, and how many its sequence has."""
    cu_seqlens_q = batch.cu_seqlens_q
    if seqlens_k.shape[0] == 0 or num_tokens == 0:
        nothing = torch.zeros(num_tokens, dtype=torch.int32, device=cu_seqlens_q.device)
        return nothing, nothing
    start = batch.q_start if batch.q_start is not None else seqlens_k - cu_seqlens_q.diff()
    seq = sequence_of_token(cu_seqlens_q, num_tokens)
    tokens = torch.arange(num_tokens, device=seq.device, dtype=torch.int32)
    num_keys = seqlens_k[seq]
    num_visible = torch.minimum((start - cu_seqlens_q[:-1])[seq] + tokens + 1, num_keys).clamp_(min=0)
    return blocks_of(num_visible, block_size), blocks_of(num_keys, block_size)


def blocks_of(num_tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    return (num_tokens + (block_size - 1)) // block_size


def drop_unseen(block_ids: torch.Tensor, visible: torch.Tensor, existing: torch.Tensor) -> torch.Tensor:
    """Block ids [T, H, k] without the blocks that lie in the future of their token: their kernels mask those away, ours refuse them.

    Lists ascend, so what is dropped is a tail. Ids beyond the sequence stay, for the operator to report.
    """
    visible, existing = visible[:, None, None], existing[:, None, None]
    return torch.where((block_ids >= visible) & (block_ids < existing), -1, block_ids)


def ascending(block_ids: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """The used ids of each list in order, -1 behind them."""
    ordered = torch.where(used, block_ids, INT32_MAX).sort(dim=-1).values
    return ordered.masked_fill_(ordered == INT32_MAX, -1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_ids: torch.Tensor, batch: Batch, sizes: MsaConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the path that suits the number of queries, as openmsa.msa_attention chooses it."""
    run = ops.sparse_decode if batch.max_seqlen_q <= ops.max_decode_queries(q) else ops.sparse_attention
    return run(q, k, v, block_ids, batch, sizes, return_lse=True)
