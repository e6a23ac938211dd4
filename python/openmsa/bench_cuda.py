"""The Hopper benchmark behind `openmsa bench --cuda`: OpenMSA against what PyTorch offers on the same GPU.

Rules it keeps: random data; medians of CUDA-event times; ours and theirs in turn within one process; PyTorch's layout changes are made
outside its timings; only FLOPs that the mask and the selection leave are counted. Decode steps are timed as replays of a CUDA graph
that walks as many layers as it takes for what one step selects to have left the L2 when it comes round again.
"""

# ruff: noqa: B023, F821 - every closure is called within the turn of the loop that makes it, before the turn frees its tensors
import datetime
import functools
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import openmsa

from .bench_common import causal_pairs, config, in_turn, index_queries, normal, row

SECTIONS = ("decode", "select", "score", "dense", "prefill", "flex", "workloads", "training")
L2_BYTES = 60 << 20
COPY_TB_PER_S = 4.3  # what a device-to-device copy reaches on an H200; the attend bar is a share of it
LONGEST_DENSE = 262144  # above it dense attention takes tens of seconds and is extrapolated by N^2


def graph_us(steps: list[Callable[[], Any]], repeats: int = 11) -> float:
    """Median microseconds of one step, the steps being captured one after another in one graph."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [step() for step in steps]  # outputs stay apart
    median = in_turn({"graph": graph.replay}, repeats)["graph"]
    del kept
    return median * 1000 / len(steps)


def dense_calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """PyTorch's causal attention by cuDNN and by its flash kernel, on contiguous [1, H, N, D]."""
    heads = [x.transpose(0, 1).unsqueeze(0).contiguous() for x in (q, k, v)]

    def run(backend: SDPBackend) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)

    return {"cudnn": lambda: run(SDPBackend.CUDNN_ATTENTION), "flash": lambda: run(SDPBackend.FLASH_ATTENTION)}


def bench_select(quick: bool) -> list[dict[str, Any]]:
    rows = []
    cfg = openmsa.MsaConfig(num_q_heads=1, num_kv_heads=1, head_dim=128, index_dim=128)
    for count, width, bar in ((131072, 1024, True), (65536, 4096, False), (32768, 8192, False)):
        scores = torch.randn(count, 1, width, device="cuda")
        # Every query stands behind all blocks, so that the whole row is ranked as torch.topk ranks it.
        batch = openmsa.Batch.packed([count], [width * 128], q_start=[width * 128 - 1]).to("cuda")
        times = in_turn({"ours": functools.partial(openmsa.select_blocks, scores, batch, cfg),
                         "topk": functools.partial(torch.topk, scores, 16)}, 15)
        rows.append(row(f"select_{count}x{width}", f"select {count:,} x {width:,}, k 16: times faster than torch.topk", "x",
                        times["topk"] / times["ours"], 8 if bar else None, 25 if bar else None, ours_ms=times["ours"],
                        theirs_ms=times["topk"], tb_per_s=scores.numel() * 4 / times["ours"] / 1e9))
        del scores
    return rows


def bench_score(quick: bool) -> list[dict[str, Any]]:
    rows, cfg = [], config()
    for queries, keys in ((16384, 16384), (16384, 65536), (16384, 131072), (16384, 1048576)):
        q_idx, k_idx = index_queries(queries, cfg, False), normal(keys, 128, seed=1)
        batch = openmsa.Batch.single(queries, keys, device="cuda")
        times = in_turn({"score": lambda: openmsa.block_scores(q_idx, k_idx, batch, cfg),
                         "both": lambda: openmsa.index_select(q_idx, k_idx, batch, cfg)}, 9)
        flops = 2 * 4 * 128 * causal_pairs(queries, keys)
        bar = keys >= 65536
        rows.append(row(f"score_{keys}", f"score, {queries:,} queries at {keys:,} keys", "TF", flops / times["score"] / 1e9,
                        560 if bar else None, 680 if bar else None, ours_ms=times["score"], index_select_ms=times["both"]))
    return rows


def bench_dense(quick: bool) -> list[dict[str, Any]]:
    rows, cfg = [], config()
    for tokens in (8192, 32768, 131072) if not quick else (8192,):
        q, k, v = normal(tokens, 64, 128), normal(tokens, 4, 128, seed=1), normal(tokens, 4, 128, seed=2)
        batch = openmsa.Batch.single(tokens, device="cuda")
        calls = {"ours": lambda: openmsa.dense_attention(q, k, v, batch, cfg), **dense_calls(q, k, v)}
        times = in_turn(calls, 7 if tokens < 65536 else 3)
        flops = 4 * 64 * 128 * causal_pairs(tokens, tokens)
        bar = tokens >= 32768
        rows.append(row(f"dense_{tokens}", f"dense attention, {tokens:,} tokens", "TF", flops / times["ours"] / 1e9,
                        620 if bar else None, 690 if bar else None, ours_ms=times["ours"], cudnn_ms=times["cudnn"], flash_ms=times["flash"],
                        cudnn_tf=flops / times["cudnn"] / 1e9))
    return rows


# (good, excellent) by tokens and whether the selections are clustered
PREFILL_BARS = {65536: {False: (5.5, 7), True: (5.5, 9)}, 131072: {False: (10, 12), True: (10, 15)},
                1048576: {False: (22, 30), True: (22, 31)}}


def bench_prefill(quick: bool) -> list[dict[str, Any]]:
    rows, cfg = [], config()
    dense: dict[int, float] = {}
    for tokens in (8192, 16384, 32768, 65536) if quick else (8192, 16384, 32768, 65536, 131072, 262144, 1048576):
        q, k, v = normal(tokens, 64, 128), normal(tokens, 4, 128, seed=1), normal(tokens, 4, 128, seed=2)
        k_idx = normal(tokens, 128, seed=3)
        batch = openmsa.Batch.single(tokens, device="cuda")
        repeats = 9 if tokens <= 65536 else 5 if tokens <= 131072 else 3
        for clustered in (False, True):
            q_idx = index_queries(tokens, cfg, clustered, seed=4)
            ids = openmsa.index_select(q_idx, k_idx, batch, cfg)
            calls: dict[str, Callable[[], Any]] = {
                "ours": lambda: openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, cfg),
                "index_select": lambda: openmsa.index_select(q_idx, k_idx, batch, cfg),
                "attend": lambda: openmsa.sparse_attention(q, k, v, ids, batch, cfg, trust_indices=True),
            }
            # Dense attention does not care how selections are clustered, so it takes its turns once.
            if tokens <= LONGEST_DENSE and tokens not in dense:
                calls["cudnn"] = dense_calls(q, k, v)["cudnn"]
            times = in_turn(calls, repeats)
            note = ""
            if "cudnn" in times:
                dense[tokens] = times["cudnn"]
            elif tokens not in dense:
                dense[tokens] = dense[LONGEST_DENSE] * (tokens / LONGEST_DENSE) ** 2
            if tokens > LONGEST_DENSE:
                note = f"dense extrapolated by N^2 from {LONGEST_DENSE:,}"
            times["cudnn"] = dense[tokens]
            good, excellent = PREFILL_BARS.get(tokens, {}).get(clustered, (None, None))
            if tokens == 8192:
                good = 1 / 1.2
            live = (ids >= 0).sum().item()
            kind = "clustered" if clustered else "random"
            rows.append(row(f"prefill_{tokens}_{kind}", f"whole prefill, {tokens:,} tokens, {kind}: times faster than cuDNN dense", "x",
                            times["cudnn"] / times["ours"], good, excellent, ours_ms=times["ours"], theirs_ms=times["cudnn"],
                            index_select_ms=times["index_select"], attend_ms=times["attend"], note=note))
            if not clustered and tokens in (65536, 131072):
                # Q gather + partial write + combine read, 4 KiB each, per (token, group, block).
                share = live * 3 * 4096 / times["attend"] / 1e9 / COPY_TB_PER_S * 100
                rows.append(row(f"attend_{tokens}", f"attend, {tokens:,} tokens, random: share of {COPY_TB_PER_S} TB/s", "%", share, 75, 92,
                                ours_ms=times["attend"], tf=live * 16 * 128 * 128 * 4 / times["attend"] / 1e9))
            del q_idx, ids
        del q, k, v, k_idx
        torch.cuda.empty_cache()
    return rows


def decode_inputs(batch_size: int, keys: list[int], queries: int, cfg: openmsa.MsaConfig, seed: int) -> tuple:
    """One layer's tensors with paged caches, pages in shuffled order."""
    num_blocks = [-(-n // 128) for n in keys]
    order = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(seed), dtype=torch.int64).int()
    table = torch.zeros(batch_size, max(num_blocks), dtype=torch.int32)
    first = 0
    for s, n in enumerate(num_blocks):
        table[s, :n] = order[first : first + n]
        first += n
    batch = openmsa.Batch(cu_seqlens_q=(torch.arange(batch_size + 1, dtype=torch.int32) * queries).cuda(),
                          seqlens_k=torch.tensor(keys, dtype=torch.int32).cuda(), page_table=table.cuda(),
                          max_seqlen_q=queries, max_seqlen_k=max(keys))
    total = batch_size * queries
    return (normal(total, cfg.num_q_heads, 128, seed=seed), normal(first, cfg.num_kv_heads, 128, 128, seed=seed + 1),
            normal(first, cfg.num_kv_heads, 128, 128, seed=seed + 2), normal(total, cfg.num_kv_heads, 128, seed=seed + 3),
            normal(first, 128, 128, seed=seed + 4), batch)


def decode_layers(keys: list[int], queries: int, cfg: openmsa.MsaConfig) -> list[tuple]:
    """Layers whose selected keys and values are three times the L2 together, or what 60% of the free memory holds. Index keys do not
    count: 268 MB of them between two uses left part of 33 MB of keys and values in the L2 (77 us a step instead of 81)."""
    selected = sum(min(cfg.top_k * 128, n) for n in keys) * cfg.num_kv_heads * 128 * 4
    layer_bytes = sum(keys) * (cfg.num_kv_heads * 4 + 2) * 128
    count = min(-(-3 * L2_BYTES // selected), int(0.6 * torch.cuda.mem_get_info()[0]) // layer_bytes)
    return [decode_inputs(len(keys), keys, queries, cfg, 10 * i) for i in range(max(1, count))]


def decode_step_us(keys: list[int], cfg: openmsa.MsaConfig) -> dict[str, float]:
    layers = decode_layers(keys, 1, cfg)
    rounds = max(1, 16 // len(layers))
    steps = [lambda x=x: openmsa.msa_attention(*x, cfg) for x in layers] * rounds
    ids = [openmsa.index_select(x[3], x[4], x[5], cfg) for x in layers]
    return {"step": graph_us(steps),
            "index_select": graph_us([lambda x=x: openmsa.index_select(x[3], x[4], x[5], cfg) for x in layers] * rounds),
            "attend": graph_us([lambda x=x, i=i: openmsa.sparse_decode(*x[:3], i, x[5], cfg) for x, i in zip(layers, ids)] * rounds)}


def dense_decode_us(batch_size: int, keys: int) -> float:
    copies = max(1, min(4, -(-3 * L2_BYTES // (batch_size * keys * 2048))))
    data = [(normal(batch_size, 64, 1, 128, seed=i), normal(batch_size, 4, keys, 128, seed=i + 1),
             normal(batch_size, 4, keys, 128, seed=i + 2)) for i in range(copies)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return graph_us([lambda x=x: run(*x) for x in data] * max(1, 8 // copies))


@functools.cache  # rows of the table share batch sizes
def cache_write_us(num_tokens: int, cfg: openmsa.MsaConfig) -> dict[str, float]:
    """Storing a step's new rows in the pages, in a graph: write_pages, and the three index_put that PyTorch would take."""
    rows = [normal(num_tokens, *heads, 128, seed=i) for i, heads in enumerate(((cfg.num_kv_heads,), (cfg.num_kv_heads,), ()))]
    slots = torch.randperm(4 * num_tokens * 128, generator=torch.Generator().manual_seed(3))[:num_tokens].cuda()
    shapes = [(4 * num_tokens, *heads, 128, 128) for heads in ((cfg.num_kv_heads,), (cfg.num_kv_heads,), ())]
    ours, theirs = ([torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes] for _ in range(2))

    page, place = slots // 128, slots % 128

    def index_put() -> None:
        for pool, x in zip(theirs, rows):
            (pool if pool.ndim == 3 else pool.transpose(1, 2))[page, place] = x

    times = {"write": graph_us([lambda: openmsa.write_pages(*rows, slots, *ours)] * 32), "index_put": graph_us([index_put] * 32)}
    if not all(map(torch.equal, ours, theirs)):
        raise openmsa.Error("write_pages and index_put left different pages")
    return times


def bench_decode(quick: bool) -> list[dict[str, Any]]:
    rows, cfg = [], config()
    cases = [(131072, 1, 22, 15), (131072, 8, 84, 76), (1048576, 1, 100, 80), (1048576, 4, 270, 262), (32768, 32, None, None),
             (8192, 1, None, None)]
    for keys, batch_size, good, excellent in cases[:2] if quick else cases:
        ours = decode_step_us([keys] * batch_size, cfg)
        theirs = dense_decode_us(batch_size, keys)
        write = cache_write_us(batch_size, cfg)
        rows.append(row(f"decode_{keys}_b{batch_size}", f"decode at {keys:,} keys, batch {batch_size}, graph", "us", ours["step"], good,
                        excellent, lower_is_better=True, cudnn_us=theirs, index_select_us=ours["index_select"], attend_us=ours["attend"],
                        write_us=write["write"], index_put_us=write["index_put"]))
        torch.cuda.empty_cache()
    return rows


def bench_flex(quick: bool) -> list[dict[str, Any]]:
    """FlexAttention with the same per-token, per-group block lists as its mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows, cfg = [], config()
    for tokens in (8192,) if quick else (8192, 32768):
        q, k, v = normal(tokens, 64, 128), normal(tokens, 4, 128, seed=1), normal(tokens, 4, 128, seed=2)
        q_idx, k_idx = index_queries(tokens, cfg, True, seed=4), normal(tokens, 128, seed=3)
        batch = openmsa.Batch.single(tokens, device="cuda")
        ids = openmsa.index_select(q_idx, k_idx, batch, cfg)
        chosen = torch.zeros(4, tokens, tokens // 128 + 1, dtype=torch.bool, device="cuda")
        chosen.scatter_(2, torch.where(ids < 0, tokens // 128, ids).transpose(0, 1).long(), True)

        def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (j <= i) & chosen[h // 16, i, j // 128]

        flex = torch.compile(flex_attention)
        block_mask = create_block_mask(mask, None, 64, tokens, tokens, device="cuda", _compile=True)
        heads = [x.transpose(0, 1).unsqueeze(0).contiguous() for x in (q, k, v)]
        times = in_turn({"ours": lambda: openmsa.sparse_attention(q, k, v, ids, batch, cfg),
                         "flex": lambda: flex(*heads, block_mask=block_mask, enable_gqa=True)}, 5)
        rows.append(row(f"flex_{tokens}", f"attend, {tokens:,} tokens, clustered: times faster than FlexAttention with the same lists", "x",
                        times["flex"] / times["ours"], ours_ms=times["ours"], theirs_ms=times["flex"]))
        del chosen, block_mask
        torch.cuda.empty_cache()
    return rows


def workload_ms(kind: str, case: dict[str, Any], cfg: openmsa.MsaConfig) -> float:
    if kind == "decode":
        layers = decode_layers(case["kv_lens"], case["queries_per_request"], cfg)
        return graph_us([lambda x=x: openmsa.msa_attention(*x, cfg) for x in layers] * max(1, 4 // len(layers)), 5) / 1000
    queries, keys = case["query_lens"], [p + n for p, n in zip(case["prefix_lens"], case["query_lens"])]
    x = decode_inputs(len(keys), keys, 1, cfg, 0)
    starts = torch.tensor([0, *queries]).cumsum(0).int().cuda()
    batch = openmsa.Batch(cu_seqlens_q=starts, seqlens_k=x[5].seqlens_k, page_table=x[5].page_table, max_seqlen_q=max(queries),
                          max_seqlen_k=max(keys))
    q, q_idx = normal(sum(queries), 64, 128), index_queries(sum(queries), cfg, True)
    return in_turn({"ours": lambda: openmsa.msa_attention(q, x[1], x[2], q_idx, x[4], batch, cfg)}, 5)["ours"]


def bench_workloads(quick: bool, cases: dict[str, list[dict[str, Any]]] | None = None) -> list[dict[str, Any]]:
    """The weighted production shapes; `cases` as in the workload files: {"prefill": [...], "decode": [...]}."""
    rows, cfg = [], config()
    if not cases:
        return [row("workloads", "real workloads: no case file given (--workloads DIR)", "ms", None)]
    for kind in ("prefill", "decode"):
        total = weight_sum = 0.0
        worst: tuple[float, str] = (0.0, "")
        chosen = [c for c in cases[kind] if c["weight"] > 0]
        if quick:
            chosen = sorted(chosen, key=lambda c: -c["weight"])[:6]
        for case in chosen:
            ms = workload_ms(kind, case, cfg)
            total += case["weight"] * ms
            weight_sum += case["weight"]
            worst = max(worst, (ms * case["weight"], case["name"]))
            torch.cuda.empty_cache()
        rows.append(row(f"workload_{kind}", f"{len(chosen)} weighted production {kind} shapes: mean time of a layer call", "ms",
                        total / weight_sum, lower_is_better=True, weight=weight_sum, largest_share=worst[1]))
    return rows


RUNNERS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "select": bench_select, "score": bench_score, "dense": bench_dense, "prefill": bench_prefill, "decode": bench_decode,
    "flex": bench_flex, "workloads": bench_workloads,
}


def run_bench(sections: tuple[str, ...] = SECTIONS, quick: bool = False, workloads: dict | None = None,
              report: Callable[[str], None] = lambda _: None, training_budget_s: float = 100.0) -> dict[str, Any]:
    """`workloads`: {"prefill": cases, "decode": cases, "training_packs": packs}, as the workload files have them."""
    from . import bench_training

    rows = []
    for name in sections:
        report(name)
        # Tensors made in inference mode could not be trained on.
        with torch.inference_mode(name != "training"):
            if name == "training":
                options = bench_training.Options.quick if quick else bench_training.Options
                rows += bench_training.bench_training(options(packs=(workloads or {}).get("training_packs"), budget_s=training_budget_s))
            else:
                rows += RUNNERS[name](quick, workloads) if name == "workloads" else RUNNERS[name](quick)
            openmsa.synchronize("cuda")
            torch.cuda.empty_cache()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or None
    return {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "openmsa": openmsa.__version__, "git_commit": commit,
            "quick": quick, "rows": rows}
