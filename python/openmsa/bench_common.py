"""What the benchmarks of a GPU have in common: sizes, random inputs, timing, and the rows they report."""

import random
import statistics
from collections.abc import Callable
from typing import Any

import torch

import openmsa

CLUSTER_CORRELATION = 0.995  # as in bench_cpu: 4 neighbouring tokens choose 1.37 times the blocks of one
HEAD_START_CYCLES = 2_000_000  # about a millisecond


def config(**changes: Any) -> openmsa.MsaConfig:
    return openmsa.MsaConfig(**{**dict(num_q_heads=64, num_kv_heads=4, head_dim=128, index_dim=128), **changes})


def in_turn(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of every call after one warm-up each, a round running each once.

    In a new order every round: a call runs at a lower clock right after one that took the GPU to its power limit for long.
    """
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    turns, order = list(calls.items()), random.Random(0)
    for _ in range(repeats):
        order.shuffle(turns)
        for name, call in turns:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(HEAD_START_CYCLES)  # the host gets ahead, so that launches do not show in the times
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def normal(*shape: int, seed: int = 0, device: str = "cuda") -> torch.Tensor:
    gen = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, generator=gen, device=device, dtype=torch.bfloat16)


def index_queries(num_tokens: int, cfg: openmsa.MsaConfig, clustered: bool, seed: int = 0, device: str = "cuda") -> torch.Tensor:
    """[T, Hkv, Di]: independent, or a stationary first-order random walk over the tokens (FFT convolution with its response)."""
    if not clustered:
        return normal(num_tokens, cfg.num_kv_heads, cfg.index_dim, seed=seed, device=device)
    length = 2048
    response = CLUSTER_CORRELATION ** torch.arange(length, device=device, dtype=torch.float32)
    response *= (1 - CLUSTER_CORRELATION**2) ** 0.5
    out = torch.empty(num_tokens, cfg.num_kv_heads, cfg.index_dim, device=device, dtype=torch.bfloat16)
    gen = torch.Generator(device=device).manual_seed(seed)
    size = num_tokens + length
    kernel = torch.fft.rfft(response, n=size + length)
    for g in range(cfg.num_kv_heads):
        for first in range(0, cfg.index_dim, 16):
            noise = torch.randn(16, size, generator=gen, device=device)
            walk = torch.fft.irfft(torch.fft.rfft(noise, n=size + length) * kernel, n=size + length)
            out[:, g, first : first + 16] = walk[:, length:size].T.bfloat16()
    return out


def row(name: str, what: str, unit: str, measured: float | None, good: float | None = None, excellent: float | None = None,
        lower_is_better: bool = False, **details: Any) -> dict[str, Any]:
    def reached(bar: float | None) -> bool:
        return bar is not None and measured is not None and (measured <= bar if lower_is_better else measured >= bar)

    verdict = ("skipped" if measured is None else "excellent" if reached(excellent) else "good" if reached(good)
               else "missed" if good is not None else "measured")
    return dict(name=name, what=what, unit=unit, measured=measured, good=good, excellent=excellent,
                lower_is_better=lower_is_better, verdict=verdict, **details)


def causal_pairs(num_queries: int, num_keys: int) -> float:
    return num_queries * (num_keys - num_queries) + num_queries * (num_queries + 1) / 2
