"""Reading, decoding and judging one model, dense or MSA, by the same code for both."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time

import torch
from transformers import DynamicCache

from openmsa import hf

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_CALIBRATION_TOKENS = 2048
DECODE_STEPS = 12
_MAX_ANSWER_TOKENS = 20
_LOGIT_ROWS = 1000  # rows of logits held at once: 49,152 floats each


def faster_dtype(model) -> torch.dtype:
    """The dtype in which the dense model reads a text of moderate length faster."""
    seconds = {}
    ids = torch.arange(_CALIBRATION_TOKENS)[None] % model.config.vocab_size
    for dtype in DTYPE_NAMES:
        trial = cast_model(model, dtype)
        trial.model(ids[:, :64])
        start = time.perf_counter()
        trial.model(ids)
        seconds[dtype] = time.perf_counter() - start
    return min(seconds, key=seconds.get)


def cast_model(model, dtype: torch.dtype):
    """The model itself if it has the dtype, else a copy that has it."""
    if model.lm_head.weight.dtype == dtype:
        return model
    copied = copy.deepcopy(model)
    for tensor in (*copied.parameters(), *copied.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    # The rotary frequencies stay in float32, as transformers loads them.
    copied.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    return copied


def cast_cache(cache: DynamicCache, dtype: torch.dtype) -> DynamicCache:
    cast = copy.deepcopy(cache)
    for layer in cast.layers:
        for name in ("keys", "values", "index_keys"):
            if getattr(layer, name, None) is not None:
                setattr(layer, name, getattr(layer, name).to(dtype))
        layer.dtype = dtype
    return cast


@dataclasses.dataclass
class Reading:
    ids: torch.Tensor
    hidden: torch.Tensor  # [T, hidden size], after the last norm
    cache: DynamicCache


class Reader:
    """One kind of attention. With options the model is converted to MSA; dense and MSA share their weights."""

    def __init__(self, model, dtype: torch.dtype, **msa_options):
        self.dtype = dtype
        self.models = {d: cast_model(model, d) for d in DTYPE_NAMES}
        if msa_options:
            self.models = {d: hf.convert(m, **msa_options) for d, m in self.models.items()}
        self.model = self.models[dtype]
        self.model.model(torch.arange(256)[None])  # threads started, kernels chosen: no reading pays for that

    def read(self, ids: torch.Tensor) -> tuple[float, Reading]:
        """(seconds, reading): one pass over the prompt, filling the cache."""
        cache = DynamicCache(config=self.model.config)
        start = time.perf_counter()
        hidden = self.model.model(ids, past_key_values=cache).last_hidden_state[0]
        return time.perf_counter() - start, Reading(ids, hidden, cache)

    def perplexity(self, reading: Reading, prompt) -> float:
        """exp of the mean negative log-likelihood of the novel's tokens, each given everything before it."""
        targets = prompt.is_novel.nonzero()[:, 0]
        total = 0.0
        for rows in targets.split(_LOGIT_ROWS):
            logits = self.model.lm_head(reading.hidden[rows - 1]).float()
            total += torch.nn.functional.cross_entropy(logits, reading.ids[0, rows], reduction="sum").item()
        return math.exp(total / targets.numel())

    def _first_token(self, reading: Reading) -> torch.Tensor:
        return self.model.lm_head(reading.hidden[-1:]).argmax(-1)[None]

    def decode_ms(self, reading: Reading) -> dict[str, float]:
        """Median time of one further token, in each dtype, after the whole prompt. The reading's own cache stays as it is."""
        result = {}
        for dtype, model in self.models.items():
            cache, token, seconds = cast_cache(reading.cache, dtype), self._first_token(reading), []
            for _ in range(DECODE_STEPS):
                start = time.perf_counter()
                token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
                seconds.append(time.perf_counter() - start)
            result[DTYPE_NAMES[dtype]] = 1e3 * statistics.median(seconds)
        return result

    def answer(self, reading: Reading, tokenizer) -> str:
        """The likeliest continuation, up to the end of the turn."""
        token, words = self._first_token(reading), []
        end = self.model.generation_config.eos_token_id
        while token.item() != end and len(words) < _MAX_ANSWER_TOKENS:
            words.append(token.item())
            token = self.model(token, past_key_values=reading.cache).logits[:, -1:].argmax(-1)
        return tokenizer.decode(words)
