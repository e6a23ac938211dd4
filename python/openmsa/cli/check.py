"""`openmsa check`: every backend that runs here against the fp64 oracle, on shapes of the user's choice."""

import argparse
import dataclasses
import sys

from .common import (
    EXIT_FAILED,
    EXIT_OK,
    BadInputError,
    add_config_arguments,
    comma_ints,
    config_from,
    emit_json,
    no_gpu_reason,
    print_table,
    progress,
    torch_dtype,
    wants_tables,
)

HELP = "Check all available backends against the fp64 oracle on your shapes, by the rules of docs/numerics.md."
EXAMPLES = """\
  openmsa check                                        small default shapes, a few seconds
  openmsa check --seqlens 2049,127,1 --dtype bfloat16  a batch of three sequences
  openmsa check --num-q-heads 64 --num-kv-heads 4 --head-dim 128 --index-dim 128 --block-size 128 --top-k 16 --seqlens 8192
  openmsa check --seqlens-q 4,1 --seqlens-k 5000,129   four and one new tokens over cached keys (decode)
  openmsa check --backend cpu --json report.json
  openmsa check --backend cuda --block-size 128        the GPU kernels; without --backend they are checked where they can run

Sequences too long for the oracle are checked in windows of query tokens: both ends, a block border, and random places.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqlens", type=comma_ints, default=[700, 1, 129], metavar="N,N,...",
                        help="lengths of sequences with as many keys as queries (default: 700,1,129)")
    parser.add_argument("--seqlens-q", type=comma_ints, metavar="N,N,...", help="query lengths, when they differ from the keys'")
    parser.add_argument("--seqlens-k", type=comma_ints, metavar="N,N,...", help="key lengths, with --seqlens-q")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default=None,
                        help="storage dtype (default: float32, for the cuda backend bfloat16)")
    parser.add_argument("--backend", action="append", metavar="NAME", help="check only this backend; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random data")
    add_config_arguments(parser, num_q_heads=8, num_kv_heads=2, head_dim=64, index_dim=64, block_size=64, top_k=4,
                         num_init_blocks=0, num_local_blocks=1)


def lengths_from(args: argparse.Namespace) -> tuple[list[int], list[int]]:
    if args.seqlens_q is None and args.seqlens_k is None:
        return args.seqlens, args.seqlens
    if args.seqlens_q is None or args.seqlens_k is None or len(args.seqlens_q) != len(args.seqlens_k):
        raise BadInputError("--seqlens-q and --seqlens-k go together and need one length per sequence each, as in "
                            "--seqlens-q 4,1 --seqlens-k 5000,129")
    return args.seqlens_q, args.seqlens_k


def dtype_for(backend: str, args: argparse.Namespace) -> str:
    return args.dtype or ("bfloat16" if backend == "cuda" else "float32")


def backends_from(args: argparse.Namespace, config) -> tuple[list[str], dict[str, str]]:
    """(the backends to check, those left out with the reason). One that the user named and that cannot run is an error."""
    import openmsa
    from openmsa.info import why_unsupported

    infos = {info.backend: info for info in openmsa.list_backends()}
    # The oracle does not check itself unless asked: its own rows show only the rounding of its stores.
    names = args.backend or [name for name, info in infos.items() if info.available and name != "reference"]
    skipped = {}
    for name in names:
        if name not in infos:
            raise BadInputError(f"--backend: there is no '{name}'; this build knows {', '.join(infos)}")
        if not infos[name].available:
            raise BadInputError(f"--backend {name}: not available here: {infos[name].detail}")
        reason = (no_gpu_reason() or why_unsupported("cuda", dtype_for(name, args), config)) if name == "cuda" else ""
        if reason and args.backend:
            raise BadInputError(f"--backend cuda: {reason}")
        if reason:
            skipped[name] = reason
    return [name for name in names if name not in skipped], skipped


def run(args: argparse.Namespace) -> int:
    seqlens_q, seqlens_k = lengths_from(args)

    import torch

    from openmsa import checking

    config = config_from(args)
    backends, skipped = backends_from(args, config)
    dtypes = sorted({dtype_for(backend, args) for backend in backends})
    rows = []
    with torch.inference_mode(), progress(args, "making data", 4 * len(backends)) as bar:
        for dtype in dtypes:
            case = checking.make_case(config, seqlens_q, seqlens_k, torch_dtype(dtype), args.seed)
            exact = checking.make_case(config, seqlens_q, seqlens_k, torch_dtype(dtype), args.seed + 1, integers=True)
            for backend in backends:
                if dtype_for(backend, args) == dtype:
                    rows.extend(checking.check_backend(case, exact, backend, args.seed, lambda what: bar.step(f"done: {what}", 1)))
    failed = [row for row in rows if not row.passed]
    windows = checking.choose_windows(case, args.seed)
    checked = sum(window.end - window.begin for window in windows)

    if wants_tables(args):
        print_table("against the fp64 oracle", ["backend", "dtype", "keys", "stage", "rule", "measured", "allowed", ""],
                    [[r.backend, dtype_for(r.backend, args), r.layout, r.stage, r.rule, f"{r.measured:.3g}", f"{r.allowed:.3g}",
                      "[green]pass" if r.passed else "[bold red]FAIL"] for r in rows], right=(5, 6))
        print(f"{len(rows) - len(failed)} of {len(rows)} rules hold; {checked:,} of {sum(seqlens_q):,} query tokens were held "
              "against the oracle.")
        for name, reason in skipped.items():
            print(f"{name} was left out: {reason}.")
    emit_json(args, {
        "passed": not failed, "dtypes": {backend: dtype_for(backend, args) for backend in backends}, "skipped": skipped,
        "seqlens_q": seqlens_q, "seqlens_k": seqlens_k, "seed": args.seed,
        "config": dataclasses.asdict(config), "query_tokens": sum(seqlens_q), "query_tokens_checked": checked,
        "rows": [{**dataclasses.asdict(row), "passed": row.passed} for row in rows],
    })
    if failed:
        print(f"openmsa check: {len(failed)} of {len(rows)} rules failed", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK
