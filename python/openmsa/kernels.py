"""One function per operator: allocate the outputs, call the extension. Shared by the PyTorch operators and the NumPy path.

``empty(like, shape, dtype)`` makes an uninitialised array of the caller's kind; dtype None means that of ``like``, else a name.
``call`` is the tail every extension function takes: cu_seqlens_q, cu_seqlens_k, seqlens_k, page_table, q_start, max_seqlen_q,
max_seqlen_k, sizes, softmax_scale, backend, num_threads, trust_indices. ``sizes`` are MsaConfig's integers in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _core

Empty = Callable[..., Any]

# Positions inside `call` and inside `sizes`.
MAX_SEQLEN_K, SIZES = 6, 7
NUM_KV_HEADS, BLOCK_SIZE, TOP_K = 1, 4, 5


def num_blocks(call: tuple) -> Any:
    """Columns of a score tensor: what the longest sequence needs, so that memory follows live lengths and not a model's limit."""
    block_size = max(call[SIZES][BLOCK_SIZE], 1)
    return (call[MAX_SEQLEN_K] + block_size - 1) // block_size


def accumulator(like: Any) -> str:
    """lse and scores are float32, or float64 from float64 input (the reference backend)."""
    return "float64" if str(like.dtype).endswith("float64") else "float32"


def list_shape(like: Any, call: tuple) -> tuple:
    return (like.shape[0] if len(like.shape) else 0, call[SIZES][NUM_KV_HEADS])


def block_scores(empty: Empty, q_idx: Any, k_idx: Any, *call: Any) -> Any:
    scores = empty(q_idx, (*list_shape(q_idx, call), num_blocks(call)), accumulator(q_idx))
    _core.block_scores(q_idx, k_idx, scores, *call)
    return scores


def select_blocks(empty: Empty, scores: Any, *call: Any) -> Any:
    block_ids = empty(scores, (*list_shape(scores, call), call[SIZES][TOP_K]), "int32")
    _core.select_blocks(scores, block_ids, *call)
    return block_ids


def index_select(empty: Empty, q_idx: Any, k_idx: Any, *call: Any) -> Any:
    block_ids = empty(q_idx, (*list_shape(q_idx, call), call[SIZES][TOP_K]), "int32")
    _core.index_select(q_idx, k_idx, block_ids, *call)
    return block_ids


def sparse_attention(empty: Empty, q: Any, k: Any, v: Any, block_ids: Any, *call: Any, decode: bool = False) -> tuple[Any, Any]:
    out = empty(q, q.shape, None)
    lse = empty(q, q.shape[:2], accumulator(q))
    _core.sparse_attention(q, k, v, block_ids, out, lse, decode, *call)
    return out, lse


def msa_attention(
    empty: Empty, q: Any, k: Any, v: Any, q_idx: Any, k_idx: Any, with_block_ids: bool, *call: Any
) -> tuple[Any, Any, Any]:
    out = empty(q, q.shape, None)
    lse = empty(q, q.shape[:2], accumulator(q))
    # An operator's outputs cannot be optional, so an unwanted one is empty.
    block_ids = empty(q, (*list_shape(q, call), call[SIZES][TOP_K]) if with_block_ids else (0,), "int32")
    _core.msa_attention(q, k, v, q_idx, k_idx, out, lse, block_ids if with_block_ids else None, *call)
    return out, lse, block_ids


def dense_attention(empty: Empty, q: Any, k: Any, v: Any, with_block_max: bool, *call: Any) -> tuple[Any, Any, Any]:
    out = empty(q, q.shape, None)
    lse = empty(q, q.shape[:2], accumulator(q))
    # An operator's outputs cannot be optional, so an unwanted one is empty.
    block_max = empty(q, (*q.shape[:2], num_blocks(call)) if with_block_max else (0,), accumulator(q))
    _core.dense_attention(q, k, v, out, lse, block_max if with_block_max else None, *call)
    return out, lse, block_max


def sparse_attention_backward(
    empty: Empty, q: Any, k: Any, v: Any, block_ids: Any, out: Any, lse: Any, d_out: Any, deterministic: bool, *call: Any
) -> tuple[Any, Any, Any]:
    d_q, d_k, d_v = (empty(x, x.shape, None) for x in (q, k, v))
    _core.sparse_attention_backward(q, k, v, block_ids, out, lse, d_out, d_q, d_k, d_v, deterministic, *call)
    return d_q, d_k, d_v


def dense_attention_backward(
    empty: Empty, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, deterministic: bool, *call: Any
) -> tuple[Any, Any, Any]:
    d_q, d_k, d_v = (empty(x, x.shape, None) for x in (q, k, v))
    _core.dense_attention_backward(q, k, v, out, lse, d_out, d_q, d_k, d_v, deterministic, *call)
    return d_q, d_k, d_v


def index_kl_loss(
    empty: Empty, q: Any, k: Any, lse: Any, q_idx: Any, k_idx: Any, block_ids: Any,
    num_tokens: Any, with_gradients: bool, deterministic: bool, index_scale: float | None, *call: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    loss = empty(q, (1,), accumulator(q))
    d_q_idx, d_k_idx = (empty(x, x.shape if with_gradients else (0,), None) for x in (q_idx, k_idx))
    gradients = (d_q_idx, d_k_idx) if with_gradients else (None, None)
    _core.index_kl_loss(q, k, lse, q_idx, k_idx, block_ids, loss, *gradients, num_tokens, deterministic, index_scale, *call)
    return loss.reshape(()), d_q_idx, d_k_idx


def write_pages(
    _: Empty, k: Any, v: Any, k_idx: Any, slots: Any, k_pages: Any, v_pages: Any, k_idx_pages: Any,
    backend: str, num_threads: int, trust_indices: bool,
) -> None:  # fmt: skip
    _core.write_pages(k, v, k_idx, slots, k_pages, v_pages, k_idx_pages, backend, num_threads, trust_indices)
