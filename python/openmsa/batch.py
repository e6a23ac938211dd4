"""Batch: where each sequence's queries and keys lie, and at which positions the queries stand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

_FIELDS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table", "q_start")


def _is_torch(value: Any) -> bool:
    return hasattr(value, "data_ptr")


def _host_max(values: Any, *, cumulative: bool) -> int:
    """The longest length in seqlens or cu_seqlens; 0 for anything malformed, which the operators then refuse with a full text."""
    host = values.detach().cpu().numpy() if _is_torch(values) else np.asarray(values)
    if host.dtype != np.int32 or host.ndim != 1 or host.size <= int(cumulative):
        return 0
    lengths = np.diff(host.astype(np.int64)) if cumulative else host
    return max(int(lengths.max()), 0)


def to_device(host: "torch.Tensor", device: Any) -> "torch.Tensor":
    """``host`` on ``device``. Towards a GPU it goes through pinned memory, so that nothing waits for work queued before it."""
    import torch

    device = torch.device(device)
    if device.type != "cuda" or host.is_cuda or torch.compiler.is_compiling():
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class Batch:
    """A packed, variable-length batch. Make it once per step and pass it to every layer.

    Packed keys: give ``cu_seqlens_k``; k and v are [S, Hkv, D], k_idx [S, Di].
    Paged keys: give ``seqlens_k`` and ``page_table``; k and v are [num_pages, Hkv, Bk, D], k_idx [num_pages, Bk, Di]. The page
    size is the block size. Table entries past a sequence's last block are never read.

    Query i of sequence s stands at position ``q_start[s] + i`` and sees the keys at its own and earlier positions. ``q_start``
    defaults to ``seqlen_k - seqlen_q``: prefill, chunked prefill and decode are one rule.

    All index tensors are int32 tensors or arrays (lists are taken too). ``max_seqlen_q`` and ``max_seqlen_k`` are upper bounds on
    the lengths; when left out they are computed here, which for tensors on a GPU waits for the device.
    """

    def __init__(
        self,
        *,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any = None,
        seqlens_k: Any = None,
        page_table: Any = None,
        q_start: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> None:
        if cu_seqlens_q is None:
            raise InvalidArgumentError("batch.cu_seqlens_q is missing; it is int32 [B+1], from 0 to T.", "batch.cu_seqlens_q")
        if (cu_seqlens_k is None) == (seqlens_k is None) or (seqlens_k is None) != (page_table is None):
            raise InvalidArgumentError(
                "batch needs either cu_seqlens_k (packed keys), or seqlens_k together with page_table (paged keys).", "batch"
            )
        self.cu_seqlens_q = cu_seqlens_q
        self.cu_seqlens_k = cu_seqlens_k
        self.seqlens_k = seqlens_k
        self.page_table = page_table
        self.q_start = q_start
        for name in _FIELDS:
            if isinstance(getattr(self, name), (list, tuple)):
                setattr(self, name, self._from_list(name))
        if max_seqlen_q is None:
            max_seqlen_q = _host_max(self.cu_seqlens_q, cumulative=True)
        if max_seqlen_k is None:
            packed = self.cu_seqlens_k is not None
            max_seqlen_k = _host_max(self.cu_seqlens_k if packed else self.seqlens_k, cumulative=packed)
        self.max_seqlen_q = max_seqlen_q
        self.max_seqlen_k = max_seqlen_k

    def _from_list(self, name: str) -> Any:
        """A list becomes a tensor if any other field is one, else an array unless PyTorch is in use in this process."""
        values = getattr(self, name)
        given = [getattr(self, field) for field in _FIELDS if not isinstance(getattr(self, field), (list, tuple, type(None)))]
        tensors = [field for field in given if _is_torch(field)]
        try:
            if tensors or (not given and "torch" in sys.modules):
                import torch

                return torch.tensor(values, dtype=torch.int32, device=tensors[0].device if tensors else None)
            return np.array(values, dtype=np.int32)
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"batch.{name} is not a list of 32-bit integers: {error}.", f"batch.{name}") from None

    @classmethod
    def packed(
        cls,
        seqlens_q: Sequence[int],
        seqlens_k: Sequence[int] | None = None,
        q_start: Sequence[int] | None = None,
        *,
        device: Any = None,
    ) -> "Batch":
        """Packed keys from lists of lengths; as many keys as queries if ``seqlens_k`` is left out.

        >>> Batch.packed([3, 1], [3, 130]).max_seqlen_k
        130
        """
        seqlens_q = list(seqlens_q)
        seqlens_k = seqlens_q if seqlens_k is None else list(seqlens_k)
        if len(seqlens_q) != len(seqlens_k):
            raise InvalidArgumentError(
                f"batch.seqlens_k has {len(seqlens_k)} lengths for {len(seqlens_q)} sequences; give one per sequence.",
                "batch.seqlens_k",
            )
        batch = cls(
            cu_seqlens_q=_cumulative(seqlens_q),
            cu_seqlens_k=_cumulative(seqlens_k),
            q_start=None if q_start is None else list(q_start),
            max_seqlen_q=max([0, *seqlens_q]),
            max_seqlen_k=max([0, *seqlens_k]),
        )
        return batch if device is None else batch.to(device)

    @classmethod
    def single(cls, seqlen_q: int, seqlen_k: int | None = None, *, device: Any = None) -> "Batch":
        """One sequence: ``seqlen_q`` queries at the end of ``seqlen_k`` keys."""
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        return cls.packed([seqlen_q], [seqlen_k]) if device is None else cls._uniform(1, seqlen_q, seqlen_k, device)

    @classmethod
    def _uniform(cls, num_seqs: int, seqlen_q: int, seqlen_k: int, device: Any) -> "Batch":
        """Packed sequences of equal lengths, counted out on the device: nothing is copied, so a CUDA graph may hold it."""
        import torch

        steps = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        return cls(
            cu_seqlens_q=steps * seqlen_q, cu_seqlens_k=steps * seqlen_k,
            max_seqlen_q=seqlen_q if num_seqs else 0, max_seqlen_k=seqlen_k if num_seqs else 0,
        )  # fmt: skip

    @property
    def is_paged(self) -> bool:
        return self.page_table is not None

    @property
    def num_seqs(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    def to(self, device: Any) -> "Batch":
        """The same batch as PyTorch tensors on ``device``."""
        import torch

        fields = {}
        for name in _FIELDS:
            value = getattr(self, name)
            fields[name] = None if value is None else to_device(torch.as_tensor(value), device)
        return Batch(**fields, max_seqlen_q=self.max_seqlen_q, max_seqlen_k=self.max_seqlen_k)

    def positions(self, total_q: int | None = None) -> "torch.Tensor":
        """int64 [T]: the position of each query token, what rotary embeddings take. PyTorch only.

        ``total_q`` is T; given, a batch on a GPU is not waited for.
        """
        import torch

        cu_q = torch.as_tensor(self.cu_seqlens_q).long()
        seqlens_q = cu_q[1:] - cu_q[:-1]
        if total_q is None:
            total_q = int(cu_q[-1])
        if self.q_start is not None:
            start = torch.as_tensor(self.q_start).long()
        elif self.seqlens_k is not None:
            start = torch.as_tensor(self.seqlens_k).long() - seqlens_q
        else:
            cu_k = torch.as_tensor(self.cu_seqlens_k).long()
            start = cu_k[1:] - cu_k[:-1] - seqlens_q
        offset = torch.repeat_interleave(start - cu_q[:-1], seqlens_q, output_size=total_q)
        return offset + torch.arange(total_q, device=offset.device)

    def __repr__(self) -> str:
        kind = "paged" if self.is_paged else "packed"
        return f"Batch({kind}, num_seqs={self.num_seqs}, max_seqlen_q={self.max_seqlen_q}, max_seqlen_k={self.max_seqlen_k})"


def _cumulative(lengths: Sequence[int]) -> list[int]:
    total, result = 0, [0]
    for length in lengths:
        total += length
        result.append(total)
    return result
