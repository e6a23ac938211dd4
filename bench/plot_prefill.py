#!/usr/bin/env python3
"""Draws how many times faster than dense attention the whole prefill is, over the context length.

    bench/plot_prefill.py bench/results/cuda-DATE.json docs/images/prefill-h200.svg
"""

import json
import re
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "openmsa", "font.size": 10})
import matplotlib.pyplot as plt  # noqa: E402


def main(source: str, target: str) -> None:
    with open(source, encoding="utf-8") as file:
        result = json.load(file)
    lines: dict[str, list[tuple[int, float, bool]]] = {}
    for row in result["rows"]:
        if found := re.fullmatch(r"prefill_(\d+)_(random|clustered)", row["name"]):
            lines.setdefault(found[2], []).append((int(found[1]), row["measured"], bool(row.get("note"))))
    figure, axes = plt.subplots(figsize=(6.4, 3.4))
    for kind, color in (("clustered", "#1f77b4"), ("random", "#d62728")):
        points = sorted(lines[kind])
        axes.plot([p[0] for p in points], [p[1] for p in points], color=color, label=f"{kind} lists")
        for extrapolated, face in ((False, color), (True, "white")):
            some = [p for p in points if p[2] == extrapolated]
            axes.plot([p[0] for p in some], [p[1] for p in some], "o", color=color, markerfacecolor=face, markersize=5)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="context length, tokens", ylabel="times faster than cuDNN dense")
    lengths = sorted(p[0] for p in lines["random"])
    axes.set_xticks(lengths, [f"{n >> 10}K" if n < 1 << 20 else f"{n >> 20}M" for n in lengths])
    axes.set_yticks([1, 2, 5, 10, 20, 30], ["1", "2", "5", "10", "20", "30"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title(f"Whole prefill (score, select, attend), {result['gpu']}, bf16; hollow: dense extrapolated", fontsize=9)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
