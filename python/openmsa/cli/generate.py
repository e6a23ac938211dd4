"""`openmsa generate`: a language model writes on, with sparse or with its own dense attention."""

import argparse
import contextlib
import sys
import time

from .common import EXIT_OK, BadInputError, emit_json, note, positive_int, progress, wants_tables
from .models import add_model_arguments, load_on_device, read_text

HELP = "Let a Llama-family model continue a text with MiniMax Sparse Attention, and say how long it took."
EXAMPLES = """\
  openmsa generate ./SmolLM2-135M-Instruct --prompt "The first rule of the library is"
  openmsa generate model.gguf --prompt-file novel.txt --max-new-tokens 200 --block-size 64 --top-k 16
  openmsa generate model.gguf --chat --prompt "Name three rivers." --dense    with the model's own attention
  cat notes.txt | openmsa generate model.gguf --prompt-file - --json out.json
  openmsa generate ./SmolLM2-135M-Instruct --prompt-file novel.txt --device cuda    fail rather than fall back to the CPU

The conversion needs no training: it makes index queries and keys from the model's own. Sparse attention differs from dense only
once a text is longer than top-k times block-size tokens.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder with config.json, .gguf file, or name on the Hugging Face hub")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    source.add_argument("--prompt-file", metavar="PATH", help="read it from a file; - is standard input")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--msa", action="store_true", help="sparse attention (the default)")
    kind.add_argument("--dense", action="store_true", help="the model's own dense attention")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    parser.add_argument("--max-new-tokens", type=positive_int, default=64, metavar="N", help="tokens to write at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 picks the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0, help="seed for a temperature above 0")
    parser.add_argument("--prefill-chunk", type=positive_int, default=None, metavar="N", help="read the prompt N tokens at a time")
    add_model_arguments(parser)


class TimedStreamer:
    """Prints text as it comes and notes when the first and the last token came. transformers calls put() and end()."""

    def __init__(self, tokenizer, show: bool, on_first):
        self._tokenizer, self._show, self._on_first = tokenizer, show, on_first
        self._ids: list[int] = []
        self._printed = 0
        self._prompt_seen = False
        self.first_time = self.last_time = None

    def put(self, value) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.last_time = time.perf_counter()
        if self.first_time is None:
            self.first_time = self.last_time
            self._on_first()
        self._ids.extend(value.flatten().tolist())
        self._print(final=False)

    def end(self) -> None:
        self._print(final=True)
        if self._show:
            print(flush=True)

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)

    def _print(self, final: bool) -> None:
        if not self._show:
            return
        text = self.text
        # A character cut in two by a token border shows as U+FFFD until its other half has come.
        if not final and text.endswith("\ufffd"):
            return
        sys.stdout.write(text[self._printed:])
        sys.stdout.flush()
        self._printed = len(text)


def run(args: argparse.Namespace) -> int:
    prompt = args.prompt if args.prompt is not None else read_text(args.prompt_file)
    if not prompt:
        raise BadInputError("the prompt is empty; give some text to continue")
    if args.temperature < 0:
        raise BadInputError(f"--temperature: {args.temperature} is below 0")

    import torch

    import openmsa

    model, tokenizer, place = load_on_device(args.model, args, sparse=not args.dense)
    if args.chat:
        if not tokenizer.chat_template:
            raise BadInputError("--chat: this model's tokenizer has no chat template; leave --chat out")
        inputs = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                               return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = inputs.to(place.device)
    num_prompt = inputs["input_ids"].shape[1]
    if num_prompt == 0:
        raise BadInputError("the prompt has no tokens; give some text to continue")
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and num_prompt + args.max_new_tokens > most:
        note(args, f"note: {num_prompt} prompt tokens and {args.max_new_tokens} new ones go beyond the {most} positions the model knows")
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    if args.temperature > 0:
        options["temperature"] = args.temperature
        torch.manual_seed(args.seed)
    if args.prefill_chunk is not None:
        options["prefill_chunk_size"] = args.prefill_chunk
    if tokenizer.pad_token_id is None:
        options["pad_token_id"] = tokenizer.eos_token_id

    with torch.inference_mode(), contextlib.ExitStack() as reading:
        reading.enter_context(progress(args, f"reading {num_prompt:,} tokens", None))
        if place.device == "cuda":
            # The first tokens load kernels and libraries, about a second that says nothing about the model.
            model.generate(inputs["input_ids"][:, :1], max_new_tokens=2, do_sample=False, pad_token_id=0)
            if not args.dense:
                openmsa.hf.msa_stats(model, reset=True)
        streamer = TimedStreamer(tokenizer, wants_tables(args), on_first=reading.close)  # the bar goes before text comes
        start = time.perf_counter()
        model.generate(**inputs, streamer=streamer, **options)

    prefill = streamer.first_time - start
    decode = streamer.last_time - streamer.first_time
    per_second = (streamer.num_tokens - 1) / decode if decode > 0 else None
    result = {"model": args.model, "attention": "dense" if args.dense else "msa", "device": place.device, "device_name": place.name,
              "dtype": place.dtype, "prompt_tokens": num_prompt,
              "new_tokens": streamer.num_tokens, "text": streamer.text, "prefill_s": prefill, "decode_s": decode,
              "decode_tokens_per_s": per_second, "threads": torch.get_num_threads()}
    line = (f"{result['attention']} on {place.name} ({place.dtype}): prompt of {num_prompt:,} tokens read in {prefill:.2f} s "
            f"({num_prompt / prefill:,.0f} tokens/s), {streamer.num_tokens} tokens written in {decode:.2f} s")
    if per_second is not None:
        line += f" ({per_second:.1f} tokens/s)"
    if not args.dense:
        stats = openmsa.hf.msa_stats(model)
        dropped = sum(s.dropped_queries for s in stats.values())
        sparse = sum(s.sparse_queries for s in stats.values())
        result["sparse_queries"], result["dropped_queries"] = sparse, dropped
        line += (f"; {100 * dropped / sparse:.0f}% of the (layer, token) pairs left blocks unread" if dropped
                 else "; nothing was left unread: the text has no more blocks than top-k")
    note(args, line)
    emit_json(args, result)
    return EXIT_OK
