"""fmha_sm100_plan and fmha_sm100: lengths into a plan, a plan and tensors into outputs and block scores."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import torch

from .. import ops
from ..batch import Batch
from ..errors import InvalidArgumentError, UnsupportedError
from ..info import list_backends, synchronize
from . import arguments

_TILE = 128  # tokens of a score tile where keys are not paged; and score tensors have a multiple of this many tiles


@dataclasses.dataclass(frozen=True)
class _DevicePlan:
    """A plan's index tensors on one device."""

    cu_seqlens_q: torch.Tensor  # int32 [B+1]
    cu_seqlens_k: torch.Tensor  # int32 [B+1]
    seqlens_k: torch.Tensor  # int32 [B]
    q_start: torch.Tensor  # int32 [B]
    page_slots: torch.Tensor | None  # int32 [B * max_pages]: where in kv_indices each page of a sequence stands
    block_limits: tuple[torch.Tensor, torch.Tensor] | None  # int32 [T] twice, see arguments.block_limits; None: all is visible


class Plan:
    """What :func:`fmha_sm100_plan` returns: lengths and options, with their index tensors kept on each device used so far.

    Opaque to callers, immutable, and good for any number of layers. (The authors' plan is a tuple of workspaces; unpacking it is the
    one thing that does not carry over.)
    """

    def __init__(
        self, seqlens_q: list[int], seqlens_k: list[int], q_start: list[int], num_q_heads: int, num_kv_heads: int,
        page_size: int, kv_block_num: int, output_maxscore: bool, causal: bool,
    ) -> None:  # fmt: skip
        self.seqlens_q, self.seqlens_k, self.q_start = tuple(seqlens_q), tuple(seqlens_k), tuple(q_start)
        self.num_q_heads, self.num_kv_heads = num_q_heads, num_kv_heads
        self.page_size, self.kv_block_num = page_size, kv_block_num
        self.output_maxscore, self.causal = output_maxscore, causal
        self.block_size = page_size if page_size > 0 else _TILE
        self.total_q, self.total_k = sum(seqlens_q), sum(seqlens_k)
        self.max_seqlen_q, self.max_seqlen_k = max(seqlens_q, default=0), max(seqlens_k, default=0)
        self.total_pages = sum(-(-n // self.block_size) for n in seqlens_k)
        self._devices: dict[torch.device, _DevicePlan] = {}

    @property
    def num_seqs(self) -> int:
        return len(self.seqlens_q)

    @property
    def num_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_seqlen_k // self.block_size)

    @property
    def max_k_tiles(self) -> int:
        """Columns of a score tensor: num_blocks, rounded up to a multiple of 128 as in the authors' package."""
        return -(-self.num_blocks // _TILE) * _TILE

    def on(self, device: torch.device) -> _DevicePlan:
        """The index tensors on a device; one copy without waiting when first asked for."""
        found = self._devices.get(device)
        if found is None:
            found = self._devices[device] = self._build(device)
        return found

    def _build(self, device: torch.device) -> _DevicePlan:
        pages = [-(-n // self.block_size) for n in self.seqlens_k]
        starts = [itertools.accumulate(lengths, initial=0) for lengths in (self.seqlens_q, self.seqlens_k, pages)]
        host = torch.tensor([*itertools.chain(*starts), *self.seqlens_k, *self.q_start], dtype=torch.int32)
        if device.type == "cuda":  # from pinned memory the copy does not wait for the device
            host = host.pin_memory()
        n = self.num_seqs
        cu_q, cu_k, cu_pages, seqlens_k, q_start = host.to(device, non_blocking=True).split([n + 1, n + 1, n + 1, n, n])
        slots = None
        if self.page_size > 0:
            columns = torch.arange(self.num_blocks, device=device, dtype=torch.int32)
            # Past a sequence's last page any slot will do: the operators never read those entries.
            slots = (cu_pages[:-1, None] + columns).clamp_(max=max(self.total_pages - 1, 0)).flatten()
        limits = None
        if self.kv_block_num > 0 and not self._sees_every_block():
            batch = Batch(
                cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, q_start=q_start,
                max_seqlen_q=self.max_seqlen_q, max_seqlen_k=self.max_seqlen_k,
            )  # fmt: skip
            limits = arguments.block_limits(batch, seqlens_k, self.total_q, self.block_size)
        return _DevicePlan(cu_q, cu_k, seqlens_k, q_start, slots, limits)

    def _sees_every_block(self) -> bool:
        """Whether already the first query of each sequence sees its last block, as when decoding."""
        sequences = zip(self.seqlens_q, self.seqlens_k, self.q_start)
        return all(n_q == 0 or start // self.block_size >= (n_k - 1) // self.block_size for n_q, n_k, start in sequences)

    def __repr__(self) -> str:
        kind = f"sparse, {self.kv_block_num} blocks" if self.kv_block_num > 0 else "dense"
        return f"Plan({kind}, {self.num_seqs} sequences, {self.total_q} queries, longest {self.max_seqlen_k} keys)"


def _lengths(name: str, values: Any) -> list[int]:
    if isinstance(values, torch.Tensor) and values.ndim != 1:
        raise InvalidArgumentError(f"{name} has shape {list(values.shape)}; it must be [B], one length per sequence.", name)
    try:
        lengths = [operator.index(x) for x in (values.tolist() if hasattr(values, "tolist") else values)]
    except TypeError:
        raise InvalidArgumentError(f"{name} is no list of integers; give one length per sequence.", name) from None
    if min(lengths, default=0) < 0 or sum(lengths) > arguments.INT32_MAX:
        raise InvalidArgumentError(
            f"{name} is {lengths[:8]}{' and more' if len(lengths) > 8 else ''}; lengths (not running sums) are 0 or more and together "
            f"at most {arguments.INT32_MAX}.",
            name,
        )
    return lengths


def fmha_sm100_plan(
    qo_segment_lens: torch.Tensor,
    kv_segment_lens: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int = -1,
    *,
    qo_offset: int | torch.Tensor | None = None,
    split_prefill_decode: bool = True,
    num_kv_splits: int = -1,
    page_size: int = -1,
    output_maxscore: bool = False,
    kv_block_num: int = -1,
    usable_SM_count: int = -1,
    causal: bool = True,
    sparse_kernel_mode: str = "auto",
    use_fp8_kvcache: bool = False,
    device: Any = None,
    stream: Any = None,
    **options: Any,
) -> Plan:
    """A plan for :func:`fmha_sm100`, for any number of layers with these lengths.

    Lengths are best given on the host (tensors, arrays or lists); reading lengths from a GPU waits for it.

    :param qo_segment_lens: [B] queries of each sequence (lengths, not running sums); any mix of prefill, chunks and decode
    :param kv_segment_lens: [B] keys of each sequence
    :param num_kv_heads: checked against k where given
    :param qo_offset: [B] or one number: position of each sequence's first query; default ``kv - qo``
    :param page_size: tokens of a page; -1 for keys that are not paged
    :param output_maxscore: fmha_sm100 is to return block scores
    :param kv_block_num: length of the block lists for a sparse pass; -1 for a dense pass
    :param causal: False lets every query see all keys of its sequence
    :param device: where the index tensors are made now; elsewhere they are made on first use. Default the current GPU if OpenMSA can
        use one
    :param split_prefill_decode: accepted without effect, as are ``num_kv_splits``, ``usable_SM_count``, ``sparse_kernel_mode`` and
        ``stream``: OpenMSA schedules by itself, on PyTorch's current stream
    """
    if use_fp8_kvcache:
        raise arguments.not_yet("use_fp8_kvcache", "is True")
    arguments.refuse_unknown("fmha_sm100_plan", options)
    seqlens_q, seqlens_k = _lengths("qo_segment_lens", qo_segment_lens), _lengths("kv_segment_lens", kv_segment_lens)
    if len(seqlens_q) != len(seqlens_k):
        raise InvalidArgumentError(
            f"kv_segment_lens has {len(seqlens_k)} lengths for {len(seqlens_q)} sequences; give one per sequence.", "kv_segment_lens"
        )
    num_qo_heads, num_kv_heads = operator.index(num_qo_heads), operator.index(num_kv_heads)
    page_size, kv_block_num = operator.index(page_size), operator.index(kv_block_num)
    if num_qo_heads < 1 or (num_kv_heads > 0 and num_qo_heads % num_kv_heads):
        raise InvalidArgumentError(
            f"num_qo_heads is {num_qo_heads} and num_kv_heads is {num_kv_heads}; every KV head serves the same number of query heads.",
            "num_qo_heads",
        )
    if kv_block_num > 0 and page_size <= 0:
        raise InvalidArgumentError(
            f"page_size is {page_size}, but kv_block_num is {kv_block_num}; a sparse pass needs paged keys. Give page_size=128.",
            "page_size",
        )
    if kv_block_num > 0 and output_maxscore:
        raise UnsupportedError(
            "output_maxscore is True, but kv_block_num is given; scores come from a dense pass. Make a plan of its own for them.",
            "output_maxscore",
        )
    if not causal:
        starts = seqlens_k  # behind the last key, where everything is visible
    elif qo_offset is None:
        starts = [n_k - n_q for n_q, n_k in zip(seqlens_q, seqlens_k)]
    else:
        starts = _offsets("qo_offset", qo_offset, len(seqlens_q))
    plan = Plan(
        seqlens_q, seqlens_k, starts, num_qo_heads, num_kv_heads, max(page_size, -1) or -1, kv_block_num, bool(output_maxscore),
        bool(causal),
    )  # fmt: skip
    plan.on(_default_device(device, qo_segment_lens))
    return plan


def _offsets(name: str, values: Any, num_seqs: int) -> list[int]:
    if isinstance(values, int):
        return [values] * num_seqs
    offsets = [int(x) for x in (values.tolist() if hasattr(values, "tolist") else values)]
    if len(offsets) != num_seqs or any(abs(x) > arguments.INT32_MAX for x in offsets):
        raise InvalidArgumentError(
            f"{name} has {len(offsets)} entries for {num_seqs} sequences; give one 32-bit position per sequence.", name
        )
    return offsets


@functools.cache
def _has_usable_gpu() -> bool:
    return torch.cuda.is_available() and any(row.available for row in list_backends() if row.backend == "cuda")


def _default_device(device: Any, lengths: Any) -> torch.device:
    if device is not None:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    elif isinstance(lengths, torch.Tensor) and lengths.is_cuda:
        device = lengths.device
    else:
        device = torch.device("cuda" if _has_usable_gpu() else "cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def fmha_sm100(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan_info: Plan,
    kv_indices: torch.Tensor | None = None,
    kv_block_indexes: torch.Tensor | None = None,
    q_offset_override: int | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    max_score: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    *,
    sm_scale: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    o_scale: float | None = None,
    output_maxscore: bool = True,
    output_o: bool = True,
    check_input_valid: bool = False,
    **options: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``(out, max_score)``: attention over all keys, or over listed blocks, and the best score of each block.

    ``out`` is [T, Hq, D] in q's dtype, or None with ``output_o=False``. ``max_score`` is float32 [Hq, tiles, T] if both the plan and
    the call say ``output_maxscore``, else None: entry [h, b, t] is the largest dot product of query t of head h with the keys of
    block b that it sees, without the softmax scale, and -inf where it sees none. ``tiles`` is the number of blocks of the longest
    sequence, rounded up to a multiple of 128; the surplus is -inf. There is no limit on the number of elements. With
    ``output_o=False`` only scores are computed and v is not read. A query that sees no key gives 0. Nothing here waits for a GPU.

    :param q: [T, Hq, D]
    :param k: [pages, Hkv, page_size, D], or [S, Hkv, D] if the plan has no page size; v alike
    :param kv_indices: int32 [pages in use]: each sequence's pages in order, sequence after sequence; may be longer
    :param kv_block_indexes: int32 [T, Hkv, n] from sparse_topk_select, or [T, Hq, n], of which each group's first head counts.
        Blocks that lie in a token's future are ignored
    :param q_offset_override: replaces the plan's ``qo_offset`` for this call; a tensor may lie on the GPU
    :param out: [T, Hq, D] to write to
    :param max_score: float32 [Hq, tiles, T] or [T, Hq, tiles] to write to, with at least as many tiles as there are blocks; the
        second form saves a transposition here, and again in sparse_topk_select
    :param page_table: int32 [B, max_pages], instead of ``kv_indices``
    :param sm_scale: softmax scale, default 1/sqrt(D)
    :param q_scale: ``q_scale``, ``k_scale``, ``v_scale`` and ``o_scale`` belong to FP8 and must be 1 if given
    :param check_input_valid: also wait for the GPU and raise what it found wrong in the index data
    """
    if not isinstance(plan_info, Plan):
        raise InvalidArgumentError(
            f"plan_info is a {type(plan_info).__name__}; pass what fmha_sm100_plan returned, unchanged.", "plan_info"
        )
    plan = plan_info
    arguments.refuse_low_precision(q=q, k=k, **({"v": v} if output_o else {}))
    arguments.refuse_scales(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, o_scale=o_scale)
    arguments.refuse_unknown("fmha_sm100", options)
    wants_scores = bool(output_maxscore and plan.output_maxscore)
    if not output_o and not wants_scores:
        raise InvalidArgumentError(
            "output_o is False and no scores are wanted either, so nothing is left to compute. Make the plan with "
            "output_maxscore=True and pass it here too, or leave output_o True.",
            "output_o",
        )
    arguments.require_shape("q", q, [("T", plan.total_q), ("Hq", plan.num_q_heads), ("D", None)])
    batch = _batch(plan, q, k, kv_indices, page_table, q_offset_override)
    num_kv_heads = k.shape[1]
    if num_kv_heads < 1 or plan.num_q_heads % num_kv_heads:
        raise InvalidArgumentError(f"k has {num_kv_heads} heads, which does not divide the {plan.num_q_heads} of q.", "k")
    sizes = {"num_q_heads": plan.num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": q.shape[2],
             "block_size": plan.block_size, "softmax_scale": None if sm_scale is None else float(sm_scale)}  # fmt: skip
    scores = None
    if plan.max_seqlen_k == 0:  # to the operators a longest sequence of 0 keys means "not known"
        result = torch.zeros_like(q) if output_o else None
        scores = [q.new_empty((*q.shape[:2], 0), dtype=torch.float32)] if wants_scores else None
    elif plan.kv_block_num > 0:
        result = _sparse(plan, q, k, v, batch, kv_block_indexes, q_offset_override is not None, sizes)
    elif kv_block_indexes is not None:
        raise InvalidArgumentError(
            "kv_block_indexes is given, but the plan is for a dense pass. Make it with "
            f"kv_block_num={kv_block_indexes.shape[-1]}.",
            "kv_block_indexes",
        )
    elif not output_o:
        result, scores = None, _score_heads(q, k, batch, plan.block_size)
    else:
        config = arguments.config(**sizes)
        result = ops.dense_attention(q, k, v, batch, config, return_block_max=wants_scores)
        if wants_scores:
            result, scaled = result
            scores = [scaled.div_(config.effective_softmax_scale)]
    if check_input_valid and q.is_cuda:
        synchronize(q.device)
    if result is not None and out is not None:
        arguments.require_shape("out", out, [("T", q.shape[0]), ("Hq", q.shape[1]), ("D", q.shape[2])])
        result = out.copy_(result)
    return result, None if scores is None else _store_scores(plan, scores, max_score)


def _batch(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, kv_indices: torch.Tensor | None, page_table: torch.Tensor | None,
    q_offset_override: int | torch.Tensor | None,
) -> Batch:  # fmt: skip
    arguments.require_one_device(q, "q", k=k, kv_indices=kv_indices, page_table=page_table)
    state = plan.on(q.device)
    q_start = state.q_start
    if q_offset_override is not None and not plan.causal:
        raise InvalidArgumentError(
            "q_offset_override is given, but the plan has causal=False, where positions mean nothing. Drop one of the two.",
            "q_offset_override",
        )
    if isinstance(q_offset_override, torch.Tensor):
        arguments.require_one_device(q, "q", q_offset_override=q_offset_override)
        arguments.require_shape("q_offset_override", q_offset_override, [("B", plan.num_seqs)])
        q_start = arguments.int32("q_offset_override", q_offset_override)
    elif q_offset_override is not None:
        q_start = torch.full_like(q_start, q_offset_override)
    fields = {"cu_seqlens_q": state.cu_seqlens_q, "q_start": q_start, "max_seqlen_q": plan.max_seqlen_q,
              "max_seqlen_k": plan.max_seqlen_k}  # fmt: skip
    heads = ("Hkv", plan.num_kv_heads if plan.num_kv_heads > 0 else None)
    if plan.page_size <= 0:
        if k.ndim == 4:
            raise InvalidArgumentError(
                f"k has shape {list(k.shape)}, which is paged, but the plan has no page_size. Make it with page_size={k.shape[2]}.", "k"
            )
        arguments.require_shape("k", k, [("S", plan.total_k), heads, ("D", q.shape[2])])
        return Batch(cu_seqlens_k=state.cu_seqlens_k, **fields)
    arguments.require_shape("k", k, [("pages", None), heads, ("page_size", plan.page_size), ("D", q.shape[2])])
    if page_table is not None:
        arguments.require_shape("page_table", page_table, [("B", plan.num_seqs), ("max_pages", None)])
        if page_table.shape[1] < plan.num_blocks:
            raise InvalidArgumentError(
                f"page_table has {page_table.shape[1]} columns, but the longest sequence has {plan.num_blocks} pages. Pass a wider one.",
                "page_table",
            )
        table = arguments.int32("page_table", page_table)
    elif kv_indices is None:
        raise InvalidArgumentError("kv_indices is missing; paged keys need the list of pages.", "kv_indices")
    else:
        arguments.require_shape("kv_indices", kv_indices, [("pages in use", None)])
        if kv_indices.shape[0] < plan.total_pages:
            raise InvalidArgumentError(
                f"kv_indices has {kv_indices.shape[0]} entries, but the plan's sequences have {plan.total_pages} pages of "
                f"{plan.page_size} tokens. Give every sequence's pages, one sequence after the other.",
                "kv_indices",
            )
        pages = arguments.int32("kv_indices", kv_indices)
        if plan.num_seqs == 1:
            table = pages[None, : plan.total_pages]
        else:
            table = pages.index_select(0, state.page_slots).view(plan.num_seqs, plan.num_blocks)
    return Batch(seqlens_k=state.seqlens_k, page_table=table, **fields)


def _sparse(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv_block_indexes: torch.Tensor | None,
    is_moved: bool, sizes: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    if kv_block_indexes is None:
        raise InvalidArgumentError(
            f"kv_block_indexes is missing; the plan is for a sparse pass over {plan.kv_block_num} blocks a token. Pass what "
            "sparse_topk_select returned.",
            "kv_block_indexes",
        )
    arguments.require_one_device(q, "q", kv_block_indexes=kv_block_indexes)
    num_kv_heads = k.shape[1]
    by_query_head = kv_block_indexes.ndim == 3 and kv_block_indexes.shape[1] == plan.num_q_heads != num_kv_heads
    heads = plan.num_q_heads if by_query_head else num_kv_heads
    shape = [("T", plan.total_q), ("Hkv", heads), ("kv_block_num", plan.kv_block_num)]
    arguments.require_shape("kv_block_indexes", kv_block_indexes, shape)
    ids = arguments.int32("kv_block_indexes", kv_block_indexes)
    if by_query_head:
        ids = ids[:, :: plan.num_q_heads // num_kv_heads]
    state = plan.on(q.device)
    limits = state.block_limits
    if is_moved:
        limits = arguments.block_limits(batch, state.seqlens_k, plan.total_q, plan.block_size)
    if limits is not None:
        ids = arguments.drop_unseen(ids, *limits)
    config = arguments.config(**sizes, top_k=plan.kv_block_num, num_local_blocks=0)
    return arguments.attend(q, k, v, ids, batch, config)[0]


def _score_heads(q: torch.Tensor, k: torch.Tensor, batch: Batch, block_size: int) -> list[torch.Tensor]:
    """[T, G, blocks] for each KV head: to the scoring kernels a KV head is an index key, and its query heads are index groups."""
    num_kv_heads, dim = k.shape[1], q.shape[2]
    group = q.shape[1] // num_kv_heads
    config = arguments.config(num_q_heads=group, num_kv_heads=group, head_dim=dim, index_dim=dim, block_size=block_size)
    return [ops.block_scores(q[:, h * group : (h + 1) * group], k[:, h], batch, config) for h in range(num_kv_heads)]


def _store_scores(plan: Plan, scores: list[torch.Tensor], max_score: torch.Tensor | None) -> torch.Tensor:
    """Scores [T, heads, blocks] of consecutive heads into the caller's tensor, or a new one [Hq, tiles, T]."""
    num_tokens, _, num_blocks = scores[0].shape
    if max_score is None:
        max_score = scores[0].new_empty((plan.num_q_heads, plan.max_k_tiles, num_tokens))
    arguments.require_one_device(scores[0], "q", max_score=max_score)
    if max_score.dtype != torch.float32 or max_score.ndim != 3:
        raise InvalidArgumentError(
            f"max_score is {max_score.dtype} {list(max_score.shape)}; it must be float32 [Hq, tiles, T] or [T, Hq, tiles].", "max_score"
        )
    by_head = max_score
    if max_score.shape[0] != plan.num_q_heads or max_score.shape[2] != num_tokens:
        by_head = max_score.permute(1, 2, 0)
    if (by_head.shape[0], by_head.shape[2]) != (plan.num_q_heads, num_tokens) or by_head.shape[1] < num_blocks:
        raise InvalidArgumentError(
            f"max_score has shape {list(max_score.shape)}; it must be [Hq, tiles, T] or [T, Hq, tiles] with Hq = {plan.num_q_heads}, "
            f"T = {num_tokens} and at least {num_blocks} tiles.",
            "max_score",
        )
    if num_blocks < by_head.shape[1]:
        by_head[:, num_blocks:].fill_(-math.inf)
    first = 0
    for part in scores:
        by_head[first : first + part.shape[1], :num_blocks].copy_(part.permute(1, 2, 0))
        first += part.shape[1]
    return max_score
