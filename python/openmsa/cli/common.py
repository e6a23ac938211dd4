"""What every subcommand shares: exit codes, clean errors, JSON output, tables, progress bars, and options for MSA sizes."""

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2


class BadInputError(Exception):
    """The user's input cannot be used; the text says what was found and how to mend it. Exit code 2."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions and examples, and appends defaults to option texts."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=110)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        if text and action.option_strings and "(default" not in text and action.nargs != 0 \
                and action.default not in (None, argparse.SUPPRESS):
            text += " (default: %(default)s)"
        return text


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", nargs="?", const="-", metavar="PATH", default=None,
                       help="write the result as JSON to PATH; without PATH, to standard output in place of the tables")
    group.add_argument("--quiet", action="store_true", help="no progress bars")
    group.add_argument("--debug", action="store_true", help="on an error show the whole traceback")


def describe_failure(error: Exception) -> tuple[int, str]:
    """Exit code and one paragraph for an error that reached the top."""
    import openmsa

    if isinstance(error, (openmsa.InvalidArgumentError, openmsa.UnsupportedError)):
        return EXIT_BAD_INPUT, str(error)
    if isinstance(error, (BadInputError, FileNotFoundError, IsADirectoryError, PermissionError)):
        return EXIT_BAD_INPUT, str(error)
    if isinstance(error, openmsa.Error):
        return EXIT_FAILED, str(error)
    text = " ".join(str(error).split()) or "no further text"
    return EXIT_FAILED, f"{type(error).__name__}: {text} (run again with --debug for the traceback)"


def emit_json(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes the result where --json says; does nothing without --json."""
    if args.json is None:
        return
    text = json.dumps(_plain(result), indent=2, allow_nan=False)
    if args.json == "-":
        print(text)
        return
    path = pathlib.Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN; they become the strings "inf", "-inf" and "nan"."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def wants_tables(args: argparse.Namespace) -> bool:
    return args.json != "-"


def print_table(title: str, columns: list[str], rows: list[list[str]], right: tuple[int, ...] = ()) -> None:
    """A table on standard output; `right` lists the right-aligned columns. A cell may start with a rich style, "[green]met"."""
    if not sys.stdout.isatty():
        # Files and pipes get every row on one line, however wide, so that it can be searched.
        _print_plain_table(title, columns, [[_STYLE.sub("", cell) for cell in row] for row in rows], right)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        # Names stay whole on narrow terminals; sentences wrap.
        is_short = max(len(_STYLE.sub("", row[index])) for row in [columns, *rows]) <= 22
        table.add_column(column, justify="right" if index in right else "left", overflow="fold", no_wrap=is_short)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


_STYLE = re.compile(r"^\[[a-z ]+\]")


def _print_plain_table(title: str, columns: list[str], rows: list[list[str]], right: tuple[int, ...]) -> None:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    lines.insert(1, ["-" * width for width in widths])
    print(title)
    for line in lines:
        cells = [cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True))]
        print(("  " + "  ".join(cells)).rstrip())
    print()


def note(args: argparse.Namespace, text: str) -> None:
    """A line for people, on standard error so that standard output stays clean."""
    if not args.quiet:
        print(text, file=sys.stderr, flush=True)


class _SilentProgress:
    def step(self, text: str, advance: float = 0) -> None:
        pass


class _RichProgress:
    def __init__(self, bar, task):
        self._bar, self._task = bar, task

    def step(self, text: str, advance: float = 0) -> None:
        self._bar.update(self._task, description=text, advance=advance)


@contextlib.contextmanager
def progress(args: argparse.Namespace, text: str, total: float | None) -> Iterator[Any]:
    """A progress bar on standard error; silent with --quiet or when standard error is not a terminal. total None: unknown."""
    if args.quiet or not sys.stderr.isatty():
        yield _SilentProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
                   console=Console(stderr=True), transient=True)
    with bar:
        yield _RichProgress(bar, bar.add_task(text, total=total))


def comma_ints(text: str) -> list[int]:
    """'2049,128' -> [2049, 128], for argparse."""
    try:
        values = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a comma-separated list of whole numbers") from None
    if any(value < 0 for value in values):
        raise argparse.ArgumentTypeError(f"'{text}' holds a negative number")
    return values


def positive_int(text: str) -> int:
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def add_config_arguments(parser: argparse.ArgumentParser, **defaults: int) -> None:
    group = parser.add_argument_group("sizes of the layer")
    for name, text in (("num_q_heads", "query heads, Hq"), ("num_kv_heads", "key/value heads, Hkv; divides Hq"),
                       ("head_dim", "width of a head, D"), ("index_dim", "width of an index head, Di"),
                       ("block_size", "tokens in a block, Bk"), ("top_k", "blocks kept per query token and group, k"),
                       ("num_init_blocks", "first blocks always kept"),
                       ("num_local_blocks", "last blocks up to the query's own always kept")):
        group.add_argument("--" + name.replace("_", "-"), type=int, default=defaults[name], metavar="N", help=text)


def config_from(args: argparse.Namespace):
    import openmsa

    return openmsa.MsaConfig(num_q_heads=args.num_q_heads, num_kv_heads=args.num_kv_heads, head_dim=args.head_dim,
                             index_dim=args.index_dim, block_size=args.block_size, top_k=args.top_k,
                             num_init_blocks=args.num_init_blocks, num_local_blocks=args.num_local_blocks)


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="where to run; auto takes a GPU that the kernels can use, else the CPU")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a model runs, and in which dtype."""

    device: str
    dtype: str
    note: str = ""  # why not on the GPU that is there

    @property
    def name(self) -> str:
        """For reports: "CPU", "NVIDIA H200"."""
        if self.device == "cpu":
            return "CPU"
        import torch

        return torch.cuda.get_device_name()


def no_gpu_reason() -> str:
    """Why no GPU can be used here; empty if one can."""
    import torch

    import openmsa

    gpu = {row.backend: row for row in openmsa.list_backends()}["cuda"]
    if not gpu.available:
        return gpu.detail
    return "" if torch.cuda.is_available() else f"PyTorch {torch.__version__} sees no GPU; install a build of it with CUDA"


def cpu_place(args: argparse.Namespace, reason: str = "") -> Place:
    return Place("cpu", args.dtype or "float32", f"runs on the CPU, not on the GPU: {reason}" if reason else "")


def choose_device(args: argparse.Namespace) -> Place:
    """What --device and --dtype ask for, as far as it can be told before a model is loaded."""
    if args.device == "cpu":
        return cpu_place(args)
    reason = no_gpu_reason()
    if reason and args.device == "cuda":
        raise BadInputError(f"--device cuda: no GPU can be used: {reason}. Leave --device out to run on the CPU")
    return cpu_place(args) if reason else Place("cuda", args.dtype or "bfloat16")


def torch_dtype(name: str):
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
