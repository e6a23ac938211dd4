"""The operators as PyTorch sees them: ``torch.ops.openmsa.*`` with fake kernels, so that torch.compile and export trace through.

Defined with torch.library.Library rather than torch.library.custom_op: 6 us a call instead of 14, and a decode step makes one call
per layer. sparse_attention, dense_attention and index_kl_loss have gradients; openmsa.ops keeps the others away from inputs that
want some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import _core, kernels
from .errors import InvalidArgumentError

_CALL = (
    "Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqlens_k, Tensor? page_table, Tensor? q_start, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, int[] sizes, float? softmax_scale, str backend, int num_threads, bool trust_indices"
)
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int32": torch.int32}

library = torch.library.Library("openmsa", "DEF")


def _empty(like: torch.Tensor, shape: Any, dtype: str | None) -> torch.Tensor:
    return like.new_empty(shape, dtype=None if dtype is None else _DTYPES[dtype])


def _define(name: str, tensors: str, returns: str, kernel: Callable, fake: Callable, call: str = _CALL) -> Callable:
    # Inputs keep the strides the caller gave: every kernel wants its last axis contiguous.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    library.define(f"{name}({tensors}, {call}) -> {returns}", tags=tags)

    def implementation(*args: Any) -> Any:
        # The last two arguments are num_threads and trust_indices; 0 threads means as many as PyTorch itself uses.
        return kernel(_empty, *args[:-2], args[-2] or torch.get_num_threads(), args[-1])

    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"openmsa::{name}", fake, lib=library)
    return getattr(torch.ops.openmsa, name).default


def _fake_scores(q_idx: torch.Tensor, k_idx: torch.Tensor, *call: Any) -> torch.Tensor:
    return _empty(q_idx, (*kernels.list_shape(q_idx, call), kernels.num_blocks(call)), kernels.accumulator(q_idx))


def _fake_block_ids(like: torch.Tensor, *call: Any) -> torch.Tensor:
    return _empty(like, (*kernels.list_shape(like, call), call[kernels.SIZES][kernels.TOP_K]), "int32")


def _fake_index_select(q_idx: torch.Tensor, k_idx: torch.Tensor, *call: Any) -> torch.Tensor:
    return _fake_block_ids(q_idx, *call)


def _fake_attention(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(q, q.shape, None), _empty(q, q.shape[:2], kernels.accumulator(q))


def _fake_dense(
    q: torch.Tensor, k: Any, v: Any, with_block_max: bool, *call: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (*q.shape[:2], kernels.num_blocks(call)) if with_block_max else (0,)
    return *_fake_attention(q), _empty(q, shape, kernels.accumulator(q))


def _sparse_decode(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.sparse_attention(*args, decode=True)


def _fake_msa_attention(
    q: torch.Tensor, k: Any, v: Any, q_idx: Any, k_idx: Any, with_block_ids: bool, *call: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (*kernels.list_shape(q, call), call[kernels.SIZES][kernels.TOP_K]) if with_block_ids else (0,)
    return *_fake_attention(q), _empty(q, shape, "int32")


_ATTENTION = "Tensor q, Tensor k, Tensor v, Tensor block_ids"
block_scores = _define("block_scores", "Tensor q_idx, Tensor k_idx", "Tensor", kernels.block_scores, _fake_scores)
select_blocks = _define("select_blocks", "Tensor scores", "Tensor", kernels.select_blocks, _fake_block_ids)
index_select = _define("index_select", "Tensor q_idx, Tensor k_idx", "Tensor", kernels.index_select, _fake_index_select)
sparse_attention = _define("sparse_attention", _ATTENTION, "(Tensor out, Tensor lse)", kernels.sparse_attention, _fake_attention)
sparse_decode = _define("sparse_decode", _ATTENTION, "(Tensor out, Tensor lse)", _sparse_decode, _fake_attention)
msa_attention = _define(
    "msa_attention",
    "Tensor q, Tensor k, Tensor v, Tensor q_idx, Tensor k_idx, bool with_block_ids",
    "(Tensor out, Tensor lse, Tensor block_ids)",
    kernels.msa_attention,
    _fake_msa_attention,
)
dense_attention = _define(
    "dense_attention",
    "Tensor q, Tensor k, Tensor v, bool with_block_max",
    "(Tensor out, Tensor lse, Tensor block_max)",
    kernels.dense_attention,
    _fake_dense,
)


def _fake_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(q, q.shape, None), _empty(k, k.shape, None), _empty(v, v.shape, None)


def _fake_index_kl_loss(
    q: torch.Tensor, k: Any, lse: Any, q_idx: torch.Tensor, k_idx: torch.Tensor, block_ids: Any,
    num_tokens: Any, with_gradients: bool, *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    gradients = (_empty(x, x.shape if with_gradients else (0,), None) for x in (q_idx, k_idx))
    return _empty(q, (), kernels.accumulator(q)), *gradients


sparse_attention_backward = _define(
    "sparse_attention_backward",
    f"{_ATTENTION}, Tensor out, Tensor lse, Tensor d_out, bool deterministic",
    "(Tensor d_q, Tensor d_k, Tensor d_v)",
    kernels.sparse_attention_backward,
    _fake_backward,
)
dense_attention_backward = _define(
    "dense_attention_backward",
    "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, bool deterministic",
    "(Tensor d_q, Tensor d_k, Tensor d_v)",
    kernels.dense_attention_backward,
    _fake_backward,
)
index_kl_loss = _define(
    "index_kl_loss",
    "Tensor q, Tensor k, Tensor lse, Tensor q_idx, Tensor k_idx, Tensor? block_ids, "
    "SymInt num_tokens, bool with_gradients, bool deterministic, float? index_scale",
    "(Tensor loss, Tensor d_q_idx, Tensor d_k_idx)",
    kernels.index_kl_loss,
    _fake_index_kl_loss,
)


def _write_pages(empty: Callable, *args: Any) -> None:
    kernels.write_pages(empty, *args)
    for pages in args[4:7]:
        torch.autograd.graph.increment_version(pages)  # as every operation of PyTorch that writes in place does


def _fake_write_pages(*args: Any) -> None:
    # One tensor without memory sends the whole call here, where nothing would be written and nothing said.
    pages = args[6]
    for name, x in zip(("k", "v", "k_idx", "slots", "k_pages", "v_pages"), args):
        if x.device != pages.device:
            raise InvalidArgumentError(f"{name} lies on {x.device}, k_idx_pages on {pages.device}; move one of them.", name)


write_pages = _define(
    "write_pages",
    "Tensor k, Tensor v, Tensor k_idx, Tensor slots, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor(c!) k_idx_pages",
    "()",
    _write_pages,
    _fake_write_pages,
    "str backend, int num_threads, bool trust_indices",
)

# Which stages have a kernel on the GPU: read once, as torch.compile cannot trace into the extension.
CUDA_STAGES = frozenset(stage for stage, backend, _, _ in _core.list_kernels() if backend == "cuda")
_NUM_INDEX_TENSORS = 5  # the tensors that lead a call: cu_seqlens_q .. q_start


def _save(ctx: Any, tensors: tuple, call: tuple) -> None:
    """Index tensors are saved like the others, so that autograd notices if one is overwritten before backward."""
    ctx.save_for_backward(*tensors, *call[:_NUM_INDEX_TENSORS])
    ctx.call = call[_NUM_INDEX_TENSORS:-1]


def _attention_backward(backward: Callable, ctx: Any, d_out: torch.Tensor) -> tuple:
    *tensors, cu_seqlens_q, cu_seqlens_k, seqlens_k, page_table, q_start = ctx.saved_tensors
    index = (cu_seqlens_q, cu_seqlens_k, seqlens_k, page_table, q_start)
    # A gradient may come expanded from a sum, with strides of 0. The forward pass has checked the ids, so they are trusted.
    arguments = (*tensors, d_out.contiguous(), torch.are_deterministic_algorithms_enabled(), *index, *ctx.call, True)
    return backward(*arguments)


def _save_sparse(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, block_ids, *call = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    _save(ctx, (q, k, v, block_ids, out, lse), tuple(call))


@once_differentiable
def _sparse_gradients(ctx: Any, d_out: torch.Tensor, _: Any) -> tuple:
    return *_attention_backward(sparse_attention_backward, ctx, d_out), *[None] * (1 + _CALL_LENGTH)


def _save_dense(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, _, *call = inputs
    out, lse, block_max = output
    ctx.mark_non_differentiable(lse, block_max)
    _save(ctx, (q, k, v, out, lse), tuple(call))


@once_differentiable
def _dense_gradients(ctx: Any, d_out: torch.Tensor, _: Any, __: Any) -> tuple:
    return *_attention_backward(dense_attention_backward, ctx, d_out), *[None] * (1 + _CALL_LENGTH)


def _save_index_kl_loss(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, d_q_idx, d_k_idx = output
    ctx.mark_non_differentiable(d_q_idx, d_k_idx)
    ctx.save_for_backward(d_q_idx, d_k_idx)


@once_differentiable
def _index_gradients(ctx: Any, d_loss: torch.Tensor, _: Any, __: Any) -> tuple:
    # The forward pass has computed the gradients along with the loss; in bfloat16 the factor is applied before rounding again.
    gradients = tuple((d_loss * x.to(d_loss.dtype)).to(x.dtype) for x in ctx.saved_tensors)
    return None, None, None, *gradients, *[None] * (5 + _CALL_LENGTH)


_CALL_LENGTH = _CALL.count(",") + 1
for _name, _setup, _backward in (
    ("sparse_attention", _save_sparse, _sparse_gradients),
    ("dense_attention", _save_dense, _dense_gradients),
    ("index_kl_loss", _save_index_kl_loss, _index_gradients),
):
    torch.library.register_autograd(f"openmsa::{_name}", _backward, setup_context=_setup, lib=library)
