"""MsaConfig: the sizes and constants of one MSA layer."""

from __future__ import annotations

import dataclasses
import math
import operator

from . import _core
from .errors import InvalidArgumentError

_INT_FIELDS = ("num_q_heads", "num_kv_heads", "head_dim", "index_dim", "block_size", "top_k", "num_init_blocks", "num_local_blocks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MsaConfig:
    """Sizes and constants of one MSA layer; checked when made, and immutable.

    >>> MsaConfig(num_q_heads=64, num_kv_heads=4, head_dim=128, index_dim=128).group_size
    16
    """

    num_q_heads: int
    """Hq."""
    num_kv_heads: int
    """Hkv, divides Hq; the G = Hq / Hkv query heads of one KV head are a GQA group and share their selection."""
    head_dim: int
    """D."""
    index_dim: int = 0
    """Di; may stay 0 where no index branch is involved (dense_attention, sparse_attention)."""
    block_size: int = 128
    """Bk: tokens per block, and the page size of paged keys."""
    top_k: int = 16
    """k: blocks kept per query token and group."""
    num_init_blocks: int = 0
    """The first blocks of a sequence, always kept."""
    num_local_blocks: int = 1
    """The last blocks up to the query's own, always kept."""
    softmax_scale: float | None = None
    """Default 1/sqrt(head_dim)."""
    index_scale: float | None = None
    """Default 1/sqrt(index_dim); used by the index KL loss, never by the ranking."""

    def __post_init__(self) -> None:
        for name in _INT_FIELDS:
            value = getattr(self, name)
            try:
                value = operator.index(value)
            except TypeError:
                raise InvalidArgumentError(f"config.{name} is {value!r}; it must be an integer.", f"config.{name}") from None
            if not -(2**31) <= value < 2**31:
                raise InvalidArgumentError(f"config.{name} is {value}; it must fit 32 bits.", f"config.{name}")
            object.__setattr__(self, name, value)
        for name in ("softmax_scale", "index_scale"):
            value = getattr(self, name)
            if value is not None:
                try:
                    object.__setattr__(self, name, float(value))
                except (TypeError, ValueError):
                    raise InvalidArgumentError(f"config.{name} is {value!r}; it must be a number.", f"config.{name}") from None
        sizes = tuple(getattr(self, name) for name in _INT_FIELDS)
        _core.validate_config(sizes, self.softmax_scale, self.index_scale)
        # The form in which a config crosses into the extension, made once: operators read it on every call.
        object.__setattr__(self, "_sizes", sizes)

    @property
    def group_size(self) -> int:
        """G: query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def effective_softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale

    @property
    def effective_index_scale(self) -> float:
        return 1.0 / math.sqrt(self.index_dim) if self.index_scale is None else self.index_scale

    def num_blocks(self, seqlen_k: int) -> int:
        """Blocks that ``seqlen_k`` keys fill, the last one perhaps in part."""
        return -(-seqlen_k // self.block_size)
