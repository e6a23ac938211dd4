"""`openmsa info`: version, backends, kernels."""

import argparse
import os
import platform

from .common import EXIT_OK, emit_json, print_table, wants_tables

HELP = "Show the version, the backends with the reason when one cannot run, and the kernels with what they support."
EXAMPLES = """\
  openmsa info
  openmsa info --json                 the same for a program or a bug report
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # only the common options


def collect() -> dict:
    import torch

    import openmsa

    return {
        "version": openmsa.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "simd_target": openmsa._core.simd_target(),
        "backends": [
            {"name": b.backend, "compiled": b.compiled, "available": b.available, "detail": b.detail}
            for b in openmsa.list_backends()
        ],
        "kernels": [
            {"stage": k.stage, "backend": k.backend, "name": k.name, "supports": k.supports} for k in openmsa.list_kernels()
        ],
    }


def run(args: argparse.Namespace) -> int:
    facts = collect()
    if wants_tables(args):
        print(f"openmsa {facts['version']} | Python {facts['python']}, PyTorch {facts['torch']} | {facts['machine']}, "
              f"{facts['processors']} processors, {facts['threads']} threads, SIMD {facts['simd_target']}\n")
        rows = [[b["name"], "yes" if b["available"] else "no" if b["compiled"] else "not in this build", b["detail"]]
                for b in facts["backends"]]
        print_table("backends", ["name", "available", "detail"], rows)
        rows = [[k["stage"], k["backend"], k["name"], k["supports"]] for k in facts["kernels"]]
        print_table("kernels", ["stage", "backend", "kernel", "supports"], rows)
    emit_json(args, facts)
    return EXIT_OK
