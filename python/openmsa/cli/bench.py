"""`openmsa bench`: the acceptance benchmark, as a table with bars and a JSON file."""

import argparse
import datetime
import os
import pathlib
import sys

from .common import EXIT_FAILED, EXIT_OK, BadInputError, emit_json, note, positive_int, print_table, progress, wants_tables

HELP = "Measure OpenMSA against PyTorch in one process and print each bar with what was measured."
EXAMPLES = """\
  openmsa bench --cpu                             all bars; several minutes; writes bench/results/cpu-<date>.json
  openmsa bench --cpu --quick                     small sizes, under a minute; its numbers are not the bars
  openmsa bench --cpu --only prefill --dtype f32  one part of it
  openmsa bench --cpu --simd avx2                 as on a machine without AVX-512 (ours and PyTorch's code alike)
  openmsa bench --cpu --json result.json          write the JSON elsewhere
  openmsa bench --cuda                            the Hopper kernels, 8K to 1M tokens; some minutes on an H200
  openmsa bench --cuda --only training --budget 60
                                                  forward, backward and index KL loss, in about a minute
"""
SECTIONS = ("prefill", "rates", "decode", "memory")
MOST_OTHER_LOAD = 0.05  # share of the processors that other programs may take before we say so


def add_arguments(parser: argparse.ArgumentParser) -> None:
    side = parser.add_mutually_exclusive_group(required=True)
    side.add_argument("--cpu", action="store_true", help="the CPU engine against PyTorch on the CPU")
    side.add_argument("--cuda", action="store_true", help="the Hopper kernels against cuDNN, flash, FlexAttention and torch.topk")
    parser.add_argument("--quick", action="store_true", help="small sizes to see that everything runs; not the bars")
    parser.add_argument("--only", metavar="PARTS", default=",".join(SECTIONS), help="comma-separated parts to run")
    parser.add_argument("--dtype", choices=("f32", "bf16", "both"), default="both", help="storage dtype of prefill and rates")
    parser.add_argument("--repeats", type=positive_int, default=3, metavar="N", help="runs of each call; the median counts")
    parser.add_argument("--threads", type=positive_int, default=None, metavar="N", help="threads for both sides")
    parser.add_argument("--simd", choices=("best", "avx2"), default="best", help="instruction set both sides may use")
    parser.add_argument("--workloads", metavar="DIR", help="with --cuda: folder with prefill.json and decode.json, shapes to weigh, and "
                                                         "training_packs.json")
    parser.add_argument("--budget", type=positive_int, default=100, metavar="SECONDS",
                        help="with --cuda: what the training part may take; it leaves out its longest cases first")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random data")


def default_json_path(side: str = "cpu") -> str:
    """Inside a checkout the results folder, elsewhere the current folder."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H%M%SZ")
    folder = pathlib.Path("bench/results") if pathlib.Path("bench").is_dir() else pathlib.Path()
    return str(folder / f"{side}-{stamp}.json")


def restart_with_avx2(environment: dict[str, str]) -> None:
    """PyTorch reads its limits while it is loaded, which importing openmsa has already done: start over, once."""
    if all(os.environ.get(name) == value for name, value in environment.items()):
        return
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "openmsa", *sys.argv[1:]], {**os.environ, **environment})


def format_measured(row: dict) -> str:
    if row["measured"] is None:
        return "-"
    digits = {"x": 2, "%": 0, "MiB": 0}[row["unit"]]
    return f"{row['measured']:.{digits}f} {row['unit']}"


def format_details(row: dict) -> str:
    if "reason" in row:
        return row["reason"]
    if "theirs_gflops" in row:
        return f"{row['ours_gflops']:.0f} of {row['theirs_gflops']:.0f} GFLOP/s ({row['theirs_form']})"
    if "theirs_s" in row:
        text = f"{row['ours_s'] * 1e3:,.1f} ms against {row['theirs_s'] * 1e3:,.1f} ms ({row['theirs_form']})"
        if "neighbour_union_4" in row:
            text += f"; 4 neighbours choose {row['neighbour_union_4']:.2f}x the blocks of one"
        return text
    return f"planned scratch {row['workspace_bytes'] / 2**20:.1f} MiB; took {row['ours_s']:.1f} s"


COLOURS = {"excellent": "[bold green]", "met": "[green]", "missed": "[bold red]", "skipped": "[yellow]"}


CUDA_COLOURS = {"excellent": "[bold green]", "good": "[green]", "missed": "[bold red]", "skipped": "[yellow]", "measured": ""}


def run_cuda(args: argparse.Namespace) -> int:
    """The same for a GPU; its parts are those of openmsa.bench_cuda."""
    import json

    import openmsa

    gpu = {row.backend: row for row in openmsa.list_backends()}["cuda"]
    if not gpu.available:
        raise BadInputError(f"--cuda: no GPU can be used: {gpu.detail}")
    from openmsa import bench_cuda

    sections = bench_cuda.SECTIONS if args.only == ",".join(SECTIONS) else tuple(p.strip() for p in args.only.split(",") if p.strip())
    unknown = [part for part in sections if part not in bench_cuda.SECTIONS]
    if unknown or not sections:
        raise BadInputError(f"--only: '{args.only}' has no such part; with --cuda they are {', '.join(bench_cuda.SECTIONS)}")
    workloads = None
    if args.workloads:
        fields = {"prefill": "cases", "decode": "cases"} if "workloads" in sections else {}
        if "training" in sections and (pathlib.Path(args.workloads) / "training_packs.json").is_file():
            fields["training_packs"] = "packs"
        files = {kind: pathlib.Path(args.workloads) / f"{kind}.json" for kind in fields}
        missing = [str(path) for path in files.values() if not path.is_file()]
        if missing:
            raise BadInputError(f"--workloads: {missing[0]} is not a file")
        workloads = {kind: json.loads(path.read_text(encoding="utf-8"))[fields[kind]] for kind, path in files.items()}
    with progress(args, "benchmark", len(sections)) as bar:
        started: list[str] = []

        def report(name: str) -> None:
            bar.step(name, 1 if started else 0)
            started.append(name)

        result = bench_cuda.run_bench(sections, args.quick, workloads, report, args.budget)
    result["command"] = "openmsa " + " ".join(sys.argv[1:])
    if wants_tables(args):
        print(f"{result['gpu']}, PyTorch {result['torch']}, cuDNN {result['cudnn']}, OpenMSA {result['openmsa']}, {result['date']}")
        rows = []
        for row in result["rows"]:
            sign = "<=" if row["lower_is_better"] else ">="
            bars = ["" if bar is None else f"{sign} {bar:.3g} {row['unit']}" for bar in (row["good"], row["excellent"])]
            measured = "-" if row["measured"] is None else f"{row['measured']:.4g} {row['unit']}"
            rows.append([row["what"], *bars, measured, CUDA_COLOURS[row["verdict"]] + row["verdict"]])
        print_table("OpenMSA on the GPU" + (" - quick sizes" if args.quick else ""), ["what", "good", "excellent", "measured", "verdict"],
                    rows, right=(1, 2, 3))
    if args.json is None:
        args.json = default_json_path("cuda")
    emit_json(args, result)
    if args.json != "-":
        note(args, f"wrote {args.json}")
    return EXIT_FAILED if any(row["verdict"] == "missed" for row in result["rows"]) else EXIT_OK


def run(args: argparse.Namespace) -> int:
    if args.cuda:
        return run_cuda(args)
    sections = tuple(part.strip() for part in args.only.split(",") if part.strip())
    unknown = [part for part in sections if part not in SECTIONS]
    if unknown or not sections:
        raise BadInputError(f"--only: '{args.only}' has no part '{''.join(unknown[:1])}'; the parts are {', '.join(SECTIONS)}")

    import torch

    from openmsa import bench_cpu

    if args.simd == "avx2":
        restart_with_avx2(bench_cpu.AVX2_ENVIRONMENT)
        bench_cpu.limit_simd("avx2")
    dtypes = {"f32": (torch.float32,), "bf16": (torch.bfloat16,), "both": (torch.float32, torch.bfloat16)}[args.dtype]
    options = bench_cpu.Options(sections=sections, dtypes=dtypes, quick=args.quick, repeats=args.repeats,
                                threads=args.threads or 0, seed=args.seed)
    with progress(args, "benchmark", bench_cpu.total_weight(options)) as bar:
        text = "benchmark"

        def report(what: str, weight: float) -> None:
            nonlocal text
            text = what or text
            bar.step(text, weight)

        result = bench_cpu.run_bench(options, report)
    result["command"] = "openmsa " + " ".join(sys.argv[1:])
    result["simd"] = args.simd

    if wants_tables(args):
        print(f"{result['cpu']}, {result['threads']} threads, SIMD {result['simd_target']} (PyTorch {result['torch']}: "
              f"{result['torch_cpu_capability']}), OpenMSA {result['openmsa']}, {result['date']}")
        title = "OpenMSA against PyTorch on the CPU"
        if args.quick:
            title += " - quick sizes, NOT the bars"
        rows = []
        for row in result["rows"]:
            goal = f"{'<=' if row['unit'] == 'MiB' else '>='} {row['bar']:g} {row['unit']}"
            excellent = "" if row["excellent"] is None else f"{row['excellent']:g} {row['unit']}"
            rows.append([row["what"], goal, excellent, format_measured(row),
                         COLOURS.get(row["verdict"], "") + row["verdict"], format_details(row)])
        print_table(title, ["what", "bar", "excellent", "measured", "verdict", "detail"], rows, right=(1, 2, 3))
    if result.get("other_load", 0) > MOST_OTHER_LOAD:
        note(args, f"note: other programs kept the processors {100 * result['other_load']:.0f}% busy meanwhile; on a quiet machine both "
                   "sides are faster and the medians steadier")
    if args.json is None:
        args.json = default_json_path()
    emit_json(args, result)
    if args.json != "-":
        note(args, f"wrote {args.json}")
    return EXIT_FAILED if any(row["verdict"] == "missed" for row in result["rows"]) else EXIT_OK
