"""A self-contained HTML page of a selection: which blocks each group chose for each query token. No external assets.

The page's text lives in inspect_page.html; this file fills in the data. Block ids travel as base64 so that a page of 2,048 rows, three
groups and 16 blocks stays below 200 KB a layer.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import pathlib

import numpy as np

MAX_ROWS = 2048  # query tokens kept per layer, evenly spaced; more would neither fit a screen nor load at once


@dataclasses.dataclass
class LayerSelection:
    """What one layer chose."""

    name: str
    positions: np.ndarray  # [n] position of each query token in its sequence
    block_ids: np.ndarray  # [n, Hkv, k], -1 in the tail


@dataclasses.dataclass
class SelectionPicture:
    """Everything a picture shows. All layers belong to one sequence of num_keys tokens."""

    title: str
    block_size: int
    num_keys: int
    layers: list[LayerSelection]
    tokens: list[str] | None = None  # text of each key token, if known

    @property
    def num_blocks(self) -> int:
        return max(1, -(-self.num_keys // self.block_size))


def thinned(layer: LayerSelection, max_rows: int = MAX_ROWS) -> LayerSelection:
    """At most max_rows query tokens, the first and the last among them."""
    num_rows = layer.positions.shape[0]
    if num_rows <= max_rows:
        return layer
    kept = np.unique(np.linspace(0, num_rows - 1, max_rows).round().astype(np.int64))
    return LayerSelection(layer.name, layer.positions[kept], layer.block_ids[kept])


def _encoded(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype="<i4").tobytes()).decode("ascii")


def render_page(picture: SelectionPicture) -> str:
    layers = []
    for layer in picture.layers:
        shown = thinned(layer)
        num_rows, num_groups, top_k = shown.block_ids.shape
        # Whoever recorded the selection may have thinned it already.
        span = int(shown.positions[-1] - shown.positions[0]) + 1 if num_rows else 0
        layers.append({"name": layer.name, "rows": num_rows, "all_rows": max(span, layer.positions.shape[0]), "groups": num_groups,
                       "top_k": top_k, "positions": _encoded(shown.positions), "ids": _encoded(shown.block_ids)})
    data = {"title": picture.title, "block_size": picture.block_size, "num_keys": picture.num_keys,
            "num_blocks": picture.num_blocks, "layers": layers, "tokens": picture.tokens}
    # "<" must not appear raw inside a script element: a token could spell its end tag.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    template = (pathlib.Path(__file__).parent / "inspect_page.html").read_text(encoding="utf-8")
    return template.replace("__OPENMSA_DATA__", text, 1)


def write_page(picture: SelectionPicture, path: str | pathlib.Path) -> None:
    pathlib.Path(path).write_text(render_page(picture), encoding="utf-8")
