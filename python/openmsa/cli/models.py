"""Loading a language model for `generate` and `inspect`: a folder, a GGUF file, or a name on the Hugging Face hub."""

import argparse
import contextlib
import importlib.util
import io
import pathlib
import sys

from .common import BadInputError, add_device_argument, choose_device, cpu_place, note, torch_dtype


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add_device_argument(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default=None,
                        help="dtype of weights and cache (default: bfloat16 on a GPU, float32 on the CPU)")
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="CPU threads")
    group = parser.add_argument_group("sparse attention")
    group.add_argument("--block-size", type=int, default=128, metavar="N", help="tokens in a block")
    group.add_argument("--top-k", type=int, default=16, metavar="N", help="blocks kept per query token and group")
    group.add_argument("--num-init-blocks", type=int, default=0, metavar="N", help="first blocks always kept")
    group.add_argument("--num-local-blocks", type=int, default=1, metavar="N", help="last blocks always kept")
    group.add_argument("--dense-layers", type=int, default=0, metavar="N", help="the first N layers stay dense")


def load_on_device(name: str, args: argparse.Namespace, sparse: bool = True):
    """(model, tokenizer, where it runs), the model with MSA layers or with its own dense attention."""
    import openmsa.hf as hf

    place = choose_device(args)
    model, tokenizer = load_model(name, args, place.dtype)
    if sparse:
        model = to_sparse(model, args)
        reason = hf.why_not_on_gpu(model) if place.device == "cuda" else ""
        if reason and args.device == "cuda":
            raise BadInputError(f"--device cuda: {reason}. Choose what the GPU kernels take (`openmsa info` lists it), or --device cpu")
        if reason:
            # Loaded anew, since weights rounded to bfloat16 do not become float32 again.
            place = cpu_place(args, reason)
            model, tokenizer = load_model(name, args, place.dtype)
            model = to_sparse(model, args)
    if place.note:
        note(args, f"note: {place.note}")
    return model.to(place.device), tokenizer, place


def load_model(name: str, args: argparse.Namespace, dtype: str):
    """(model with its own dense attention, tokenizer)."""
    import torch

    for package in ("transformers", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise BadInputError(f"this command needs {package}, which is not installed; install it with: pip install 'openmsa[hf]'")
    import transformers

    if args.threads is not None:
        if args.threads < 1:
            raise BadInputError(f"--threads: {args.threads} is not at least 1")
        torch.set_num_threads(args.threads)
    path = pathlib.Path(name)
    looks_local = path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") != 1
    if not path.exists() and looks_local:
        raise BadInputError(f"model: there is no '{name}'; give a folder with config.json, a .gguf file, or a name on the Hugging Face hub")
    where: dict = {"pretrained_model_name_or_path": name}
    if path.is_file():
        if path.suffix != ".gguf":
            raise BadInputError(f"model: '{name}' is a file that does not end in .gguf; give the folder that holds config.json")
        if importlib.util.find_spec("gguf") is None:
            raise BadInputError("reading a GGUF file needs gguf, which is not installed; install it with: pip install 'openmsa[hf]'")
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    silent = args.quiet or not sys.stderr.isatty()
    if silent:
        transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    import openmsa.hf  # makes saved MSA models loadable

    # The GGUF reader draws its bar whatever transformers' setting says.
    quiet = contextlib.redirect_stderr(io.StringIO()) if silent else contextlib.nullcontext()
    try:
        with quiet:
            tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
            model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch_dtype(dtype))
    except (OSError, ValueError) as error:
        if isinstance(error, openmsa.Error):
            raise
        raise BadInputError(f"model: '{name}' could not be loaded: {' '.join(str(error).split())}") from error
    return model.eval(), tokenizer


def to_sparse(model, args: argparse.Namespace):
    """The model with MSA layers; a model that has them already (saved by openmsa.hf) keeps its own options."""
    import openmsa.hf as hf

    if isinstance(model, hf.MsaLlamaForCausalLM):
        return model
    if model.config.model_type.startswith("minimax_m3"):
        return hf.use_openmsa(model)
    return hf.convert(model, block_size=args.block_size, top_k=args.top_k, num_init_blocks=args.num_init_blocks,
                      num_local_blocks=args.num_local_blocks, dense_layers=args.dense_layers)


def read_text(path: str) -> str:
    """The text of a file, or of standard input for '-'."""
    try:
        return sys.stdin.read() if path == "-" else pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(f"'{path}' is not UTF-8 text ({error.reason} at byte {error.start})") from error
