"""MsaAttention: the attention layer of a MiniMax-M3 class model. Needs PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import ops
from .batch import Batch
from .cache import CacheStep
from .config import MsaConfig
from .errors import InvalidArgumentError


class HeadRmsNorm(nn.Module):
    """RMSNorm over the last axis with gain (1 + weight): a weight of zero is a gain of exactly one. Computed in float32."""

    def __init__(self, dim: int, eps: float = 1e-6, *, device: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def rotary_angles(positions: torch.Tensor, rotary_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each float32 [T, rotary_dim / 2], of the angles position * theta^(-2i / rotary_dim)."""
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32) / rotary_dim
    angles = positions.float()[:, None] * theta**-exponent
    return angles.cos(), angles.sin()


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first dims of x [T, heads, D] (half-split pairs: i with i + rotary_dim / 2); the rest pass through."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(part.to(x.dtype) for part in rotated), rest], dim=-1)


class MsaAttention(nn.Module):
    """Projections, per-head norms, partial rotary embedding, and MiniMax Sparse Attention.

    The index branch has its own query and key projections (``q_idx_proj``, ``k_idx_proj``; one index key head shared by all
    groups), norms and the same rotary embedding. It sees the hidden state detached, so no gradient of the language-model loss
    reaches the hidden state through it. This version computes forward results only.

    :param hidden_size: width of the hidden state
    :param config: sizes of the operator; ``index_dim`` must be set
    :param rotary_dim: leading dims of each head that are rotated; default half of head_dim
    :param layer_index: which layer of a :class:`openmsa.PagedKvCache` this is
    """

    def __init__(
        self,
        hidden_size: int,
        config: MsaConfig,
        *,
        rotary_dim: int | None = None,
        rope_theta: float = 5e6,
        norm_eps: float = 1e-6,
        layer_index: int = 0,
        backend: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        rotary_dim = config.head_dim // 2 if rotary_dim is None else rotary_dim
        if config.index_dim < 1:
            raise InvalidArgumentError("config.index_dim is 0; the layer has an index branch. Set its width.", "config.index_dim")
        if rotary_dim % 2 or not 0 <= rotary_dim <= min(config.head_dim, config.index_dim):
            raise InvalidArgumentError(
                f"rotary_dim is {rotary_dim}; it must be even and at most head_dim {config.head_dim} and index_dim {config.index_dim}.",
                "rotary_dim",
            )
        self.config = config
        self.rotary_dim = rotary_dim
        self.rope_theta = rope_theta
        self.layer_index = layer_index
        self.backend = backend
        q_width, kv_width = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        like: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, q_width, **like)
        self.k_proj = nn.Linear(hidden_size, kv_width, **like)
        self.v_proj = nn.Linear(hidden_size, kv_width, **like)
        self.o_proj = nn.Linear(q_width, hidden_size, **like)
        self.q_idx_proj = nn.Linear(hidden_size, config.num_kv_heads * config.index_dim, **like)
        self.k_idx_proj = nn.Linear(hidden_size, config.index_dim, **like)
        self.q_norm = HeadRmsNorm(config.head_dim, norm_eps, device=device)
        self.k_norm = HeadRmsNorm(config.head_dim, norm_eps, device=device)
        self.q_idx_norm = HeadRmsNorm(config.index_dim, norm_eps, device=device)
        self.k_idx_norm = HeadRmsNorm(config.index_dim, norm_eps, device=device)

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """hidden [T, hidden_size], positions [T] -> (q, k, v, q_idx, k_idx) as openmsa.msa_attention takes them."""
        config = self.config
        cos, sin = rotary_angles(positions, self.rotary_dim, self.rope_theta)
        q = self.q_norm(self.q_proj(hidden).unflatten(-1, (config.num_q_heads, config.head_dim)))
        k = self.k_norm(self.k_proj(hidden).unflatten(-1, (config.num_kv_heads, config.head_dim)))
        v = self.v_proj(hidden).unflatten(-1, (config.num_kv_heads, config.head_dim))
        detached = hidden.detach()
        q_idx = self.q_idx_norm(self.q_idx_proj(detached).unflatten(-1, (config.num_kv_heads, config.index_dim)))
        k_idx = self.k_idx_norm(self.k_idx_proj(detached).unflatten(-1, (1, config.index_dim)))
        q, k, q_idx, k_idx = (apply_rotary(x, cos, sin) for x in (q, k, q_idx, k_idx))
        return q, k, v, q_idx, k_idx.squeeze(1)

    def forward(
        self,
        hidden: torch.Tensor,
        batch: Batch | None = None,
        *,
        step: CacheStep | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention output, shaped like ``hidden``.

        :param hidden: [T, hidden_size] packed, or [N, T, hidden_size] for N sequences of one length
        :param batch: the packed batch; default: each row of ``hidden`` is a whole sequence
        :param step: a step of a cache (:meth:`openmsa.PagedKvCache.extend`): the new keys are written to this layer's pages, and
            attention runs over everything the step's sequences hold. Instead of ``batch``.
        :param positions: int64 [T], for rotary embeddings only; default what batch or step say
        """
        if batch is not None and step is not None:
            raise InvalidArgumentError("batch and step are both given; a step brings its own batch.", "batch")
        shape = hidden.shape
        if hidden.ndim not in (2, 3):
            raise InvalidArgumentError(f"hidden has {hidden.ndim} axes; it must be [T, width] or [N, T, width].", "hidden")
        hidden = hidden.reshape(-1, shape[-1])
        if step is not None:
            batch = step.batch
            positions = step.positions if positions is None else positions
        elif batch is None:
            num_seqs = shape[0] if len(shape) == 3 else 1
            batch = Batch._uniform(num_seqs, shape[-2], shape[-2], hidden.device)
        if positions is None:
            positions = batch.positions(hidden.shape[0])
        q, k, v, q_idx, k_idx = self.project(hidden, positions.reshape(-1))
        if step is not None:
            step.write(k, v, k_idx, self.layer_index)
            k, v, k_idx = step.keys(self.layer_index)
        out = ops.msa_attention(q, k, v, q_idx, k_idx, batch, self.config, backend=self.backend)
        return self.o_proj(out.flatten(1)).view(shape)

    def extra_repr(self) -> str:
        return f"{self.config}, rotary_dim={self.rotary_dim}, layer_index={self.layer_index}"
