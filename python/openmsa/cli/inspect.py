"""`openmsa inspect`: a picture of which blocks each group chose, as a PNG and as a self-contained HTML page."""

import argparse
import importlib.util
import pathlib

from .common import EXIT_OK, BadInputError, comma_ints, emit_json, note, print_table, progress, wants_tables
from .models import add_model_arguments, load_on_device, read_text

HELP = "Draw which key blocks each group chose for each query token: a PNG and an HTML page that needs nothing else."
EXAMPLES = """\
  openmsa inspect block_ids.npz                            writes block_ids.png and block_ids.html
  openmsa inspect block_ids.safetensors -o out/picture     writes out/picture.png and out/picture.html
  openmsa inspect ./SmolLM2 --text-file novel.txt --layers 4,12,20 --block-size 64 --top-k 8

A .npz or .safetensors file holds block_ids, int32 [T, Hkv, k] or [layers, T, Hkv, k], -1 in the tail; and, if it knows them,
positions [T], block_size, num_keys. Without positions the T query tokens are taken to be the first T of the sequence.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE",
                        help=".npz or .safetensors file of block ids, or a model (folder, .gguf, hub name)")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", metavar="TEXT", help="for a model: the text it reads")
    text.add_argument("--text-file", metavar="PATH", help="for a model: the file it reads; - is standard input")
    parser.add_argument("--max-tokens", type=int, default=4096, metavar="N", help="for a model: read at most N tokens")
    parser.add_argument("--layers", type=comma_ints, metavar="N,N,...",
                        help="layers to show (default: all in the page, up to 6 in the PNG)")
    parser.add_argument("-o", "--output", metavar="STEM", help="where to write, without .png and .html (default: next to a file, "
                        "else ./selection)")
    parser.add_argument("--format", choices=("both", "png", "html"), default="both", help="which of the two to write")
    add_model_arguments(parser)


def load_arrays(path: pathlib.Path) -> dict:
    import numpy as np

    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        from safetensors.numpy import load_file

        return load_file(path)
    except FileNotFoundError:
        raise BadInputError(f"there is no file '{path}'") from None
    except ImportError as error:
        raise BadInputError(f"reading {path.suffix} needs {error.name}; install it with: pip install 'openmsa[hf]'") from error
    except Exception as error:
        raise BadInputError(f"'{path}' cannot be read as {path.suffix}: {' '.join(str(error).split())}") from error


def picture_from_file(path: pathlib.Path, args: argparse.Namespace):
    import numpy as np

    from openmsa.inspect_html import LayerSelection, SelectionPicture

    arrays = load_arrays(path)
    if "block_ids" not in arrays:
        raise BadInputError(f"'{path}' has no array block_ids; it has {', '.join(sorted(arrays)) or 'nothing'}")
    ids = arrays["block_ids"]
    if ids.ndim not in (3, 4) or not np.issubdtype(ids.dtype, np.integer):
        raise BadInputError(f"'{path}': block_ids is {ids.dtype} {list(ids.shape)}; it must be an integer array [T, Hkv, k] or "
                            "[layers, T, Hkv, k]")
    if ids.ndim == 3:
        ids = ids[None]
    if ids.size == 0:
        raise BadInputError(f"'{path}': block_ids is empty, {list(ids.shape)}; there is nothing to draw")
    block_size = scalar(arrays, "block_size", args.block_size, path)
    if block_size < 1:
        raise BadInputError(f"block_size is {block_size}; it must be at least 1")
    num_queries = ids.shape[1]
    positions = np.asarray(arrays.get("positions", np.arange(num_queries))).astype(np.int64)
    if positions.shape != (num_queries,) or (positions < 0).any():
        raise BadInputError(f"'{path}': positions is {list(positions.shape)}; it must hold one position, 0 or more, for each of the "
                            f"{num_queries} query tokens")
    num_keys = scalar(arrays, "num_keys", int(positions.max()) + 1, path)
    num_blocks = -(-num_keys // block_size)
    own = positions // block_size
    check_ids(ids, np.minimum(own, num_blocks - 1), path)
    chosen = chosen_layers(args, range(ids.shape[0]), "the file has layers")
    layers = [LayerSelection(f"layer {i}" if ids.shape[0] > 1 else "selection", positions, ids[i]) for i in chosen]
    return SelectionPicture(title=f"Blocks chosen: {path.name}", block_size=block_size, num_keys=num_keys, layers=layers)


def scalar(arrays: dict, name: str, default: int, path: pathlib.Path) -> int:
    if name not in arrays:
        return default
    if arrays[name].size != 1:
        raise BadInputError(f"'{path}': {name} has shape {list(arrays[name].shape)}; it must be one number")
    return int(arrays[name].reshape(()))


def check_ids(ids, own, path: pathlib.Path) -> None:
    """Drawing follows the ids, so they must be lists as the operators give them."""
    import numpy as np

    valid = ids >= 0
    ordered = (np.diff(ids.astype(np.int64), axis=-1) > 0) | ~valid[..., 1:]
    tail = valid[..., :-1] | ~valid[..., 1:]
    late = valid & (ids > own[None, :, None, None])
    for bad, rule in ((ids < -1, "an id below -1"), (~ordered, "ids that do not ascend"), (~tail, "a valid id after a -1"),
                      (late, "a block after the query's own (is block_size right?)")):
        if bad.any():
            layer, token, group, _ = (int(x) for x in np.argwhere(bad)[0])
            raise BadInputError(f"'{path}': block_ids holds {rule} at layer {layer}, query token {token}, group {group}: "
                                f"{ids[layer, token, group].tolist()}")


def chosen_layers(args: argparse.Namespace, available, phrase: str) -> list[int]:
    available = list(available)
    if args.layers is None:
        return available
    for layer in args.layers:
        if layer not in available:
            raise BadInputError(f"--layers: there is no layer {layer}; {phrase} {', '.join(map(str, available))}")
    return args.layers


def picture_from_model(args: argparse.Namespace):
    import torch

    import openmsa.hf as hf
    from openmsa.inspect_html import MAX_ROWS, LayerSelection, SelectionPicture

    if args.text is None and args.text_file is None:
        raise BadInputError(f"'{args.source}' is not a .npz or .safetensors file, so it is taken as a model, and a model needs a text: "
                            "add --text or --text-file")
    text = args.text if args.text is not None else read_text(args.text_file)
    model, tokenizer, place = load_on_device(args.source, args)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :max(1, args.max_tokens)]
    if ids.shape[1] == 0:
        raise BadInputError("the text has no tokens")
    with torch.inference_mode(), progress(args, f"reading {ids.shape[1]:,} tokens", None), \
            hf.record_selection(model, max_queries=MAX_ROWS, with_quality=False) as recorder:
        model(input_ids=ids.to(place.device), use_cache=False, logits_to_keep=1)
    chosen = chosen_layers(args, sorted(recorder.selections), "the sparse layers are")
    layers = []
    for layer in chosen:
        selection = recorder.selections[layer][0]
        layers.append(LayerSelection(f"layer {layer}", selection.positions.numpy(), selection.block_ids.numpy()))
    text_config = model.config.get_text_config()
    # A converted Llama carries our options; MiniMax-M3 has a name of its own for the block size.
    is_llama = hasattr(text_config, "msa_options")
    block_size = text_config.msa_options.block_size if is_llama else text_config.index_block_size
    tokens = [tokenizer.decode([token]) for token in ids[0].tolist()]
    picture = SelectionPicture(title=f"Blocks chosen by {pathlib.Path(args.source).name}", block_size=block_size,
                               num_keys=ids.shape[1], layers=layers, tokens=tokens)
    return picture, place


def summary_rows(picture) -> list[dict]:
    """Per layer and group: blocks chosen and how far back they reach."""
    rows = []
    for layer in picture.layers:
        own = layer.positions[:, None] // picture.block_size
        for group in range(layer.block_ids.shape[1]):
            ids = layer.block_ids[:, group]
            valid = ids >= 0
            free = valid & (ids != own)
            rows.append({"layer": layer.name, "group": group, "queries": int(ids.shape[0]),
                         "blocks_per_query": float(valid.sum(axis=1).mean()),
                         "mean_blocks_back": float((own - ids)[free].mean()) if free.any() else 0.0,
                         "block_0_share": float((ids == 0).any(axis=1).mean())})
    return rows


def run(args: argparse.Namespace) -> int:
    source = pathlib.Path(args.source)
    from_file = source.suffix in (".npz", ".safetensors")
    if from_file and (args.text is not None or args.text_file is not None):
        raise BadInputError(f"'{source}' holds block ids, so --text and --text-file have no meaning; leave them out")
    if args.format in ("both", "png") and importlib.util.find_spec("matplotlib") is None:
        raise BadInputError("the PNG needs matplotlib, which is not installed; install it with: pip install 'openmsa[plot]', or "
                            "use --format html")
    picture, place = (picture_from_file(source, args), None) if from_file else picture_from_model(args)
    stem = pathlib.Path(args.output) if args.output else source.with_suffix("") if from_file else pathlib.Path("selection")
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    if args.format in ("both", "png"):
        from openmsa.inspect_plot import draw_selection

        written.append(f"{stem}.png")
        draw_selection(picture, written[-1])
    if args.format in ("both", "html"):
        from openmsa.inspect_html import write_page

        written.append(f"{stem}.html")
        write_page(picture, written[-1])
    rows = summary_rows(picture)
    if wants_tables(args):
        print_table(picture.title, ["layer", "group", "queries", "blocks per query", "mean blocks back", "keep block 0"],
                    [[r["layer"], str(r["group"]), str(r["queries"]), f"{r['blocks_per_query']:.1f}", f"{r['mean_blocks_back']:.1f}",
                      f"{100 * r['block_0_share']:.0f}%"] for r in rows], right=(1, 2, 3, 4, 5))
    note(args, ("" if place is None else f"read on {place.name} ({place.dtype}); ") + "wrote " + " and ".join(written))
    ran = {} if place is None else {"device": place.device, "device_name": place.name, "dtype": place.dtype}
    emit_json(args, {"source": args.source, **ran, "block_size": picture.block_size, "num_keys": picture.num_keys, "files": written,
                     "rows": rows})
    return EXIT_OK
