"""The operators as functions: PyTorch tensors in, PyTorch tensors out; NumPy arrays in, NumPy arrays out.

Letters in shapes: T query tokens and S key tokens of the packed batch, Hq query heads, Hkv KV heads, D head dim, Di index dim,
Bk block size, k = top_k. Paged keys are [num_pages, Hkv, Bk, D], paged index keys [num_pages, Bk, Di].

Every function takes these keyword arguments:

``backend``        "auto" (the fastest for the tensors' device), "reference" (fp64, slow, the oracle) or "cpu".
``num_threads``    CPU threads; default ``torch.get_num_threads()``. Results do not depend on it.
``trust_indices``  skip the check of block ids and page ids; a wrong id is then undefined behaviour.
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
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name} requires a gradient, but this version computes forward results only. Run under torch.no_grad() or "
                f"torch.inference_mode(), or pass {name}.detach().",
                name,
            )
    return family


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
    return family.block_scores(q_idx, k_idx, *_call(family, batch, config, backend, num_threads, trust_indices))


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
    out, lse = family.sparse_attention(q, k, v, block_ids, *_call(family, batch, config, backend, num_threads, trust_indices))
    return (out, lse) if return_lse else out


def sparse_decode(
    q: Array, k: Array, v: Array, block_ids: Array, batch: Batch, config: MsaConfig,
    *, return_lse: bool = False, backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """The result of sparse_attention, by the path made for few query tokens per sequence (decode, speculative decode)."""
    family = _family(("q", "k", "v", "block_ids"), q, k, v, block_ids)
    out, lse = family.sparse_decode(q, k, v, block_ids, *_call(family, batch, config, backend, num_threads, trust_indices))
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
    out, lse, block_max = family.dense_attention(q, k, v, return_block_max, *call)
    extras = ((lse,) if return_lse else ()) + ((block_max,) if return_block_max else ())
    return (out, *extras) if extras else out


def msa_attention(
    q: Array, k: Array, v: Array, q_idx: Array, k_idx: Array, batch: Batch | None = None, config: MsaConfig | None = None,
    *, return_lse: bool = False, return_block_ids: bool = False,
    backend: str = "auto", num_threads: int | None = None, trust_indices: bool = False,
) -> Array | tuple[Array, ...]:  # fmt: skip
    """MiniMax Sparse Attention from projected tensors to output: score key blocks, select, attend.

    Decode (few query tokens per sequence) takes its own path by itself; the result is the same.

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
    if batch.max_seqlen_q <= max_decode_queries(q):
        out, lse, block_ids = family.msa_decode(q, k, v, q_idx, k_idx, return_block_ids, *call)
    else:
        block_ids = family.index_select(q_idx, k_idx, *call)
        # The lists come from index_select, but page ids are still the caller's, so they are checked again unless trusted.
        out, lse = family.sparse_attention(q, k, v, block_ids, *call)
    extras = ((lse,) if return_lse else ()) + ((block_ids,) if return_block_ids else ())
    return (out, *extras) if extras else out


def _config_from_shapes(q: Any, k: Any, q_idx: Any) -> MsaConfig:
    if len(q.shape) != 3 or len(k.shape) not in (3, 4) or len(q_idx.shape) != 3:
        raise InvalidArgumentError(
            "config is missing and cannot be taken from these shapes. Pass openmsa.MsaConfig(...).", "config"
        )
    block_size = 128 if len(k.shape) == 3 else k.shape[2]
    return MsaConfig(
        num_q_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[2], index_dim=q_idx.shape[2], block_size=block_size
    )
