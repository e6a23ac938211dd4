"""The `openmsa` command: one module per subcommand, common.py for what they share.

A subcommand module has HELP (one line), EXAMPLES, add_arguments(parser) and run(args) -> exit code. Heavy imports (PyTorch,
transformers, matplotlib) happen inside run, so that `openmsa --help` answers at once.
"""

import argparse
import importlib
import sys

from .common import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, BadInputError, HelpFormatter, add_common_arguments, describe_failure

COMMANDS = ("info", "check", "bench", "generate", "inspect")

DESCRIPTION = "MiniMax Sparse Attention: what this build can do, whether it is right, how fast it is, and what it looks like."
EPILOG = """\
examples:
  openmsa info                              what runs on this machine
  openmsa check --seqlens 2049              every backend against the fp64 oracle
  openmsa bench --cpu --quick               speed against PyTorch, small sizes
  openmsa generate ./SmolLM2 --prompt "Once upon a time"
  openmsa inspect block_ids.npz -o picture  a picture of which blocks were chosen

exit codes: 0 all well; 1 a check, a bar or the work itself failed; 2 wrong usage or bad input
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openmsa", description=DESCRIPTION, epilog=EPILOG, formatter_class=HelpFormatter)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"{__name__}.{name}")
        sub = subparsers.add_parser(name, help=module.HELP, description=module.HELP,
                                    epilog="examples:\n" + module.EXAMPLES, formatter_class=HelpFormatter)
        module.add_arguments(sub)
        add_common_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code; argparse itself exits with 2 on wrong usage and 0 on --help."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.version:
        import openmsa

        print(f"openmsa {openmsa.__version__}")
        return EXIT_OK
    if args.command is None:
        parser.print_help()
        return EXIT_BAD_INPUT
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("openmsa: interrupted", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone: nothing to report, and nothing more may be flushed to it.
        sys.stdout = None
        return EXIT_OK
    except Exception as error:
        if args.debug:
            raise
        code, text = describe_failure(error)
        print(f"openmsa {args.command}: {text}", file=sys.stderr)
        return code


__all__ = ["BadInputError", "EXIT_BAD_INPUT", "EXIT_FAILED", "EXIT_OK", "build_parser", "main"]
