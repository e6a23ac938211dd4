"""The training part of `openmsa bench --cuda`: forward, backward and index KL loss against dense attention's forward and backward.

Rules are those of bench_cuda. Both sides go through autograd, ours with msa_attention and index_kl_loss, theirs with PyTorch's causal
attention; its layout changes, and ours if any, are outside the times. Where dense attention is longer than the budget allows it is
extrapolated by N^2, and the row says so. The same code runs on the CPU at small sizes, so that it can be rehearsed without a GPU.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import openmsa

from . import bench_common
from .bench_common import causal_pairs, index_queries, normal, row
from .bench_cpu import selected_pairs

STAGES = ("sparse_attention_backward", "dense_attention_backward", "index_kl_loss")
BACKWARD_OVER_FORWARD = 2.5  # five products over every pair of a query and a key, where forward has two
STEP_BARS = {65536: 5, 131072: 9}  # forward + backward + index KL over dense forward + backward
BACKWARD_BARS = (280, 420)  # TFLOP/s
LOSS_BARS = (50, 20)  # percent of the sparse backward's time
GROWTH_BAR = 2.1  # memory of twice the tokens
PACK_SHARE = 0.4  # of the budget is kept for the real packs
PACK_ORDER = (0, 2, 1, 3)  # packs are sorted by number of documents; every prefix of this order is a spread of them


@dataclasses.dataclass
class Options:
    config: openmsa.MsaConfig = dataclasses.field(default_factory=bench_common.config)
    lengths: tuple[int, ...] = (8192, 16384, 32768, 65536, 131072, 262144)
    longest_dense: int = 131072  # dense forward + backward of 131,072 tokens takes two seconds on an H200
    first_bar: int = 32768  # bars of rates and memory hold from here on
    warmup_lengths: tuple[int, ...] = (8192, 32768)
    packs: list[dict[str, Any]] | None = None  # {"name": ..., "cu_seqlens": [...]}, as in a training_packs.json
    budget_s: float = 100.0
    device: str = "cuda"

    @staticmethod
    def quick(**changes: Any) -> "Options":
        return Options(lengths=(8192, 16384), longest_dense=16384, warmup_lengths=(8192,), **changes)


class Budget:
    def __init__(self, seconds: float) -> None:
        self.end, self.seconds = time.monotonic() + seconds, seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def in_turn(calls: dict[str, Callable[[], Any]], repeats: int, device: str) -> dict[str, float]:
    """Median milliseconds of every call, as bench_common.in_turn on a GPU; by the wall clock on a CPU."""
    if device == "cuda":
        return bench_common.in_turn(calls, repeats)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


@dataclasses.dataclass
class Layer:
    """One layer's inputs, leaves of autograd, and the gradient of its output."""

    config: openmsa.MsaConfig
    batch: openmsa.Batch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_idx: torch.Tensor
    k_idx: torch.Tensor
    d_out: torch.Tensor

    @staticmethod
    def random(num_tokens: int, clustered: bool, options: Options) -> "Layer":
        config, device = options.config, options.device
        hq, hkv, d, di = config.num_q_heads, config.num_kv_heads, config.head_dim, config.index_dim
        q, k, v = (normal(num_tokens, heads, d, seed=i, device=device) for i, heads in enumerate((hq, hkv, hkv)))
        q_idx = index_queries(num_tokens, config, clustered, seed=4, device=device)
        k_idx, d_out = normal(num_tokens, di, seed=3, device=device), normal(num_tokens, hq, d, seed=5, device=device)
        batch = openmsa.Batch.single(num_tokens, device=device)
        return Layer(config, batch, *(x.requires_grad_() for x in (q, k, v, q_idx, k_idx)), d_out)

    def forward_backward(self) -> Any:
        out = openmsa.msa_attention(self.q, self.k, self.v, self.q_idx, self.k_idx, self.batch, self.config)
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.d_out)

    def step(self) -> Any:
        """Forward, backward, and the index KL loss with its gradients."""
        out, lse, ids = openmsa.msa_attention(
            self.q, self.k, self.v, self.q_idx, self.k_idx, self.batch, self.config, return_lse=True, return_block_ids=True)
        loss = openmsa.index_kl_loss(self.q, self.k, lse, self.q_idx, self.k_idx, self.batch, self.config, block_ids=ids)
        leaves = (self.q, self.k, self.v, self.q_idx, self.k_idx)
        return torch.autograd.grad((out, loss), leaves, (self.d_out, torch.ones_like(loss)))

    def stages(self, dense: bool = False) -> tuple[dict[str, Callable[[], Any]], torch.Tensor | None]:
        """The backward pass alone and the index KL loss alone, and the selection."""
        q, k, v, q_idx, k_idx = (x.detach() for x in (self.q, self.k, self.v, self.q_idx, self.k_idx))
        options: dict[str, Any] = {"trust_indices": True}
        if dense:
            ids = None
            out, lse = openmsa.dense_attention(q, k, v, self.batch, self.config, return_lse=True)
        else:
            out, lse, ids = openmsa.msa_attention(q, k, v, q_idx, k_idx, self.batch, self.config, return_lse=True, return_block_ids=True)

        def backward() -> Any:
            if dense:
                return openmsa.dense_attention_backward(q, k, v, out, lse, self.d_out, self.batch, self.config, **options)
            return openmsa.sparse_attention_backward(q, k, v, ids, out, lse, self.d_out, self.batch, self.config, **options)

        def loss() -> Any:
            return openmsa.index_kl_loss(
                q, k, lse, q_idx, k_idx, self.batch, self.config, block_ids=ids, return_gradients=True, **options)

        return {"backward": backward, "loss": loss}, ids


class DenseSide:
    """PyTorch's causal attention, by cuDNN on a GPU, on contiguous [1, H, N, D]."""

    def __init__(self, layer: Layer, options: Options) -> None:
        heads = [x.detach().transpose(0, 1).unsqueeze(0).contiguous() for x in (layer.q, layer.k, layer.v)]
        self.d_out = layer.d_out.transpose(0, 1).unsqueeze(0).contiguous()
        self.on_gpu, self.note = options.device == "cuda", ""
        self.leaves = [x.requires_grad_() for x in heads]
        try:
            self.forward_backward()
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise
            group = layer.config.group_size
            self.leaves[1:] = [x.detach().repeat_interleave(group, dim=1).requires_grad_() for x in heads[1:]]
            self.note = "its k and v repeated for every query head"

    def forward(self) -> torch.Tensor:
        is_grouped = self.leaves[1].shape[1] < self.leaves[0].shape[1]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self.on_gpu else contextlib.nullcontext():
            return F.scaled_dot_product_attention(*self.leaves, is_causal=True, enable_gqa=is_grouped)

    def forward_backward(self) -> Any:
        return torch.autograd.grad(self.forward(), self.leaves, self.d_out)


def free(options: Options) -> None:
    if options.device == "cuda":
        openmsa.synchronize("cuda")
        torch.cuda.empty_cache()


def peak_bytes(call: Callable[[], Any], options: Options) -> int | None:
    """Memory of a call on top of what is held before it; the library's scratch comes from PyTorch's allocator too."""
    if options.device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@dataclasses.dataclass
class Seen:
    """What later rows need of earlier ones, by tokens."""

    dense_ms: dict[int, float] = dataclasses.field(default_factory=dict)
    peak_bytes: dict[int, int] = dataclasses.field(default_factory=dict)

    def dense(self, tokens: int) -> tuple[float | None, str]:
        """Milliseconds of dense forward + backward, and how they were found where they were not measured."""
        if tokens in self.dense_ms or not self.dense_ms:
            return self.dense_ms.get(tokens), ""
        longest = max(self.dense_ms)
        return self.dense_ms[longest] * (tokens / longest) ** 2, f"dense extrapolated by N^2 from {longest:,}"


def length_rows(
    tokens: int, kind: str, times: dict[str, float], ids: torch.Tensor, seen: Seen, note: str, options: Options
) -> list[dict[str, Any]]:
    rows, cfg = [], options.config
    where = f"{tokens:,} tokens, {kind}"
    theirs, how = seen.dense(tokens)
    for name, what, good in (("step", "forward + backward + index KL", STEP_BARS.get(tokens)),
                             ("forward_backward", "forward + backward", None)):
        rows.append(row(f"training_{name}_{tokens}_{kind}", f"{what}, {where}: times faster than dense forward + backward", "x",
                        None if theirs is None else theirs / times[name], good, ours_ms=times[name], theirs_ms=theirs, note=note or how))
    backward_bars, loss_bars = (BACKWARD_BARS, LOSS_BARS) if tokens >= options.first_bar else ((None, None), (None, None))
    pairs = selected_pairs(ids, cfg.block_size)
    whole_blocks = int((ids >= 0).sum()) * cfg.block_size  # as bench_cuda's attend rows count: the query's own block in full
    tf_of_pair = 4 * BACKWARD_OVER_FORWARD * cfg.group_size * cfg.head_dim / times["backward"] / 1e9
    rows.append(row(f"training_backward_{tokens}_{kind}", f"sparse backward, {where}", "TF", pairs * tf_of_pair, *backward_bars,
                    ours_ms=times["backward"], visible_pairs=pairs, tf_of_whole_blocks=whole_blocks * tf_of_pair))
    share = 100 * times["loss"] / times["backward"]
    rows.append(row(f"training_index_kl_{tokens}_{kind}", f"index KL with gradients, {where}: share of the sparse backward's time", "%",
                    share, *loss_bars, lower_is_better=True, ours_ms=times["loss"]))
    return rows


def bench_length(tokens: int, seen: Seen, options: Options, budget: Budget) -> list[dict[str, Any]]:
    """Rows of one sequence length; enters dense attention's time and the step's memory."""
    rows = []
    repeats = 5 if tokens <= 32768 else 3 if tokens <= 65536 else 2
    for clustered in (False, True):
        layer = Layer.random(tokens, clustered, options)
        stages, ids = layer.stages()
        calls, side = {"step": layer.step, "forward_backward": layer.forward_backward, **stages}, None
        # Dense attention does not care how selections are clustered, so it takes its turns once.
        if tokens not in seen.dense_ms and tokens <= options.longest_dense:
            expected_s = (seen.dense(tokens)[0] or 0) / 1000 * (repeats + 2)
            if expected_s <= budget.left - PACK_SHARE * budget.seconds:
                side = DenseSide(layer, options)
                calls["dense"] = side.forward_backward
        times = in_turn(calls, repeats, options.device)
        if side is not None:
            seen.dense_ms[tokens] = times["dense"]
        rows += length_rows(tokens, "clustered" if clustered else "random", times, ids, seen, side.note if side else "", options)
        del side, calls, stages, ids
        free(options)
        peak = None if clustered else peak_bytes(layer.step, options)
        if peak is not None:
            seen.peak_bytes[tokens] = peak
            rows.append(row(f"training_memory_{tokens}", f"memory of the step on top of its inputs, {tokens:,} tokens", "MiB", peak / 2**20,
                            lower_is_better=True, bytes_per_token=peak / tokens))
        del layer
        free(options)
    return rows


def memory_growth(seen: Seen, options: Options) -> list[dict[str, Any]]:
    peaks = {n: peak for n, peak in seen.peak_bytes.items() if n >= options.first_bar}
    growth = [peak / peaks[n // 2] for n, peak in peaks.items() if n // 2 in peaks]
    if not growth:
        return []
    return [row("training_memory_growth", f"memory of the step, at worst, against half as many tokens, from {options.first_bar:,}", "x",
                max(growth), GROWTH_BAR, lower_is_better=True)]


def bench_warmup(tokens: int, options: Options) -> list[dict[str, Any]]:
    """The warm-up phase: dense attention with the index KL loss over all visible keys."""
    layer, cfg = Layer.random(tokens, False, options), options.config
    stages, _ = layer.stages(dense=True)
    side = DenseSide(layer, options)
    times = in_turn({**stages, "dense": side.forward_backward, "dense_forward": side.forward}, 3, options.device)
    theirs = times["dense"] - times["dense_forward"]
    flops = 4 * BACKWARD_OVER_FORWARD * cfg.num_q_heads * cfg.head_dim * causal_pairs(tokens, tokens)
    share = 100 * times["loss"] / times["backward"]
    rows = [
        row(f"training_dense_backward_{tokens}", f"dense backward, {tokens:,} tokens", "TF", flops / times["backward"] / 1e9,
            ours_ms=times["backward"], theirs_ms=theirs, theirs_tf=flops / theirs / 1e9, note=side.note),
        row(f"training_index_kl_all_{tokens}", f"index KL over all visible keys, {tokens:,} tokens: share of the dense backward's time",
            "%", share, lower_is_better=True, ours_ms=times["loss"]),
    ]
    del layer, stages, side
    free(options)
    return rows


def bench_packs(seen: Seen, options: Options, budget: Budget) -> list[dict[str, Any]]:
    """A layer's step on real packs of documents. The file gives no weights: every pack counts the same."""
    if not options.packs:
        return [row("training_packs", "real training packs: no pack file given (--workloads DIR)", "ms", None)]
    packs = [pack for first in PACK_ORDER for pack in options.packs[first :: len(PACK_ORDER)]]
    layer = Layer.random(packs[0]["cu_seqlens"][-1], True, options)
    tokens, took = layer.q.shape[0], []
    for pack in packs:
        starts = pack["cu_seqlens"]
        if starts[-1] != tokens or budget.left < 0:
            continue
        lengths = [end - start for start, end in zip(starts, starts[1:])]
        layer.batch = openmsa.Batch.packed(lengths, device=options.device)
        ms = in_turn({"step": layer.step}, 2, options.device)["step"]
        took.append((ms, pack["name"], sum(causal_pairs(n, n) for n in lengths)))
    del layer
    free(options)
    if not took:
        return [row("training_packs", "real training packs: no time was left for them (--budget)", "ms", None)]
    mean = statistics.fmean(ms for ms, _, _ in took)
    details: dict[str, Any] = {}
    if seen.dense_ms:
        # What dense attention would need at the rate it has on one long sequence; over short documents its rate is lower.
        longest = max(seen.dense_ms)
        pairs = statistics.fmean(pairs for _, _, pairs in took)
        details["dense_ms_by_pairs"] = pairs * seen.dense_ms[longest] / causal_pairs(longest, longest)
    slowest, fastest = max(took), min(took)
    what = f"{len(took)} of {len(packs)} real training packs of {tokens:,} tokens: mean time of a layer's step"
    return [row("training_packs", what, "ms", mean, lower_is_better=True, tokens_per_s=tokens / mean * 1e3,
                slowest=slowest[1], slowest_ms=slowest[0], fastest=fastest[1], fastest_ms=fastest[0], **details)]


def bench_training(options: Options, report: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    kernels = {kernel.stage for kernel in openmsa.list_kernels() if kernel.backend == options.device}
    missing = [stage for stage in STAGES if stage not in kernels]
    if missing:
        return [row("training", f"training: this build has no GPU kernel for {', '.join(missing)}", "x", None)]
    rows: list[dict[str, Any]] = []
    budget, seen = Budget(options.budget_s), Seen()
    for tokens in options.lengths:
        report(f"training, {tokens:,} tokens")
        if budget.left < PACK_SHARE * budget.seconds / 2:
            rows.append(row(f"training_step_{tokens}_random", f"training, {tokens:,} tokens: no time was left (--budget)", "x", None))
            continue
        rows += bench_length(tokens, seen, options, budget)
    rows += memory_growth(seen, options)
    for tokens in options.warmup_lengths:
        if budget.left > PACK_SHARE * budget.seconds / 2:
            rows += bench_warmup(tokens, options)
    report("training, packs")
    return rows + bench_packs(seen, options, budget)
