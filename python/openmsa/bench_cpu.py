"""The CPU acceptance benchmark behind `openmsa bench --cpu`: OpenMSA against PyTorch's own attention and matrix product.

It lives in the package, not in bench/, so that an installed wheel can repeat it. Rules it keeps: random data, the same number of
threads, ours and theirs in turn within one process, medians; PyTorch gets the fastest of the formulations tried for it; only
FLOPs that the mask and the selection leave are counted. PyTorch's layout changes are made outside its timings.
"""

import dataclasses
import datetime
import functools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import openmsa

SECTIONS = ("prefill", "rates", "decode", "memory")
WEIGHTS = {"prefill": 40, "rates": 20, "decode": 5, "memory": 30}  # of the progress bar; prefill and rates per dtype

# Bars and stretch goals of the project; docs/guide.md repeats them.
PREFILL_BAR, PREFILL_EXCELLENT = 5.5, 8.0      # times faster than dense
RATE_BAR, RATE_EXCELLENT = 60.0, 80.0          # percent of PyTorch's f32 matmul
DECODE_BAR = 5.0                               # times faster than dense
MEMORY_BAR_MIB = 256.0

# Step-to-step correlation of the clustered index queries. Late in a 32K sequence 4 neighbouring tokens then choose 1.37 times the
# blocks of one, as published for real selections (1.375); over the whole sequence it is 1.28, early tokens having less choice.
CLUSTER_CORRELATION = 0.995
# A dense pass that would take longer than this is not run; its time is projected by N^2 from a short one and the row is skipped.
LONGEST_DENSE_SECONDS = 90.0


@dataclasses.dataclass
class Options:
    sections: tuple[str, ...] = SECTIONS
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    quick: bool = False
    repeats: int = 3
    threads: int = 0  # 0: PyTorch's setting
    seed: int = 0

    @property
    def prefill_tokens(self) -> int:
        return 4096 if self.quick else 32768

    @property
    def long_tokens(self) -> int:
        return 8192 if self.quick else 131072


Report = Callable[[str, float], None]  # (what is running, seconds-like weight just finished)


def prefill_config() -> openmsa.MsaConfig:
    """One GQA group of the reference model."""
    return openmsa.MsaConfig(num_q_heads=16, num_kv_heads=1, head_dim=128, index_dim=128, block_size=128, top_k=16)


def decode_config() -> openmsa.MsaConfig:
    return openmsa.MsaConfig(num_q_heads=64, num_kv_heads=4, head_dim=128, index_dim=128, block_size=128, top_k=16)


# --- timing ------------------------------------------------------------------------------------------------------------------

def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(calls: dict[str, Callable[[], Any]], repeats: int, report: Report, weight: float) -> dict[str, list[float]]:
    """Times of every call, `repeats` each; a round runs each once and the next round starts with another one."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(repeats):
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(timed(calls[name]))
        report("", weight / repeats)
    return times


def fastest(calls: dict[str, Callable[[], Any]], repeats: int) -> str:
    """Name of the call with the smallest median after one warm-up each."""
    for call in calls.values():
        call()
    times = in_turn(calls, repeats, lambda *_: None, 0)
    return min(times, key=lambda name: statistics.median(times[name]))


# --- data --------------------------------------------------------------------------------------------------------------------

def clustered_queries(num_tokens: int, num_heads: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """[T, heads, dim]: a stationary random walk over the tokens, so that neighbours choose mostly the same blocks."""
    steps = torch.randn(num_tokens, num_heads, dim, generator=generator)
    innovation = (1 - CLUSTER_CORRELATION**2) ** 0.5
    for t in range(1, num_tokens):
        steps[t].mul_(innovation).add_(steps[t - 1], alpha=CLUSTER_CORRELATION)
    return steps


def neighbour_union(block_ids: torch.Tensor, tile: int = 4) -> float:
    """Distinct blocks chosen by `tile` neighbouring tokens over the blocks chosen by one, averaged over sampled tiles."""
    num_tokens, _, top_k = block_ids.shape
    first = top_k * 128 if num_tokens > top_k * 256 else num_tokens // 2  # where a choice exists
    ratios = []
    for t in range(first, num_tokens - tile, max(1, (num_tokens - first) // 200)):
        ids = block_ids[t:t + tile, 0]
        ratios.append(len(set(ids[ids >= 0].tolist())) / (ids >= 0).sum(dim=1).float().mean().item())
    return statistics.fmean(ratios)


@dataclasses.dataclass
class Layer:
    """Inputs of one sequence in our packed layout."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_idx: torch.Tensor
    q_idx: dict[str, torch.Tensor]  # "random" and "clustered"


def make_layer(config: openmsa.MsaConfig, num_queries: int, num_keys: int, dtype: torch.dtype, seed: int,
               clustered: bool) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    q_idx = {"random": normal(num_queries, config.num_kv_heads, config.index_dim)}
    if clustered:
        q_idx["clustered"] = clustered_queries(num_queries, config.num_kv_heads, config.index_dim, generator).to(dtype)
    return Layer(q=normal(num_queries, config.num_q_heads, config.head_dim),
                 k=normal(num_keys, config.num_kv_heads, config.head_dim),
                 v=normal(num_keys, config.num_kv_heads, config.head_dim),
                 k_idx=normal(num_keys, config.index_dim), q_idx=q_idx)


def selected_pairs(block_ids: torch.Tensor, block_size: int) -> int:
    """Number of (query token, group, key) triples the selection leaves for one causal sequence with as many keys as queries."""
    positions = torch.arange(block_ids.shape[0], device=block_ids.device).view(-1, 1, 1)
    first = block_ids.long() * block_size
    visible = (positions + 1 - first).clamp(0, block_size)
    return int(visible[block_ids >= 0].sum())


def worst_sampled_error(layer: Layer, config: openmsa.MsaConfig, block_ids: torch.Tensor, out: torch.Tensor) -> float:
    """Largest |out - fp64 attention over the selected keys| at a few tokens: what is timed must also be right."""
    num_tokens = out.shape[0]
    offset = layer.k.shape[0] - num_tokens
    worst = 0.0
    for t in sorted({0, num_tokens // 3, num_tokens // 2, num_tokens - 1}):
        for group in range(config.num_kv_heads):
            ids = block_ids[t, group]
            keys = (ids[ids >= 0].long().view(-1, 1) * config.block_size + torch.arange(config.block_size)).flatten()
            keys = keys[keys <= offset + t]
            heads = slice(group * config.group_size, (group + 1) * config.group_size)
            scores = layer.q[t, heads].double() @ layer.k[keys, group].double().T / config.head_dim**0.5
            expected = torch.softmax(scores, dim=-1) @ layer.v[keys, group].double()
            worst = max(worst, (out[t, heads].double() - expected).abs().max().item())
    return worst


# --- rows --------------------------------------------------------------------------------------------------------------------

def make_row(row_id: str, what: str, unit: str, bar: float, excellent: float | None, measured: float | None,
             options: Options, lower_is_better: bool = False, **details: Any) -> dict[str, Any]:
    def reaches(goal: float) -> bool:
        return measured <= goal if lower_is_better else measured >= goal

    if measured is None:
        verdict = "skipped"
    elif options.quick:
        verdict = "quick: not the bar"
    elif excellent is not None and reaches(excellent):
        verdict = "excellent"
    else:
        verdict = "met" if reaches(bar) else "missed"
    return {"id": row_id, "what": what, "unit": unit, "bar": bar, "excellent": excellent, "measured": measured,
            "verdict": verdict, **details}


def short_name(dtype: torch.dtype) -> str:
    return {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]


# --- the sections ------------------------------------------------------------------------------------------------------------

def causal_dense_calls(layer: Layer) -> dict[str, Callable[[], torch.Tensor]]:
    """PyTorch's ways to run causal GQA attention on [1, heads, T, D] tensors it would find fastest to read."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (layer.q, layer.k, layer.v))
    repeat = q.shape[1] // k.shape[1]

    def expanded(x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(2).expand(-1, -1, repeat, -1, -1).flatten(1, 2)

    k_view, v_view = (x.expand(-1, repeat, -1, -1) if x.shape[1] == 1 else expanded(x) for x in (k, v))
    k_copy, v_copy = expanded(k).contiguous(), expanded(v).contiguous()
    return {
        "enable_gqa": lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True),
        "expanded heads (view)": lambda: sdpa(q, k_view, v_view, is_causal=True),
        "expanded heads (copy)": lambda: sdpa(q, k_copy, v_copy, is_causal=True),
    }


def bench_prefill(options: Options, report: Report) -> list[dict[str, Any]]:
    return [row for dtype in options.dtypes for row in bench_prefill_of(dtype, options, report)]


def bench_prefill_of(dtype: torch.dtype, options: Options, report: Report) -> list[dict[str, Any]]:
    config, num_tokens = prefill_config(), options.prefill_tokens
    report(f"prefill {short_name(dtype)}: choosing PyTorch's fastest form", 0)
    # The choice is made at a length where a run takes a second; it also warms everything up.
    probe = make_layer(config, min(4096, num_tokens), min(4096, num_tokens), dtype, options.seed, clustered=False)
    probe_calls = causal_dense_calls(probe)
    form = fastest(probe_calls, 3)
    probe_time = statistics.median(timed(probe_calls[form]) for _ in range(3))
    openmsa.msa_attention(probe.q, probe.k, probe.v, probe.q_idx["random"], probe.k_idx, config=config)
    projected = probe_time * (num_tokens / probe.q.shape[0]) ** 2
    skip_dense = projected > LONGEST_DENSE_SECONDS
    del probe_calls

    layer = make_layer(config, num_tokens, num_tokens, dtype, options.seed + 1, clustered=True)

    def pipeline(kind: str, **extras: bool) -> Any:
        return openmsa.msa_attention(layer.q, layer.k, layer.v, layer.q_idx[kind], layer.k_idx, config=config, **extras)

    calls: dict[str, Callable[[], Any]] = {kind: functools.partial(pipeline, kind) for kind in layer.q_idx}
    if not skip_dense:
        calls["dense"] = causal_dense_calls(layer)[form]
    report(f"prefill {short_name(dtype)}: {num_tokens:,} tokens, dense and MSA in turn", 0)
    times = in_turn(calls, options.repeats, report, WEIGHTS["prefill"])
    dense = None if skip_dense else statistics.median(times["dense"])
    rows = []
    for kind in layer.q_idx:
        ours = statistics.median(times[kind])
        out, block_ids = pipeline(kind, return_block_ids=True)
        details = {"ours_s": ours, "theirs_s": dense, "theirs_form": form, "times_ours_s": times[kind],
                   "times_theirs_s": times.get("dense"), "neighbour_union_4": neighbour_union(block_ids),
                   "sampled_error": worst_sampled_error(layer, config, block_ids, out)}
        if skip_dense:
            details["reason"] = (f"PyTorch's {short_name(dtype)} attention would take about {projected:,.0f} s a pass here "
                                 f"(projected from {probe.q.shape[0]:,} tokens); ours took {ours:.2f} s")
        rows.append(make_row(f"prefill_{short_name(dtype)}_{kind}",
                             f"prefill of {num_tokens:,} tokens, {short_name(dtype)}, {kind} selection: times faster than dense",
                             "x", PREFILL_BAR, PREFILL_EXCELLENT, None if skip_dense else dense / ours, options, **details))
    return rows


def matmul_calls(seed: int) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, float]]:
    """PyTorch's f32 matrix product in square, wide and thin shapes, and the FLOPs of each."""
    generator = torch.Generator().manual_seed(seed)
    calls, flops = {}, {}
    for m, n, k in ((512, 512, 512), (1024, 1024, 1024), (1536, 1536, 1536), (2048, 2048, 2048), (4096, 4096, 1024),
                    (1024, 1024, 4096), (8192, 512, 512), (512, 8192, 512), (2048, 2048, 128), (2048, 128, 2048)):
        a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
        out = torch.empty(m, n)
        name = f"[{m},{k}]x[{k},{n}]"
        calls[name] = lambda a=a, b=b, out=out: torch.mm(a, b, out=out)
        flops[name] = 2.0 * m * n * k
    return calls, flops


def bench_rates(options: Options, report: Report) -> list[dict[str, Any]]:
    report("rates: choosing PyTorch's fastest matmul shape", 0)
    candidates, flops_of = matmul_calls(options.seed)
    for call in candidates.values():
        call()
    probe = in_turn(candidates, 5, lambda *_: None, 0)
    shape = max(candidates, key=lambda name: flops_of[name] / statistics.median(probe[name]))
    inner = max(1, round(0.5 / min(probe[shape])))  # about half a second a sample, so that it sees the clocks we see

    def matmul() -> None:
        for _ in range(inner):
            candidates[shape]()

    yardstick = (shape, matmul, inner, flops_of[shape])
    return [row for dtype in options.dtypes for row in bench_rates_of(dtype, yardstick, options, report)]


def bench_rates_of(dtype: torch.dtype, yardstick: tuple[str, Callable[[], None], int, float], options: Options,
                   report: Report) -> list[dict[str, Any]]:
    shape, matmul, inner, matmul_flops = yardstick
    config, num_tokens = prefill_config(), options.prefill_tokens
    layer = make_layer(config, num_tokens, num_tokens, dtype, options.seed + 2, clustered=True)
    batch = openmsa.Batch.single(num_tokens)

    def attend(block_ids: torch.Tensor) -> torch.Tensor:
        return openmsa.sparse_attention(layer.q, layer.k, layer.v, block_ids, batch, config)

    calls: dict[str, Callable[[], Any]] = {
        "matmul": matmul, "score": lambda: openmsa.block_scores(layer.q_idx["random"], layer.k_idx, batch, config)}
    visible_pairs = num_tokens * (num_tokens + 1) // 2
    flops = {"matmul": inner * matmul_flops, "score": 2.0 * config.num_kv_heads * config.index_dim * visible_pairs}
    for kind, q_idx in layer.q_idx.items():
        ids = openmsa.index_select(q_idx, layer.k_idx, batch, config)
        calls[f"attend {kind}"] = functools.partial(attend, ids)
        flops[f"attend {kind}"] = 4.0 * config.group_size * config.head_dim * selected_pairs(ids, config.block_size)
    report(f"rates {short_name(dtype)}: {num_tokens:,} tokens, matmul, score and attend in turn", 0)
    times = in_turn(calls, options.repeats, report, WEIGHTS["rates"])
    rates = {name: flops[name] / statistics.median(times[name]) / 1e9 for name in calls}
    return [make_row(f"rate_{name.replace(' ', '_')}_{short_name(dtype)}",
                     f"{name}, {short_name(dtype)}: FLOP rate against PyTorch's f32 matmul", "%", RATE_BAR, RATE_EXCELLENT,
                     100 * rates[name] / rates["matmul"], options, ours_gflops=rates[name], theirs_gflops=rates["matmul"],
                     theirs_form=f"torch.mm {shape}", times_ours_s=times[name],
                     times_theirs_s=[t / inner for t in times["matmul"]])
            for name in list(calls)[1:]]


def bench_decode(options: Options, report: Report) -> list[dict[str, Any]]:
    config, num_keys = decode_config(), options.long_tokens
    sdpa = torch.nn.functional.scaled_dot_product_attention
    layer = make_layer(config, 1, num_keys, torch.bfloat16, options.seed + 3, clustered=False)
    batch = openmsa.Batch.single(1, num_keys)
    k, v = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (layer.k, layer.v))
    q_heads = layer.q.view(1, config.num_q_heads, 1, config.head_dim)
    # One query token sees every key, so the heads of a group may stand as rows of one query: PyTorch then reads K and V once.
    q_rows = layer.q.view(1, config.num_kv_heads, config.group_size, config.head_dim)
    dense = {"enable_gqa": lambda: sdpa(q_heads, k, v, enable_gqa=True), "group heads as query rows": lambda: sdpa(q_rows, k, v)}
    report(f"decode: {num_keys:,} tokens, choosing PyTorch's fastest form", 0)
    form = fastest(dense, 3)
    q_idx = layer.q_idx["random"]

    def ours() -> Any:
        return openmsa.msa_attention(layer.q, layer.k, layer.v, q_idx, layer.k_idx, batch, config)

    ours()
    report(f"decode: {num_keys:,} tokens, dense and MSA in turn", 0)
    times = in_turn({"dense": dense[form], "ours": ours}, max(options.repeats, 15), report, WEIGHTS["decode"])
    mine, theirs = statistics.median(times["ours"]), statistics.median(times["dense"])
    out, ids = openmsa.msa_attention(layer.q, layer.k, layer.v, q_idx, layer.k_idx, batch, config, return_block_ids=True)
    read_bytes = 2 * (num_keys * config.index_dim + 2 * config.num_kv_heads * config.top_k * config.block_size * config.head_dim)
    return [make_row("decode_bf16", f"decode over {num_keys:,} tokens, bf16: times faster than dense", "x", DECODE_BAR, None,
                     theirs / mine, options, ours_s=mine, theirs_s=theirs, theirs_form=form, times_ours_s=times["ours"],
                     times_theirs_s=times["dense"], ours_gb_per_s=read_bytes / mine / 1e9,
                     sampled_error=worst_sampled_error(layer, config, ids, out))]


def memory_child(num_tokens: int, threads: int, seed: int) -> None:
    """Runs in a fresh process and prints the resident bytes that index_select needed beyond its inputs and output, as JSON."""
    torch.set_num_threads(threads)
    config = decode_config()
    generator = torch.Generator().manual_seed(seed)
    q_idx = torch.empty(num_tokens, config.num_kv_heads, config.index_dim, dtype=torch.bfloat16).normal_(generator=generator)
    k_idx = torch.empty(num_tokens, config.index_dim, dtype=torch.bfloat16).normal_(generator=generator)
    batch = openmsa.Batch.single(num_tokens)
    small = openmsa.Batch.single(256)
    openmsa.index_select(q_idx[:256], k_idx[:256], small, config)  # threads, code and allocator pools are not scratch
    before = reset_peak_resident()
    start = time.perf_counter()
    block_ids = openmsa.index_select(q_idx, k_idx, batch, config)
    seconds = time.perf_counter() - start
    output_bytes = block_ids.numel() * block_ids.element_size()
    planned = openmsa._core.index_select_workspace_bytes(
        q_idx, k_idx, block_ids, batch.cu_seqlens_q, batch.cu_seqlens_k, None, None, None, batch.max_seqlen_q, batch.max_seqlen_k,
        config._sizes, None, "cpu", threads, False)
    print(json.dumps({"resident_extra_bytes": peak_resident() - before - output_bytes, "output_bytes": output_bytes,
                      "workspace_bytes": planned, "seconds": seconds}))


def resident_field(name: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def reset_peak_resident() -> int:
    """Makes the kernel forget the peak so far (Linux); returns the bytes resident now."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return resident_field("VmRSS")


def peak_resident() -> int:
    return resident_field("VmHWM")


def bench_memory(options: Options, report: Report) -> list[dict[str, Any]]:
    num_tokens = options.long_tokens
    what = f"index_select over {num_tokens:,} tokens, Hkv 4, bf16: peak memory beyond inputs and output"
    if not pathlib.Path("/proc/self/clear_refs").exists():
        return [make_row("memory_index_select", what, "MiB", MEMORY_BAR_MIB, None, None, options, lower_is_better=True,
                         reason="needs Linux's /proc/self/clear_refs to measure the peak of resident memory")]
    report(f"memory: index_select over {num_tokens:,} tokens in a process of its own", 0)
    code = (f"from openmsa import bench_cpu as b; "
            f"{simd_statement()}b.memory_child({num_tokens}, {torch.get_num_threads()}, {options.seed})")
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if child.returncode != 0:
        raise RuntimeError(f"the memory measurement failed: {child.stderr.strip().splitlines()[-1:]}")
    measured = json.loads(child.stdout.splitlines()[-1])
    report("", WEIGHTS["memory"])
    return [make_row("memory_index_select", what, "MiB", MEMORY_BAR_MIB, None, measured["resident_extra_bytes"] / 2**20, options,
                     lower_is_better=True, ours_s=measured["seconds"], output_bytes=measured["output_bytes"],
                     workspace_bytes=measured["workspace_bytes"])]


# --- SIMD targets ------------------------------------------------------------------------------------------------------------

# PyTorch and the libraries under it read these when they are loaded, so the process must be started with them.
AVX2_ENVIRONMENT = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
_simd_limit: str | None = None


def limit_simd(target: str) -> None:
    """Restricts our own run-time dispatch; PyTorch's share is AVX2_ENVIRONMENT."""
    global _simd_limit
    openmsa._core.limit_simd_target(target)
    _simd_limit = target


def simd_statement() -> str:
    return f"b.limit_simd({_simd_limit!r}); " if _simd_limit else ""


# --- the whole ---------------------------------------------------------------------------------------------------------------

def machine_facts() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    try:
        commit = subprocess.run(["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True,
                                text=True).stdout.strip() or None
    except OSError:
        commit = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "cpu": model, "cores": cores,
            "threads": torch.get_num_threads(), "simd_target": openmsa._core.simd_target(),
            "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__,
            "openmsa": openmsa.__version__, "git_commit": commit}


def busy_seconds() -> float | None:
    """Seconds that all processors of the machine have worked since it started, all processes together; None where Linux does not say."""
    try:
        fields = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


RUNNERS = {"prefill": bench_prefill, "rates": bench_rates, "decode": bench_decode, "memory": bench_memory}


def total_weight(options: Options) -> float:
    per_dtype = {"prefill", "rates"}
    return sum(WEIGHTS[s] * (len(options.dtypes) if s in per_dtype else 1) for s in options.sections)


def run_bench(options: Options, report: Report) -> dict[str, Any]:
    """Runs the chosen sections; the result holds the machine's facts, one row per bar, and how busy other programs kept the machine."""
    if options.threads:
        torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"benchmark": "cpu", "quick": options.quick, "repeats": options.repeats, **machine_facts()}
    busy, own, start = busy_seconds(), sum(os.times()[:4]), time.perf_counter()
    with torch.inference_mode():
        result["rows"] = [row for section in options.sections for row in RUNNERS[section](options, report)]
    if busy is not None:
        others = busy_seconds() - busy - (sum(os.times()[:4]) - own)
        result["other_load"] = max(0.0, others / (time.perf_counter() - start) / os.cpu_count())
    return result
