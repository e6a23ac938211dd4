"""How good a selection is, measured against the attention it replaces.

With I* the k blocks that hold the most probability mass of dense attention (mean over the heads of a group) and I the blocks selected:
block recall = |I* and I| / |I*|, score recall = mass of (I* and I) / mass of I*. Queries that see no more than k blocks read everything,
so they are left out: they would only flatter the figures.
"""

from __future__ import annotations

import dataclasses

import torch

_CHUNK_SCORES = 1 << 24  # scores held at once


@dataclasses.dataclass(frozen=True)
class SelectionQuality:
    block_recall: float  # mean over the (query, group) pairs; nan if there is none
    score_recall: float
    mass_kept: float  # mean share of ALL probability mass that lies in the selected blocks
    num_pairs: int


def block_mass(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, config) -> torch.Tensor:
    """Dense attention's probability mass per block, mean over the group's heads: [n, Hkv, num_blocks] f32.

    One sequence: q [n, Hq, D] at `positions` [n], k [S, Hkv, D]. Sums to 1 over the blocks where the query sees a key.
    """
    n, num_keys = q.shape[0], k.shape[0]
    groups = config.num_kv_heads
    num_blocks = -(-num_keys // config.block_size)
    scale = config.softmax_scale if config.softmax_scale is not None else q.shape[-1] ** -0.5
    mass = torch.zeros(n, groups, num_blocks, dtype=torch.float32, device=q.device)
    key_t = k.float().permute(1, 2, 0)  # [Hkv, D, S]
    step = max(1, _CHUNK_SCORES // max(1, q.shape[1] * num_keys))
    future = torch.arange(num_keys, device=q.device)
    for a in range(0, n, step):
        qg = q[a : a + step].float().unflatten(1, (groups, -1))  # [m, Hkv, G, D]
        scores = torch.einsum("mghd,gds->mghs", qg, key_t) * scale
        scores.masked_fill_((future > positions[a : a + step, None])[:, None, None], float("-inf"))
        # A query that sees no key has no mass anywhere.
        prob = torch.softmax(scores, dim=-1).nan_to_num_(0.0).mean(dim=2)
        prob = torch.nn.functional.pad(prob, (0, num_blocks * config.block_size - num_keys))
        mass[a : a + step] = prob.unflatten(2, (num_blocks, config.block_size)).sum(-1)
    return mass


def chosen_blocks(block_ids: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """block_ids [n, Hkv, k] with -1 in the tail -> bool [n, Hkv, num_blocks]."""
    chosen = torch.zeros(*block_ids.shape[:2], num_blocks + 1, dtype=torch.bool, device=block_ids.device)
    ids = block_ids.long()
    chosen.scatter_(2, torch.where(ids < 0, num_blocks, ids), True)
    return chosen[..., :num_blocks]


def recall(block_ids: torch.Tensor, mass: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(block recall, score recall), each [n, Hkv], of selections [n, Hkv, k] against masses [n, Hkv, num_blocks].

    I* has min(top_k, num_blocks) blocks; give only queries that see at least as many.
    """
    best = mass.topk(min(top_k, mass.shape[2]), dim=2)
    hit = chosen_blocks(block_ids, mass.shape[2]).gather(2, best.indices)
    return hit.float().mean(dim=2), (best.values * hit).sum(dim=2) / best.values.sum(dim=2)


def selection_quality(
    q: torch.Tensor, k: torch.Tensor, block_ids: torch.Tensor, positions: torch.Tensor, config
) -> SelectionQuality:
    """Quality of block_ids [n, Hkv, k] for the queries q [n, Hq, D] of one sequence with keys k [S, Hkv, D]."""
    many = positions.to(q.device) >= config.top_k * config.block_size
    if not bool(many.any()):
        return SelectionQuality(float("nan"), float("nan"), float("nan"), 0)
    q, block_ids, positions = q[many], block_ids[many], positions.to(q.device)[many]
    mass = block_mass(q, k, positions, config)
    blocks, scores = recall(block_ids, mass, config.top_k)
    kept = (mass * chosen_blocks(block_ids, mass.shape[2])).sum(dim=2)
    return SelectionQuality(blocks.mean().item(), scores.mean().item(), kept.mean().item(), blocks.numel())


def merge(parts: list[SelectionQuality]) -> SelectionQuality:
    """Mean weighted by the number of (query, group) pairs."""
    parts = [p for p in parts if p.num_pairs]
    total = sum(p.num_pairs for p in parts)
    if not total:
        return SelectionQuality(float("nan"), float("nan"), float("nan"), 0)
    mean = lambda name: sum(getattr(p, name) * p.num_pairs for p in parts) / total  # noqa: E731
    return SelectionQuality(mean("block_recall"), mean("score_recall"), mean("mass_kept"), total)
