"""MsaAttention: the attention layer of a MiniMax-M3 class model. Needs PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import nn

from . import ops
from .batch import Batch
from .cache import CacheStep
from .config import MsaConfig
from .errors import InvalidArgumentError

Phase = Literal["dense", "warmup", "sparse"]
PHASES: tuple[str, ...] = get_args(Phase)


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
    groups), norms and the same rotary embedding. It sees the hidden state detached and learns by a loss of its own, the index KL
    loss, which ``forward(..., return_index_kl=True)`` returns next to the output: that loss reaches ``index_parameters()`` and
    nothing else, and no other loss reaches those.

    :attr:`phase` says what the layer computes, and may be set at any time:

    ==========  ==========================  ===============================================
    phase       output                      index KL loss
    ==========  ==========================  ===============================================
    "dense"     attention over all keys     zero; the index branch is not computed
    "warmup"    attention over all keys     over all visible keys
    "sparse"    MiniMax Sparse Attention    over the visible keys of the selected blocks
    ==========  ==========================  ===============================================

    A model is trained, or a dense one converted, in the order warmup, sparse.

    :param hidden_size: width of the hidden state
    :param config: sizes of the operator; ``index_dim`` must be set
    :param rotary_dim: leading dims of each head that are rotated; default half of head_dim
    :param layer_index: which layer of a :class:`openmsa.PagedKvCache` this is
    :param phase: the phase to begin with
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
        phase: Phase = "sparse",
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
        self.phase = phase
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

    @property
    def phase(self) -> Phase:
        """What the layer computes: "dense", "warmup" or "sparse"."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if phase not in PHASES:
            raise InvalidArgumentError(f"phase is {phase!r}; it must be one of {', '.join(map(repr, PHASES))}.", "phase")
        self._phase = phase

    def index_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the index branch, which the index KL loss trains and no other loss reaches."""
        for module in (self.q_idx_proj, self.k_idx_proj, self.q_idx_norm, self.k_idx_norm):
            yield from module.parameters()

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """hidden [T, hidden_size], positions [T] -> (q, k, v, q_idx, k_idx) as openmsa.msa_attention takes them."""
        angles = rotary_angles(positions, self.rotary_dim, self.rope_theta)
        return *self._project_main(hidden, angles), *self._project_index(hidden, angles)

    def _project_main(self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        config = self.config
        q = self.q_norm(self.q_proj(hidden).unflatten(-1, (config.num_q_heads, config.head_dim)))
        k = self.k_norm(self.k_proj(hidden).unflatten(-1, (config.num_kv_heads, config.head_dim)))
        v = self.v_proj(hidden).unflatten(-1, (config.num_kv_heads, config.head_dim))
        return apply_rotary(q, *angles), apply_rotary(k, *angles), v

    def _project_index(self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        config = self.config
        hidden = hidden.detach()
        q_idx = self.q_idx_norm(self.q_idx_proj(hidden).unflatten(-1, (config.num_kv_heads, config.index_dim)))
        k_idx = self.k_idx_norm(self.k_idx_proj(hidden).unflatten(-1, (1, config.index_dim)))
        return apply_rotary(q_idx, *angles), apply_rotary(k_idx, *angles).squeeze(1)

    def forward(
        self,
        hidden: torch.Tensor,
        batch: Batch | None = None,
        *,
        step: CacheStep | None = None,
        positions: torch.Tensor | None = None,
        return_index_kl: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention output, shaped like ``hidden``; with ``return_index_kl`` also this layer's index KL loss, a scalar.

        Add the losses of all layers, weighted, to the model's own. The loss is a return value and no attribute, so it comes through
        ``torch.utils.checkpoint`` and ``torch.compile``.

        :param hidden: [T, hidden_size] packed, or [N, T, hidden_size] for N sequences of one length
        :param batch: the packed batch; default: each row of ``hidden`` is a whole sequence
        :param step: a step of a cache (:meth:`openmsa.PagedKvCache.extend`): the new keys are written to this layer's pages, and
            attention runs over everything the step's sequences hold. Instead of ``batch``; not for training.
        :param positions: int64 [T], for rotary embeddings only; default what batch or step say
        """
        if batch is not None and step is not None:
            raise InvalidArgumentError("batch and step are both given; a step brings its own batch.", "batch")
        if return_index_kl and step is not None:
            raise InvalidArgumentError(
                "return_index_kl is set, but a step reads paged keys and the loss is for packed ones. Pass a batch instead of a step.",
                "return_index_kl",
            )
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
        angles = rotary_angles(positions.reshape(-1), self.rotary_dim, self.rope_theta)
        q, k, v = self._project_main(hidden, angles)
        q_idx = k_idx = None
        # A cache holds the index keys of every token, whatever phase wrote it.
        if self.phase == "sparse" or step is not None or (return_index_kl and self.phase == "warmup"):
            q_idx, k_idx = self._project_index(hidden, angles)
        if step is not None:
            step.write(k, v, k_idx, self.layer_index)
            k, v, k_idx = step.keys(self.layer_index)
        out, index_kl = self._attend(q, k, v, q_idx, k_idx, batch, return_index_kl)
        out = self.o_proj(out.flatten(1)).view(shape)
        return (out, index_kl) if return_index_kl else out

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_idx: torch.Tensor | None, k_idx: torch.Tensor | None,
        batch: Batch, with_loss: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Output and, where asked for, index KL loss of the current phase."""
        options = {"backend": self.backend}
        block_ids = None
        if self.phase == "sparse":
            if not with_loss:
                return ops.msa_attention(q, k, v, q_idx, k_idx, batch, self.config, **options), None
            out, lse, block_ids = ops.msa_attention(
                q, k, v, q_idx, k_idx, batch, self.config, return_lse=True, return_block_ids=True, **options
            )
        else:
            out, lse = ops.dense_attention(q, k, v, batch, self.config, return_lse=True, **options)
            if self.phase == "dense" or not with_loss:
                return out, lse.new_zeros(()) if with_loss else None
        return out, ops.index_kl_loss(q, k, lse, q_idx, k_idx, batch, self.config, block_ids=block_ids, **options)

    def extra_repr(self) -> str:
        return f"{self.config}, rotary_dim={self.rotary_dim}, layer_index={self.layer_index}, phase={self.phase!r}"
