"""The prompt: a chat turn that holds part of the novel with one sentence hidden in it, exactly as many tokens as asked for."""

from __future__ import annotations

import dataclasses

import torch

_MARK = "\x00TEXT\x00"


@dataclasses.dataclass
class Prompt:
    ids: torch.Tensor  # [1, T]
    is_novel: torch.Tensor  # bool [T]: tokens of the novel itself, not of the instruction, the hidden sentence or the question


def build_prompt(tokenizer, novel: str, secret: str, question: str, num_tokens: int, depth: float) -> Prompt:
    """`secret` stands between two sentences, about `depth` of the way into the text."""
    message = f"Read this text.\n\n{_MARK}\n\nAnswer from the text above. {question}"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False)
    before, after = chat.split(_MARK)

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    head, hidden, tail = tokens(before), tokens(f" {secret}"), tokens(after)
    budget = num_tokens - len(head) - len(hidden) - len(tail)
    # Rough place of the cut by characters, then back to the end of a sentence.
    opening = tokenizer.decode(tokens(novel[: 8 * budget])[: int(depth * budget)])
    cut = opening.rfind(". ") + 1
    first = tokens(novel[:cut])
    second = tokens(novel[cut : cut + 8 * budget])[: budget - len(first)]
    if len(first) + len(second) != budget:
        raise ValueError(f"the novel is too short for a prompt of {num_tokens} tokens")
    ids = head + first + hidden + second + tail
    is_novel = [False] * len(head) + [True] * len(first) + [False] * len(hidden) + [True] * len(second) + [False] * len(tail)
    return Prompt(torch.tensor([ids]), torch.tensor(is_novel))
