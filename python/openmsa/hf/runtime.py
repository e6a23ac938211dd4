"""Running one MSA layer, and what is known about it afterwards: counts that always run, and selections on request."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator

import torch

import openmsa
from openmsa import quality
from openmsa.info import why_unsupported
from openmsa.ops import max_decode_queries

from .cache import MsaCacheLayer
from .plan import StepPlan


@dataclasses.dataclass
class LayerStats:
    """What one layer has done since the counts were last reset. Query tokens of padding are not counted."""

    calls: int = 0
    sparse_queries: int = 0  # query tokens that went through index_select and sparse attention
    dense_queries: int = 0  # query tokens that went through dense attention
    dropped_queries: int = 0  # sparse queries that saw more blocks than top_k, so that some were left unread


class Runtime:
    """Shared by the MSA layers of one model; never saved."""

    def __init__(self, backend: str = "auto"):
        self.backend = backend
        self.stats: dict[int, LayerStats] = {}
        self.sparse_layers: set[int] = set()
        self.recorder: Recorder | None = None

    def register(self, layer_idx: int, sparse: bool) -> None:
        self.stats[layer_idx] = LayerStats()
        if sparse:
            self.sparse_layers.add(layer_idx)


def runtime_of(model) -> Runtime:
    for module in model.modules():
        runtime = getattr(module, "openmsa_runtime", None)
        if runtime is not None:
            return runtime
    raise openmsa.UnsupportedError(
        f"{type(model).__name__} has no MSA layers: use openmsa.hf.convert(model) or openmsa.hf.use_openmsa(model) first"
    )


def msa_stats(model, reset: bool = False) -> dict[int, LayerStats]:
    """Counts per layer index since the model was made, or since the last reset."""
    runtime = runtime_of(model)
    stats = {layer: dataclasses.replace(s) for layer, s in sorted(runtime.stats.items())}
    if reset:
        for layer in runtime.stats:
            runtime.stats[layer] = LayerStats()
    return stats


def assert_sparse(model, dropped: bool = False) -> None:
    """Raise unless every layer meant to be sparse has run sparse, and (dropped=True) has left blocks unread."""
    runtime = runtime_of(model)
    if not runtime.sparse_layers:
        raise AssertionError("no layer of this model is sparse")
    for layer in sorted(runtime.sparse_layers):
        stats = runtime.stats[layer]
        if stats.sparse_queries == 0:
            raise AssertionError(f"layer {layer} is meant to be sparse, but no query went through it ({stats.calls} calls)")
        if dropped and stats.dropped_queries == 0:
            raise AssertionError(
                f"layer {layer}: none of its {stats.sparse_queries} queries saw more blocks than top_k, so it did what dense "
                "attention does. Use a longer text, smaller blocks or a smaller top_k"
            )


@functools.lru_cache(maxsize=1024)
def _why_not_on_gpu(config: openmsa.MsaConfig, num_slots: int, dtype: torch.dtype) -> str:
    scored = dataclasses.replace(
        config, index_dim=config.index_dim // num_slots, index_scale=None
    )  # what one index_select call sees
    return why_unsupported("cuda", str(dtype).removeprefix("torch."), scored)


def why_not_on_gpu(model, dtype: torch.dtype | None = None) -> str:
    """Why the GPU kernels cannot run this model's layers in `dtype` (default: that of its weights); empty if they can."""
    runtime_of(model)
    for module in model.modules():
        config = getattr(module, "msa_config", None)
        if config is None:
            continue
        num_slots = getattr(getattr(module, "index", None), "num_slots", 1)
        reason = _why_not_on_gpu(config, num_slots, dtype or module.q_proj.weight.dtype)
        if reason:
            return f"layer {module.layer_idx}: {reason}"
    return ""


def _ready(runtime: Runtime, layer_idx: int, config: openmsa.MsaConfig, num_slots: int, *tensors: torch.Tensor) -> tuple:
    """The layer's tensors in a dtype that the device's kernels take. Weights are never converted behind the user's back."""
    q = tensors[0]
    if not q.is_cuda:
        return tensors
    if torch.is_autocast_enabled("cuda"):
        # Rotary embeddings are computed in float32 and promote what the projections gave.
        tensors = tuple(x.to(torch.get_autocast_dtype("cuda")) for x in tensors)
        q = tensors[0]
    reason = _why_not_on_gpu(config, num_slots, q.dtype) if runtime.backend in ("auto", "cuda") else ""
    if reason:
        mend = (
            "Load it with dtype=torch.bfloat16, call model.to(torch.bfloat16), or use torch.autocast('cuda', torch.bfloat16)"
            if reason.startswith("dtype")
            else "Choose sizes that `openmsa info` lists, or run the model on the CPU: model.to('cpu')"
        )
        raise openmsa.UnsupportedError(f"layer {layer_idx} is on {q.device}, whose kernels cannot run it: {reason}. {mend}.")
    return tensors


def run_sparse(
    runtime: Runtime,
    layer_idx: int,
    config: openmsa.MsaConfig,
    plan: StepPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    cache_layer=None,
    num_slots: int = 1,
) -> torch.Tensor:
    """All inputs token-major and padded: q [B, T, Hq, D], k, v [B, T, Hkv, D], q_idx [B, T, Hkv, Di / num_slots], k_idx [B, T, Di]."""
    q, k, v, q_idx, k_idx = _ready(runtime, layer_idx, config, num_slots, q, k, v, q_idx, k_idx)
    keys = _store(plan, config, cache_layer, k, v, k_idx)
    q, q_idx = plan.pack_queries(q), plan.pack_queries(q_idx)
    if num_slots == 1:
        out, block_ids = openmsa.msa_attention(
            q, keys.k, keys.v, q_idx, keys.k_idx, keys.batch, config, return_block_ids=True, backend=runtime.backend
        )
    else:
        block_ids = _select_by_slot(q_idx, keys.k_idx, keys.batch, config, num_slots, runtime.backend)
        attend = openmsa.sparse_decode if keys.batch.max_seqlen_q <= max_decode_queries(q) else openmsa.sparse_attention
        out = attend(q, keys.k, keys.v, block_ids, keys.batch, config, backend=runtime.backend)
    stats = runtime.stats[layer_idx]
    stats.calls += 1
    stats.sparse_queries += q.shape[0]
    stats.dropped_queries += plan.rows_past(config.top_k * config.block_size)
    if runtime.recorder is not None and runtime.recorder.wants(layer_idx):
        runtime.recorder.add(layer_idx, config, plan, q, keys, block_ids)
    return plan.unpack_queries(out)


def _select_by_slot(q_idx, k_idx, batch, config: openmsa.MsaConfig, num_slots: int, backend: str) -> torch.Tensor:
    """block_ids [T, Hkv, k]: group g is scored against its own slice of the index keys, a view."""
    dim = config.index_dim // num_slots
    one_group = dataclasses.replace(
        config, num_q_heads=config.group_size, num_kv_heads=1, index_dim=dim, softmax_scale=None, index_scale=None
    )
    return torch.cat(
        [
            openmsa.index_select(q_idx[:, g : g + 1], k_idx[..., g * dim : (g + 1) * dim], batch, one_group, backend=backend)
            for g in range(num_slots)
        ],
        dim=1,
    )


def run_dense(
    runtime: Runtime, layer_idx: int, config: openmsa.MsaConfig, plan: StepPlan, q, k, v, cache_layer=None
) -> torch.Tensor:
    """Dense causal attention through the same batch description and the same kind of cache."""
    q, k, v = _ready(runtime, layer_idx, config, 1, q, k, v)
    keys = _store(plan, config, cache_layer, k, v, None)
    q = plan.pack_queries(q)
    out = openmsa.dense_attention(q, keys.k, keys.v, keys.batch, config, backend=runtime.backend)
    stats = runtime.stats[layer_idx]
    stats.calls += 1
    stats.dense_queries += q.shape[0]
    return plan.unpack_queries(out)


@dataclasses.dataclass
class _Keys:
    k: torch.Tensor
    v: torch.Tensor
    k_idx: torch.Tensor | None
    batch: openmsa.Batch
    pages_per_row: int = 0  # 0: packed

    def row_keys(self, plan: StepPlan, row: int) -> torch.Tensor:
        """[live keys, Hkv, D] of one row."""
        live = plan.seqlens_k[row]
        if self.pages_per_row:
            pages = self.k[row * self.pages_per_row : (row + 1) * self.pages_per_row]
            return pages.transpose(1, 2).flatten(0, 1)[:live]
        start = sum(plan.seqlens_k[:row])
        return self.k[start : start + live]


def _store(plan: StepPlan, config, cache_layer, k, v, k_idx) -> _Keys:
    """Put the new tokens into the cache, if there is one, and say where all keys of the batch lie."""
    if cache_layer is None:
        if plan.past:
            raise openmsa.InvalidArgumentError(f"past_key_values: missing, but the step continues after {plan.past} tokens")
        k, v = plan.pack_queries(k), plan.pack_queries(v)
        return _Keys(k, v, None if k_idx is None else plan.pack_queries(k_idx), plan.packed_batch)
    if isinstance(cache_layer, MsaCacheLayer):
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise openmsa.UnsupportedError(
                "past_key_values: keys that require a gradient cannot go into a cache of pages. Pass use_cache=False to train, or run "
                "under torch.no_grad() or torch.inference_mode()"
            )
        packed_index = None if k_idx is None else plan.pack_queries(k_idx)
        cache_layer.append(plan, plan.pack_queries(k), plan.pack_queries(v), packed_index, config.block_size)
        k, v, k_idx = cache_layer.pages()
        return _Keys(k, v, k_idx, plan.paged_batch(cache_layer.pages_per_row), cache_layer.pages_per_row)
    # transformers' own layers keep [B, Hkv, S, D] with padding in place; they are packed anew in each step.
    if k_idx is not None:
        if not hasattr(cache_layer, "update_index"):
            raise openmsa.UnsupportedError(
                f"past_key_values: {type(cache_layer).__name__} keeps no index keys, so a sparse layer cannot continue from it. "
                "Use DynamicCache(config=model.config) or openmsa.hf.MsaCache(model.config)"
            )
        k_idx = plan.pack_keys(cache_layer.update_index(k_idx[:, None]))[:, 0]
    k, v = cache_layer.update(k.transpose(1, 2), v.transpose(1, 2))
    if k.shape[2] != plan.past + plan.q_len or (
        k_idx is not None and plan.key_rows is None and k_idx.shape[0] != k.shape[0] * k.shape[2]
    ):
        raise openmsa.InvalidArgumentError("past_key_values: keys and index keys in the cache do not cover the same tokens")
    return _Keys(plan.pack_keys(k), plan.pack_keys(v), k_idx, plan.packed_batch)


def cache_layer_of(past_key_values, layer_idx: int):
    """The layer's own part of the cache; None without a cache. A cache that would lose index keys is refused here."""
    if past_key_values is None:
        return None
    if getattr(past_key_values, "offloading", False):
        raise openmsa.UnsupportedError("past_key_values: offloaded caches are not supported by MSA layers; pass offloading=False")
    if layer_idx >= len(past_key_values.layers):
        raise openmsa.UnsupportedError(
            f"past_key_values: {type(past_key_values).__name__} was made without the model's config, so it has no place for index "
            "keys. Use DynamicCache(config=model.config)"
        )
    return past_key_values.layers[layer_idx]


@dataclasses.dataclass
class Selection:
    """What one layer selected in one forward step, for one row of the batch."""

    row: int
    num_keys: int
    positions: torch.Tensor  # [n] positions of the recorded queries in their sequence
    block_ids: torch.Tensor  # [n, Hkv, k] int32
    quality: quality.SelectionQuality | None  # block and score recall of the queries that dropped blocks; None if not asked for


class Recorder:
    def __init__(self, layers: Iterable[int] | None, max_queries: int | None, with_quality: bool):
        self.layers = None if layers is None else set(layers)
        self.max_queries = max_queries
        self.with_quality = with_quality
        self.selections: dict[int, list[Selection]] = {}

    def wants(self, layer_idx: int) -> bool:
        return self.layers is None or layer_idx in self.layers

    def quality(self, layer_idx: int | None = None) -> quality.SelectionQuality:
        """Means over the recorded queries of one layer, or of all."""
        chosen = [layer_idx] if layer_idx is not None else sorted(self.selections)
        return quality.merge([s.quality for layer in chosen for s in self.selections.get(layer, []) if s.quality is not None])

    def add(self, layer_idx, config, plan: StepPlan, q, keys: _Keys, block_ids) -> None:
        start = 0
        for row, (n_q, n_k) in enumerate(zip(plan.seqlens_q, plan.seqlens_k, strict=True)):
            if n_q:
                chosen = torch.arange(n_q, device=q.device)
                if self.max_queries is not None and n_q > self.max_queries:
                    chosen = torch.linspace(0, n_q - 1, self.max_queries, device=q.device).round().long()
                positions = chosen + (n_k - n_q)
                ids = block_ids[start + chosen]
                found = None
                if self.with_quality:
                    found = quality.selection_quality(q[start + chosen], keys.row_keys(plan, row), ids, positions, config)
                self.selections.setdefault(layer_idx, []).append(Selection(row, n_k, positions.cpu(), ids.cpu(), found))
            start += n_q


@contextlib.contextmanager
def record_selection(
    model, layers: Iterable[int] | None = None, max_queries: int | None = 256, with_quality: bool = True
) -> Iterator[Recorder]:
    """Within the block, keep what the sparse layers select: at most `max_queries` evenly spaced queries per step (None: all).

    Quality costs dense scores for the recorded queries, so time nothing inside this block.
    """
    runtime = runtime_of(model)
    if runtime.recorder is not None:
        raise openmsa.InvalidArgumentError("record_selection is already active on this model")
    runtime.recorder = Recorder(layers, max_queries, with_quality)
    try:
        yield runtime.recorder
    finally:
        runtime.recorder = None
