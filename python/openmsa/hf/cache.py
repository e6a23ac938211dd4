"""The cache of one MSA layer: keys, values and index keys in pages of one block each, row by row.

Only real tokens are stored, so block borders stay where the sequence starts even under left padding, and a decode step reads the
pages in place. Towards transformers the layer still counts slots, padding included, because masks and position ids do.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

import openmsa

from .plan import StepPlan

SPARSE_LAYER = "openmsa_sparse"
DENSE_LAYER = "openmsa_dense"

# Spare room when pages run out: a quarter of what is held, so that appending costs amortised O(1) per token.
_GROWTH_DIVISOR = 4
_MIN_SPARE_PAGES = 4


class MsaCacheLayer(CacheLayerMixin):
    """keys, values [B, P, Hkv, Bk, D] and index_keys [B, P, Bk, Di]; index_keys stay None on a dense layer."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False  # the page size is known to the attention layer, which comes with the first append

    def __init__(self, **kwargs):
        super().__init__()
        self.index_keys: torch.Tensor | None = None
        self.block_size = 0
        self.num_slots = 0  # tokens seen, padding included
        self.valid: torch.Tensor | None = None  # bool [B, num_slots], None: no padding so far

    # --- what MSA layers call -------------------------------------------------------------------------------------------

    def append(self, plan: StepPlan, k: torch.Tensor, v: torch.Tensor, k_idx: torch.Tensor | None, block_size: int) -> None:
        """Store this step's real tokens. k, v: packed [T, Hkv, D]; k_idx: packed [T, Di] or None."""
        self._check_step(plan, k, k_idx, block_size)
        self._reserve(plan, k, v, k_idx, block_size)
        row, page, offset = plan.slots(block_size)
        self.keys[row, page, :, offset] = k
        self.values[row, page, :, offset] = v
        if k_idx is not None:
            self.index_keys[row, page, offset] = k_idx
        self.num_slots += plan.q_len
        self.valid = plan.valid

    def pages(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """k, v [B * P, Hkv, Bk, D] and k_idx [B * P, Bk, Di], as the operators take them; matches plan.paged_batch(P)."""
        index = None if self.index_keys is None else self.index_keys.flatten(0, 1)
        return self.keys.flatten(0, 1), self.values.flatten(0, 1), index

    @property
    def pages_per_row(self) -> int:
        return self.keys.shape[1]

    def _check_step(self, plan: StepPlan, k: torch.Tensor, k_idx: torch.Tensor | None, block_size: int) -> None:
        if plan.past != self.num_slots:
            raise openmsa.InvalidArgumentError(
                f"past_key_values: this layer holds {self.num_slots} tokens, but the step continues after {plan.past}. "
                "All layers of a cache must have seen the same tokens"
            )
        if not self.is_initialized:
            return
        if self.keys.shape[0] != plan.batch_size:
            raise openmsa.InvalidArgumentError(
                f"past_key_values: the cache holds {self.keys.shape[0]} rows, the step has {plan.batch_size}"
            )
        if self.block_size != block_size:
            raise openmsa.InvalidArgumentError(
                f"past_key_values: filled with block_size {self.block_size}, used by a layer with block_size {block_size}"
            )
        if (self.index_keys is None) != (k_idx is None):
            raise openmsa.InvalidArgumentError("past_key_values: filled by a layer of the other kind (sparse against dense)")
        if not plan.agrees_with(self.valid):
            raise openmsa.InvalidArgumentError(
                "attention_mask: tokens already in the cache are marked otherwise than when they were stored. Pass the same mask, "
                "extended by the new tokens"
            )

    def _reserve(self, plan: StepPlan, k, v, k_idx, block_size: int) -> None:
        needed = max(1, -(-max(plan.seqlens_k) // block_size))
        if not self.is_initialized:
            self.block_size = block_size
            self.dtype, self.device = k.dtype, k.device
            self.keys = k.new_zeros(plan.batch_size, needed, k.shape[1], block_size, k.shape[2])
            self.values = v.new_zeros(plan.batch_size, needed, v.shape[1], block_size, v.shape[2])
            if k_idx is not None:
                self.index_keys = k_idx.new_zeros(plan.batch_size, needed, block_size, k_idx.shape[1])
            self.is_initialized = True
        elif needed > self.pages_per_row:
            spare = needed + max(_MIN_SPARE_PAGES, needed // _GROWTH_DIVISOR) - self.pages_per_row
            self._map(lambda x: torch.cat([x, x.new_zeros(x.shape[0], spare, *x.shape[2:])], dim=1))

    def _map(self, change) -> None:
        """Apply one change to everything the layer stores per row, so that index keys can never be forgotten."""
        self.keys, self.values = change(self.keys), change(self.values)
        if self.index_keys is not None:
            self.index_keys = change(self.index_keys)

    # --- what transformers calls ----------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states, value_states) -> None:
        raise openmsa.UnsupportedError("past_key_values: an MSA cache layer is initialised by its attention layer's first append")

    def update(self, key_states, value_states, *args, **kwargs):
        raise openmsa.UnsupportedError(
            "past_key_values: this cache belongs to MSA layers, which store index keys too. It cannot serve a model that was not "
            "converted by openmsa.hf"
        )

    def get_seq_length(self) -> int:
        return self.num_slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_slots + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget every token, so that the next step may have another batch size."""
        self.keys = self.values = self.index_keys = self.valid = None
        self.num_slots = 0
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Negative: drop that many of the latest slots. Positive (older meaning): keep that many."""
        removed = max(0, self.num_slots - tokens_to_remove) if tokens_to_remove > 0 else min(-tokens_to_remove, self.num_slots)
        self.num_slots -= removed
        if self.valid is not None:
            self.valid = self.valid[:, : self.num_slots]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._map(lambda x: x.repeat_interleave(repeats, dim=0))
            self.valid = None if self.valid is None else self.valid.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self._map(lambda x: x[indices.to(x.device)])
            self.valid = None if self.valid is None else self.valid[indices.to(self.valid.device)]

    def offload(self) -> None:
        raise openmsa.UnsupportedError("past_key_values: offloading is not supported for MSA layers; pass offloading=False")

    prefetch = offload


class MsaSparseCacheLayer(MsaCacheLayer):
    _layer_type = SPARSE_LAYER  # DynamicCache(config=...) and generate() find the class by this name


class MsaDenseCacheLayer(MsaCacheLayer):
    _layer_type = DENSE_LAYER


class _RefusedStaticLayer(StaticLayer):
    def __init__(self, *args, **kwargs):
        raise openmsa.UnsupportedError(
            "cache_implementation='static' is not supported by MSA layers; leave it out, or use DynamicCache(config=model.config)"
        )


class _RefusedSparseStaticLayer(_RefusedStaticLayer):
    _layer_type = SPARSE_LAYER


class _RefusedDenseStaticLayer(_RefusedStaticLayer):
    _layer_type = DENSE_LAYER


class MsaCache(Cache):
    """A cache of paged MSA layers for any model prepared by openmsa.hf; MiniMax-M3 takes it instead of transformers' own."""

    def __init__(self, config):
        num_layers = config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[MsaCacheLayer() for _ in range(num_layers)])
