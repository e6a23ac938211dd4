"""The same picture as inspect_html.py, as a PNG: one map per (layer, group), query tokens downwards, key blocks rightwards."""

from __future__ import annotations

import pathlib

import numpy as np

from .inspect_html import LayerSelection, SelectionPicture, thinned

# Not visible yet, visible but not chosen, chosen, own block.
COLOURS = ("#ececf0", "#ffffff", "#2563eb", "#f59e0b")
FUTURE, FREE, CHOSEN, OWN = range(4)


def cell_states(layer: LayerSelection, group: int, block_size: int, num_blocks: int) -> np.ndarray:
    """uint8 [rows, num_blocks] of the four states above."""
    own = (layer.positions // block_size)[:, None]
    states = np.where(np.arange(num_blocks)[None, :] > own, FUTURE, FREE).astype(np.uint8)
    ids = layer.block_ids[:, group]
    rows, slots = np.nonzero(ids >= 0)
    blocks = ids[rows, slots]
    states[rows, blocks] = np.where(blocks == own[rows, 0], OWN, CHOSEN)
    return states


def draw_selection(picture: SelectionPicture, path: str | pathlib.Path, max_layers: int = 6) -> None:
    """Writes the PNG. Layers beyond max_layers are left out, evenly, and the title says so. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    kept = np.unique(np.linspace(0, len(picture.layers) - 1, min(max_layers, len(picture.layers))).round().astype(int))
    layers = [thinned(picture.layers[i], 1024) for i in kept]
    num_groups = max(layer.block_ids.shape[1] for layer in layers)
    figure = Figure(figsize=(1.5 + 3.6 * num_groups, 1.4 + 3.4 * len(layers)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(layers), num_groups, squeeze=False, sharex=True)
    colours, norm = ListedColormap(COLOURS), BoundaryNorm(np.arange(5) - 0.5, 4)
    for row, layer in enumerate(layers):
        for group in range(num_groups):
            ax = axes[row][group]
            if group >= layer.block_ids.shape[1] or layer.positions.size == 0:
                ax.axis("off")
                continue
            states = cell_states(layer, group, picture.block_size, picture.num_blocks)
            # Row r shows query layer.positions[r]; the extent maps the rows to positions.
            extent = (-0.5, picture.num_blocks - 0.5, layer.positions[-1] + 0.5, layer.positions[0] - 0.5)
            ax.imshow(states, aspect="auto", interpolation="nearest", cmap=colours, norm=norm, extent=extent)
            ax.set_title(f"{layer.name}, group {group}", fontsize=10)
            if group == 0:
                ax.set_ylabel("query token")
            if row == len(layers) - 1:
                ax.set_xlabel(f"key block ({picture.block_size} tokens)")
    title = picture.title
    if len(layers) < len(picture.layers):
        title += f" ({len(layers)} of {len(picture.layers)} layers)"
    figure.suptitle(title, fontsize=12)
    names = ("not visible yet", "not chosen", "chosen", "own block")
    figure.legend(handles=[Patch(facecolor=c, edgecolor="#888", label=n) for c, n in zip(COLOURS, names, strict=True)],
                  loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)
