"""The plan of one forward step: which tokens are real, and where they go.

transformers asks a mask function once per forward pass and hands its result to every layer as `attention_mask`. Ours returns a
StepPlan, so that lengths, gather indices and the batch description are worked out once per step and not once per layer.

Each row of a padded batch is its own sequence: its positions and block borders count from its first real token, wherever the
padding lies. Rows of the packed tensors run over the real tokens only.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

import openmsa
from openmsa.batch import to_device

# The name under which transformers knows us: model.config._attn_implementation == ATTN_NAME.
ATTN_NAME = "openmsa"


class StepPlan:
    """What one forward step is made of. `valid` is a bool mask [B, past + q_len], or None when every token is real."""

    def __init__(self, batch_size: int, q_len: int, past: int, valid: torch.Tensor | None, device: torch.device):
        self.batch_size = batch_size
        self.q_len = q_len
        self.past = past  # cache slots before this step, padding included
        self.valid = None if valid is None or bool(valid.all()) else valid
        self.device = device
        self._slots: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._paged: dict[int, openmsa.Batch] = {}
        self._agreed: tuple[torch.Tensor | None, bool] | None = None

    def agrees_with(self, stored: torch.Tensor | None) -> bool:
        """Whether the mask marks the cached tokens as `stored` (None: no padding). All layers hold one tensor, so one comparison, for
        which a GPU is waited for, serves them all."""
        if stored is None and self.valid is None:
            return True
        if self._agreed is None or self._agreed[0] is not stored:
            before = stored.new_ones(stored.shape) if self.valid is None else self.valid[:, : self.past]
            self._agreed = (stored, bool(before.all()) if stored is None else torch.equal(before, stored))
        return self._agreed[1]

    @cached_property
    def seqlens_q(self) -> list[int]:
        if self.valid is None:
            return [self.q_len] * self.batch_size
        return self.valid[:, self.past :].sum(1).tolist()

    @cached_property
    def seqlens_k(self) -> list[int]:
        if self.valid is None:
            return [self.past + self.q_len] * self.batch_size
        return self.valid.sum(1).tolist()

    @cached_property
    def query_rows(self) -> torch.Tensor | None:
        """Flat indices into [B * q_len] of the real query tokens; None: all of them."""
        return None if self.valid is None else self.valid[:, self.past :].flatten().nonzero()[:, 0]

    @cached_property
    def key_rows(self) -> torch.Tensor | None:
        """Flat indices into [B * (past + q_len)] of the real key tokens; None: all of them."""
        return None if self.valid is None else self.valid.flatten().nonzero()[:, 0]

    @cached_property
    def packed_batch(self) -> openmsa.Batch:
        return openmsa.Batch.packed(self.seqlens_q, self.seqlens_k, device=self.device)

    def paged_batch(self, pages_per_row: int) -> openmsa.Batch:
        """The batch over pages laid out row by row: page number of block b of row r is r * pages_per_row + b."""
        if pages_per_row not in self._paged:
            cu_seqlens_q = torch.tensor([0, *accumulate(self.seqlens_q)], dtype=torch.int32)
            pages = torch.arange(self.batch_size * pages_per_row, dtype=torch.int32, device=self.device)
            self._paged[pages_per_row] = openmsa.Batch(
                cu_seqlens_q=to_device(cu_seqlens_q, self.device),
                seqlens_k=to_device(torch.tensor(self.seqlens_k, dtype=torch.int32), self.device),
                page_table=pages.view(self.batch_size, pages_per_row),
                max_seqlen_q=max(self.seqlens_q),
                max_seqlen_k=max(self.seqlens_k),
            )
        return self._paged[pages_per_row]

    def slots(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(row, page, offset) of every real new token, in packed order: where the cache writes it."""
        if block_size not in self._slots:
            seqlens_q, seqlens_k = to_device(torch.tensor([self.seqlens_q, self.seqlens_k]), self.device)
            live = seqlens_k - seqlens_q
            rows = torch.arange(self.batch_size, device=self.device)
            row = torch.repeat_interleave(rows, seqlens_q, output_size=sum(self.seqlens_q))
            rank = torch.arange(row.numel(), device=self.device) - (seqlens_q.cumsum(0) - seqlens_q)[row]
            position = live[row] + rank
            self._slots[block_size] = (row, position // block_size, position % block_size)
        return self._slots[block_size]

    def pack_queries(self, x: torch.Tensor) -> torch.Tensor:
        """[B, q_len, ...] -> [T, ...], T = number of real tokens."""
        flat = x.flatten(0, 1)
        return flat if self.query_rows is None else flat[self.query_rows]

    def unpack_queries(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [B, q_len, ...]; padding rows are zero."""
        if self.query_rows is not None:
            flat = x.new_zeros(self.batch_size * self.q_len, *x.shape[1:])
            x = flat.index_copy(0, self.query_rows, x)
        return x.unflatten(0, (self.batch_size, self.q_len))

    def pack_keys(self, x: torch.Tensor) -> torch.Tensor:
        """Head-major cache tensor [B, H, past + q_len, D] -> [S, H, D]; a view if the batch is one unpadded row."""
        if self.batch_size == 1:
            flat = x[0].transpose(0, 1)
        else:
            flat = x.transpose(1, 2).flatten(0, 1)
        return flat if self.key_rows is None else flat[self.key_rows]

    def rows_past(self, position: int) -> int:
        """How many of this step's queries stand at or after `position` of their sequence."""
        return sum(max(0, n_k - max(n_k - n_q, position)) for n_q, n_k in zip(self.seqlens_q, self.seqlens_k, strict=True))


def _plan_for_step(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | None = None,
    **kwargs,
) -> StepPlan:
    if mask_function is not causal_mask_function:
        raise openmsa.UnsupportedError(
            "attention mask: MSA layers take plain causal attention over padded rows; an overlay was asked for (several sequences "
            "packed in one row through position_ids, a sliding window, or a custom mask function). Put each sequence in its own row"
        )
    q_offset = int(q_offset)
    if kv_offset != 0 or kv_length != q_offset + q_length:
        raise openmsa.UnsupportedError(
            f"past_key_values: {q_offset} cached tokens and {q_length} new ones, but the cache shows {kv_length} keys from offset "
            f"{kv_offset}. Static and sliding caches are not supported; use DynamicCache(config=model.config)"
        )
    if attention_mask is not None and tuple(attention_mask.shape) != (batch_size, kv_length):
        raise openmsa.InvalidArgumentError(
            f"attention_mask has shape {list(attention_mask.shape)}; it must be [batch, cached + new tokens] = [{batch_size}, {kv_length}]"
        )
    if device is None:
        device = attention_mask.device if attention_mask is not None else torch.device("cpu")
    return StepPlan(batch_size, q_length, q_offset, attention_mask, torch.device(device))


def require_plan(attention_mask, layer_name: str) -> StepPlan:
    """The plan a layer was handed, or an error that says why there is none: then the layer must not guess."""
    if isinstance(attention_mask, StepPlan):
        return attention_mask
    if attention_mask is None:
        found = "no plan was made: the model runs with another attn_implementation"
    else:
        found = f"a ready-made {type(attention_mask).__name__} mask was passed"
    raise openmsa.UnsupportedError(
        f"{layer_name}: {found}. MSA layers need attn_implementation='{ATTN_NAME}' and a 2-D attention_mask [batch, tokens] or none"
    )


def refuse_attention_weights(kwargs: dict, layer_name: str) -> None:
    if kwargs.get("output_attentions"):
        raise openmsa.UnsupportedError(
            f"output_attentions: {layer_name} never forms the attention matrix, so there is nothing to return. "
            "openmsa.hf.record_selection(model) shows which blocks were read and how much mass they hold"
        )


def _refuse_unconverted_layer(module, *args, **kwargs):
    """transformers calls this from attention layers that are not ours: the name alone must not pass for sparse attention."""
    raise openmsa.UnsupportedError(
        f"attn_implementation='{ATTN_NAME}' does not turn {type(module).__name__} into sparse attention by itself. Use "
        "openmsa.hf.convert(model) for Llama-family models or openmsa.hf.use_openmsa(model) for MiniMax-M3"
    )


AttentionMaskInterface.register(ATTN_NAME, _plan_for_step)
AttentionInterface.register(ATTN_NAME, _refuse_unconverted_layer)
