"""The operators as functions: PyTorch tensors in, PyTorch tensors out; NumPy arrays in, NumPy arrays out.

Letters in shapes: T query tokens and S key tokens of the packed batch, Hq query heads, Hkv KV heads, D head dim, Di index dim,
Bk block size, k = top_k. Paged keys are [num_pages, Hkv, Bk, D], paged index keys [num_pages, Bk, Di].

Every function takes these keyword arguments:

``backend``        "auto" (the fastest for the tensors' device), "reference" (fp64, slow, the oracle) or "cpu".
``num_threads``    CPU threads; default ``torch.get_num_threads()``. Results do not depend on it.
``trust_indices``  skip the check of block ids, page ids and slots; a wrong one is then undefined behaviour.

Gradients: msa_attention, sparse_attention, sparse_decode and dense_attention are differentiable in q, k and v, index_kl_loss in
q_idx and k_idx, over packed keys, on devices for which ``openmsa info`` lists the gradient's kernel. Nothing else carries a gradient:
not the selection, not lse, not block_max. Today's backward passes give the same bits in every run; for those to come, only
``torch.use_deterministic_algorithms(True)`` promises it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from . import numpy_ops
from .batch import Batch
from .config import MsaConfig
from .errors import InvalidArgumentError, UnsupportedError

# Up to this many query tokens per sequence msa_attention takes the decode path. Measured (Hq 64, Hkv 4, 131,072 keys, bf16, 2
# cores, cold caches): decode 0.36 against 0.43 ms at 1 token, even at 2, 1.2 against 1.0 at 4, 2.2 against 1.6 at 8. Up to 4 it
# is taken all the same, so that a speculative step gives bit for bit what single steps give.
MAX_DECODE_QUERIES = 4
# The same on a GPU, whose decode kernels are made for speculative steps of up to 16 tokens.
MAX_DECODE_QUERIES_CUDA = 16
# The gradients of the index KL loss are made along with it and kept, in the storage type. With 1 / num_tokens in them they would
# vanish in float16 before a loss scale could lift them, so there they are kept this much larger.
KL_FLOAT16_SCALE = 1024

Array = TypeVar("Array")  # torch.Tensor or numpy.ndarray: what comes out is of the kind that went in

_torch_ops: Any = None


def max_decode_queries(q: Any) -> int:
    """Up to how many query tokens per sequence the decode path is the better one, for queries on this device."""
    return MAX_DECODE_QUERIES_CUDA if getattr(q, "is_cuda", False) else MAX_DECODE_QUERIES


def load_torch_ops() -> Any:
    """Registers ``torch.ops.openmsa`` on first use; NumPy users never pay for importing PyTorch."""
    global _torch_ops
    if _torch_ops is None:
        from . import torch_ops

        _torch_ops = torch_ops
    return _torch_ops


def _family(names: tuple[str, ...], *tensors: Any) -> Any:
    """The module that serves these tensors, which must all be of one kind."""
    if isinstance(tensors[0], np.ndarray):
        for name, tensor in zip(names, tensors):
            if not isinstance(tensor, np.ndarray):
                raise _wrong_kind(name, tensor, f"a NumPy array, as {names[0]} is")
        return numpy_ops
    if not hasattr(tensors[0], "data_ptr"):
        raise _wrong_kind(names[0], tensors[0], "a PyTorch tensor or a NumPy array")
    family = load_torch_ops()
    torch = family.torch
    for name, tensor in zip(names, tensors):
        if not isinstance(tensor, torch.Tensor):
            raise _wrong_kind(name, tensor, f"a PyTorch tensor, as {names[0]} is")
    return family


def _wants_gradient(family: Any, batch: Batch, stage: str, **tensors: Any) -> bool:
    """Whether autograd will ask for gradients of these, which `stage` computes; refuses where it would ask in vain."""
    if family is numpy_ops or not family.torch.is_grad_enabled():
        return False
    for name, tensor in tensors.items():
        if not tensor.requires_grad:
            continue
        if batch.is_paged:
            raise UnsupportedError(
                f"{name} requires a gradient, but batch has paged keys, and gradients are for packed ones. Train on k and v of shape "
                "[S, Hkv, D] with batch.cu_seqlens_k; to read a cache, run under torch.no_grad() or torch.inference_mode().",
                name,
            )
        if tensor.is_cuda and stage not in family.CUDA_STAGES:
            raise UnsupportedError(
                f"{name} requires a gradient and lies on a GPU, but this build has no training kernels for GPUs. Train on the CPU "
                "(all tensors and the batch), or run under torch.no_grad() or torch.inference_mode().",
                name,
            )
        return True
    return False


def _wrong_kind(name: str, value: Any, expected: str) -> InvalidArgumentError:
    kind = type(value)
    return InvalidArgumentError(f"{name} is a {kind.__module__}.{kind.__qualname__}; expected {expected}.", name)


def _call(family: Any, batch: Any, config: Any, backend: str, num_threads: int | None, trust_indices: bool) -> tuple:
    """The tail of arguments that every operator takes; see openmsa.kernels."""
    if not isinstance(batch, Batch):
        raise _wrong_kind("batch", batch, "an openmsa.Batch")
    if not isinstance(config, MsaConfig):
        raise _wrong_kind("config", config, "an openmsa.MsaConfig")
    fields = (batch.cu_seqlens_q, batch.cu_seqlens_k, batch.seqlens_k, batch.page_table, batch.q_start)
    if family is not numpy_ops:
        fields = tuple(family.torch.from_numpy(field) if isinstance(field, np.ndarray) else field for field in fields)
    return (
        *fields, batch.max_seqlen_q, batch.max_seqlen_k,
        config._sizes, config.softmax_scale, backend, num_threads or 0, trust_indices,
    )  # fmt: skip


def block_scores(
    q_idx: Array, k_idx: Array, batch: Batch, config: MsaConfig,
    *, backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> Array:  # fmt: skip
    """scores [T, Hkv, num_blocks] float32: the largest dot product of a query with the visible keys of each block.

    ``scores[t,g,b] = max_j <q_idx[t,g], k_idx[j]>`` over the keys j of block b that query t sees; -inf where it sees none.

    :param q_idx: [T, Hkv, Di]
    :param k_idx: [S, Di] or paged; one index key head shared by all groups
    """
    family = _family(("q_idx", "k_idx"), q_idx, k_idx)
    call = _call(family, batch, config, backend, num_threads, trust_indices)
    for name, tensor in (("q_idx", q_idx), ("k_idx", k_idx)):
        if family is not numpy_ops and tensor.requires_grad and family.torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name} requires a gradient, but block scores carry none: the index branch learns by openmsa.index_kl_loss. Pass "
                f"{name}.detach(), or run under torch.no_grad().",
                name,
            )
    return family.block_scores(q_idx, k_idx, *call)


def select_blocks(
    scores: Array, batch: Batch, config: MsaConfig,
    *, backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> Array:  # fmt: skip
    """block_ids [T, Hkv, k] int32: the top_k blocks by (score descending, id ascending), forced blocks always in.

    Lists are strictly ascending, with -1 in the tail. NaN ranks below -inf; a block without a visible key is never selected.
    """
    family = _family(("scores",), scores)
    return family.select_blocks(scores, *_call(family, batch, config, backend, num_threads, trust_indices))


def index_select(
    q_idx: Array, k_idx: Array, batch: Batch, config: MsaConfig,
    *, backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> Array:  # fmt: skip
    """block_scores and select_blocks in one call and in bounded memory; the same block_ids."""
    family = _family(("q_idx", "k_idx"), q_idx, k_idx)
    return family.index_select(q_idx, k_idx, *_call(family, batch, config, backend, num_threads, trust_indices))


def sparse_attention(
    q: Array, k: Array, v: Array, block_ids: Array, batch: Batch, config: MsaConfig,
    *, return_lse: bool = False, backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """out [T, Hq, D]: exact softmax attention of each query over the visible keys of its group's selected blocks.

    A row that sees no key gives 0, and -inf as its lse.

    :param block_ids: [T, Hkv, k] int32, strictly ascending, -1 only in the tail
    :param return_lse: also return lse [T, Hq] float32, the natural log of the sum of exponentials of the scaled scores
    """
    family = _family(("q", "k", "v", "block_ids"), q, k, v, block_ids)
    call = _call(family, batch, config, backend, num_threads, trust_indices)
    _wants_gradient(family, batch, "sparse_attention_backward", q=q, k=k, v=v)
    out, lse = family.sparse_attention(q, k, v, block_ids, *call)
    return (out, lse) if return_lse else out


def sparse_decode(
    q: Array, k: Array, v: Array, block_ids: Array, batch: Batch, config: MsaConfig,
    *, return_lse: bool = False, backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """The result of sparse_attention, by the path made for few query tokens per sequence (decode, speculative decode).

    Where gradients are wanted it is sparse_attention itself, which has them.
    """
    family = _family(("q", "k", "v", "block_ids"), q, k, v, block_ids)
    call = _call(family, batch, config, backend, num_threads, trust_indices)
    attend = (
        family.sparse_attention
        if _wants_gradient(family, batch, "sparse_attention_backward", q=q, k=k, v=v)
        else family.sparse_decode
    )
    out, lse = attend(q, k, v, block_ids, *call)
    return (out, lse) if return_lse else out


def dense_attention(
    q: Array, k: Array, v: Array, batch: Batch, config: MsaConfig,
    *, return_lse: bool = False, return_block_max: bool = False,
    backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> Array | tuple[Array, ...]:  # fmt: skip
    """out [T, Hq, D]: causal softmax attention over every visible key. The config's top_k and index fields are not used.

    :param return_lse: also return lse [T, Hq] float32
    :param return_block_max: also return block_max [T, Hq, num_blocks] float32: the largest scaled score of each head in each block
    """
    family = _family(("q", "k", "v"), q, k, v)
    call = _call(family, batch, config, backend, num_threads, trust_indices)
    _wants_gradient(family, batch, "dense_attention_backward", q=q, k=k, v=v)
    out, lse, block_max = family.dense_attention(q, k, v, return_block_max, *call)
    extras = ((lse,) if return_lse else ()) + ((block_max,) if return_block_max else ())
    return (out, *extras) if extras else out


def msa_attention(
    q: Array, k: Array, v: Array, q_idx: Array, k_idx: Array, batch: Batch | None = None, config: MsaConfig | None = None,
    *, return_lse: bool = False, return_block_ids: bool = False,
    backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> Array | tuple[Array, ...]:  # fmt: skip
    """MiniMax Sparse Attention from projected tensors to output: score key blocks, select, attend.

    Decode (few query tokens per sequence) takes its own path by itself; the result is the same. A GPU merges a chunk of a long
    prompt while it scores the next.

    Differentiable in q, k and v: exact attention on the selected keys. Which blocks are selected has no gradient, so none reaches
    q_idx and k_idx from here; they learn by :func:`index_kl_loss`.

    :param q: [T, Hq, D]
    :param k: [S, Hkv, D] or paged; v alike
    :param q_idx: [T, Hkv, Di]
    :param k_idx: [S, Di] or paged
    :param batch: default one sequence of S keys, the T queries at its end
    :param config: default taken from the shapes, with block_size 128 and top_k 16
    :return: out [T, Hq, D]; with the options (out, lse), (out, block_ids) or (out, lse, block_ids)
    """
    family = _family(("q", "k", "v", "q_idx", "k_idx"), q, k, v, q_idx, k_idx)
    if batch is None:
        if len(k.shape) != 3 or len(q.shape) != 3:
            raise InvalidArgumentError(
                "batch is missing; it may be left out only for packed q [T, Hq, D] and k [S, Hkv, D].", "batch"
            )
        batch = Batch.single(q.shape[0], k.shape[0], device=None if family is numpy_ops else q.device)
    if config is None:
        config = _config_from_shapes(q, k, q_idx)
    call = _call(family, batch, config, backend, num_threads, trust_indices)
    wants_gradient = _wants_gradient(family, batch, "sparse_attention_backward", q=q, k=k, v=v)
    if family is not numpy_ops:
        q_idx, k_idx = q_idx.detach(), k_idx.detach()
    if not wants_gradient and (batch.max_seqlen_q <= max_decode_queries(q) or q.dtype == q_idx.dtype == k_idx.dtype):
        out, lse, block_ids = family.msa_attention(q, k, v, q_idx, k_idx, return_block_ids, *call)
    else:
        block_ids = family.index_select(q_idx, k_idx, *call)
        # The lists come from index_select, but page ids are still the caller's, so they are checked again unless trusted.
        out, lse = family.sparse_attention(q, k, v, block_ids, *call)
    extras = ((lse,) if return_lse else ()) + ((block_ids,) if return_block_ids else ())
    return (out, *extras) if extras else out


def index_kl_loss(
    q: Array, k: Array, lse: Array, q_idx: Array, k_idx: Array, batch: Batch, config: MsaConfig,
    *, block_ids: Array | None = None, num_tokens: int | None = None, return_gradients: bool = False,
    deterministic: bool | None = None, backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> Array | tuple[Array, Array, Array]:  # fmt: skip
    """What teaches the index branch: a scalar, KL(P || P_idx) averaged over query tokens and groups.

    The teacher P is the attention of the main branch, averaged over a group's heads; the student P_idx is the softmax of
    ``index_scale * <q_idx, k_idx>`` over the same keys. The teacher is a constant: the loss is differentiable in q_idx and k_idx
    alone, whatever q, k and lse require. Compute q_idx and k_idx from a detached hidden state, as :class:`openmsa.nn.MsaAttention`
    does, and it trains nothing but the index branch. Packed keys only.

    :param lse: [T, Hq], of sparse_attention or msa_attention where block_ids is given, else of dense_attention
    :param block_ids: [T, Hkv, k]: the loss is over the visible keys of these blocks; None: over all visible keys (warm-up)
    :param num_tokens: T of the average; default the tokens of this call. Pass the total where a call holds a part of it, and add up.
    :param return_gradients: return (loss, d_q_idx, d_k_idx), for those who do without autograd
    :param deterministic: gradients that are the same in every run; default what PyTorch is set to
    """
    family = _family(("q", "k", "lse", "q_idx", "k_idx"), q, k, lse, q_idx, k_idx)
    if block_ids is not None:
        _family(("q", "block_ids"), q, block_ids)
    call = _call(family, batch, config, backend, num_threads, trust_indices)
    with_gradients = return_gradients or _wants_gradient(family, batch, "index_kl_loss", q_idx=q_idx, k_idx=k_idx)
    num_tokens = num_tokens or (q.shape[0] if len(q.shape) else 0)
    divisor = num_tokens
    if family is not numpy_ops:
        q, k, lse = q.detach(), k.detach(), lse.detach()
        if q.dtype == family.torch.float16 and not return_gradients:
            divisor = max(num_tokens // KL_FLOAT16_SCALE, 1)
    loss, d_q_idx, d_k_idx = family.index_kl_loss(
        q, k, lse, q_idx, k_idx, block_ids, divisor, with_gradients, _deterministic(family, deterministic),
        config.index_scale, *call,
    )  # fmt: skip
    if return_gradients:
        return loss, d_q_idx, d_k_idx
    return loss if divisor == num_tokens else loss * (divisor / max(num_tokens, 1))


def sparse_attention_backward(
    q: Array, k: Array, v: Array, block_ids: Array, out: Array, lse: Array, d_out: Array, batch: Batch, config: MsaConfig,
    *, deterministic: bool | None = None, backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(d_q, d_k, d_v) of sparse_attention, for those who do without autograd. Packed keys only.

    :param out: what sparse_attention returned, with ``return_lse=True``; lse alike
    :param d_out: [T, Hq, D], the gradient of out
    :param deterministic: gradients that are the same in every run; default what PyTorch is set to
    """
    tensors = (q, k, v, block_ids, out, lse, d_out)
    family = _family(("q", "k", "v", "block_ids", "out", "lse", "d_out"), *tensors)
    call = _call(family, batch, config, backend, num_threads, trust_indices)
    return family.sparse_attention_backward(*_detached(family, tensors), _deterministic(family, deterministic), *call)


def dense_attention_backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, d_out: Array, batch: Batch, config: MsaConfig,
    *, deterministic: bool | None = None, backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(d_q, d_k, d_v) of dense_attention; as sparse_attention_backward."""
    tensors = (q, k, v, out, lse, d_out)
    family = _family(("q", "k", "v", "out", "lse", "d_out"), *tensors)
    call = _call(family, batch, config, backend, num_threads, trust_indices)
    return family.dense_attention_backward(*_detached(family, tensors), _deterministic(family, deterministic), *call)


def write_pages(
    k: Array, v: Array, k_idx: Array, slots: Array, k_pages: Array, v_pages: Array, k_idx_pages: Array,
    *, backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> None:  # fmt: skip
    """Stores new keys, values and index keys in the pages of a cache, in place: on a GPU one launch, which waits for nothing.

    ``k_pages[slots[t] // Bk, :, slots[t] % Bk] = k[t]``, v alike, and ``k_idx_pages[slots[t] // Bk, slots[t] % Bk] = k_idx[t]``.
    No gradient passes through.

    A negative slot marks a padding row, which is left out. A slot beyond the pool raises InvalidArgumentError: on the CPU before
    anything is written; on a GPU its row is left out, and the next call or :func:`openmsa.synchronize` raises. Give a slot once: of
    rows that share one the CPU keeps the last, a GPU any.

    :param k: [T, Hkv, D], of any strides but contiguous in its last axis; v alike
    :param k_idx: [T, Di]
    :param slots: [T] int64: page * Bk + place in the page, or negative
    :param k_pages: [num_pages, Hkv, Bk, D], written; v_pages alike
    :param k_idx_pages: [num_pages, Bk, Di], written
    """
    pools = {"k_pages": k_pages, "v_pages": v_pages, "k_idx_pages": k_idx_pages}
    family = _family((*pools, "k", "v", "k_idx", "slots"), *pools.values(), k, v, k_idx, slots)
    if family is numpy_ops:
        for name, pool in pools.items():
            if not pool.flags.writeable:
                raise InvalidArgumentError(f"{name} is read-only, and pages are written in place. Pass a copy.", name)
    else:
        k, v, k_idx = (x.detach() if x.requires_grad else x for x in (k, v, k_idx))
    family.write_pages(k, v, k_idx, slots, *pools.values(), backend, num_threads or 0, trust_indices)


def _detached(family: Any, tensors: tuple) -> tuple:
    return tensors if family is numpy_ops else tuple(tensor.detach() for tensor in tensors)


def _deterministic(family: Any, asked: bool | None) -> bool:
    if asked is None:
        return family is not numpy_ops and family.torch.are_deterministic_algorithms_enabled()
    return asked


def _config_from_shapes(q: Any, k: Any, q_idx: Any) -> MsaConfig:
    if len(q.shape) != 3 or len(k.shape) not in (3, 4) or len(q_idx.shape) != 3:
        raise InvalidArgumentError(
            "config is missing and cannot be taken from these shapes. Pass openmsa.MsaConfig(...).", "config"
        )
    block_size = 128 if len(k.shape) == 3 else k.shape[2]
    return MsaConfig(
        num_q_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[2], index_dim=q_idx.shape[2], block_size=block_size
    )
