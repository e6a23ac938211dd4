"""MSA written a second time, independently of the library: PyTorch, float64, boolean masks over whole score matrices.

Follows docs/numerics.md word by word and shares no code with the reference backend, so that an error in one shows in the other.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from openmsa import Batch, MsaConfig


@dataclasses.dataclass
class Layout:
    """Lengths of a batch as Python lists, and the packed data that belong to it."""

    seqlens_q: list[int]
    seqlens_k: list[int]
    q_start: list[int] | None = None

    def batch(self) -> Batch:
        return Batch.packed(self.seqlens_q, self.seqlens_k, self.q_start)

    def rows(self):
        """(query slice, key slice, positions of the queries) of each sequence."""
        t = s = 0
        for i, (num_q, num_k) in enumerate(zip(self.seqlens_q, self.seqlens_k)):
            start = num_k - num_q if self.q_start is None else self.q_start[i]
            yield slice(t, t + num_q), slice(s, s + num_k), start + torch.arange(num_q)
            t, s = t + num_q, s + num_k


@dataclasses.dataclass
class Data:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_idx: torch.Tensor
    k_idx: torch.Tensor


def make_data(
    layout: Layout, config: MsaConfig, rng: torch.Generator, dtype: torch.dtype = torch.float32, exact_index=True
) -> Data:
    """Random q, k, v. Index vectors of small integers have exact dot products in every storage type, so selections must be equal."""
    num_q, num_k = sum(layout.seqlens_q), sum(layout.seqlens_k)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    def index(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=rng).to(dtype) if exact_index else normal(*shape)

    return Data(
        q=normal(num_q, config.num_q_heads, config.head_dim),
        k=normal(num_k, config.num_kv_heads, config.head_dim),
        v=normal(num_k, config.num_kv_heads, config.head_dim),
        q_idx=index(num_q, config.num_kv_heads, config.index_dim),
        k_idx=index(num_k, config.index_dim),
    )


def block_scores(data: Data, layout: Layout, config: MsaConfig) -> torch.Tensor:
    size = config.block_size
    width = max([0, *(math.ceil(n / size) for n in layout.seqlens_k)])
    result = torch.full((data.q_idx.shape[0], config.num_kv_heads, width), -math.inf, dtype=torch.float64)
    for tq, tk, positions in layout.rows():
        score = torch.einsum("tgd,jd->tgj", data.q_idx[tq].double(), data.k_idx[tk].double())
        num_k = score.shape[-1]
        visible = torch.arange(num_k) <= positions[:, None]
        score = score.masked_fill(~visible[:, None], -math.inf)
        for b in range(math.ceil(num_k / size)):
            result[tq, :, b] = score[..., b * size : (b + 1) * size].amax(-1)
    return result


def select(scores: torch.Tensor, layout: Layout, config: MsaConfig) -> torch.Tensor:
    """Sorts every row in full: forced blocks first, then by score, ties by block id; NaN last."""
    result = torch.full((*scores.shape[:2], config.top_k), -1, dtype=torch.int32)
    for tq, tk, positions in layout.rows():
        num_k = tk.stop - tk.start
        for t, p in zip(range(tq.start, tq.stop), positions.tolist()):
            num_visible = min(max(p + 1, 0), num_k)
            num_blocks = math.ceil(num_visible / config.block_size)
            # A query that stands beyond the last key (q_start) has its own block there; what is left of the window counts.
            own = p // config.block_size
            for g in range(config.num_kv_heads):

                def rank(b: int) -> tuple:
                    forced = b < config.num_init_blocks or b > own - config.num_local_blocks
                    value = float(scores[t, g, b])
                    return (not forced, math.isnan(value), 0.0 if math.isnan(value) else -value, b)

                chosen = sorted(sorted(range(num_blocks), key=rank)[: config.top_k])
                result[t, g, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return result


def attention_mask(layout: Layout, config: MsaConfig, block_ids: torch.Tensor | None) -> torch.Tensor:
    """bool [T, Hq, S]: who attends to whom. Without block_ids: every visible key."""
    num_q, num_k = sum(layout.seqlens_q), sum(layout.seqlens_k)
    mask = torch.zeros((num_q, config.num_q_heads, num_k), dtype=torch.bool)
    for tq, tk, positions in layout.rows():
        keys = torch.arange(tk.stop - tk.start)
        allowed = (keys <= positions[:, None])[:, None].expand(-1, config.num_kv_heads, -1)
        if block_ids is not None:
            in_list = (block_ids[tq, :, None, :] == (keys // config.block_size)[None, None, :, None]).any(-1)
            allowed = allowed & in_list
        mask[tq, :, tk] = allowed.repeat_interleave(config.group_size, dim=1)
    return mask


def attention(data: Data, config: MsaConfig, mask: torch.Tensor, dtype: torch.dtype = torch.float64):
    """(out, lse) of masked softmax attention, computed in `dtype` throughout."""
    q, k, v = (x.to(dtype) for x in (data.q, data.k, data.v))
    k, v = (x.repeat_interleave(config.group_size, dim=1) for x in (k, v))
    score = torch.einsum("thd,jhd->thj", q, k) * config.effective_softmax_scale
    score = score.masked_fill(~mask, -math.inf)
    if score.shape[-1] == 0:
        return torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, dtype=dtype)
    some = mask.any(-1, keepdim=True)
    probability = torch.softmax(score.masked_fill(~some, 0.0), dim=-1).masked_fill(~mask, 0.0)
    return torch.einsum("thj,jhd->thd", probability, v), torch.logsumexp(score, dim=-1)


def block_max(data: Data, layout: Layout, config: MsaConfig) -> torch.Tensor:
    width = max([0, *(math.ceil(n / config.block_size) for n in layout.seqlens_k)])
    result = torch.full((data.q.shape[0], config.num_q_heads, width), -math.inf, dtype=torch.float64)
    k = data.k.double().repeat_interleave(config.group_size, dim=1)
    score = torch.einsum("thd,jhd->thj", data.q.double(), k) * config.effective_softmax_scale
    score = score.masked_fill(~attention_mask(layout, config, None), -math.inf)
    for tq, tk, _ in layout.rows():
        for b in range(math.ceil((tk.stop - tk.start) / config.block_size)):
            first = tk.start + b * config.block_size
            result[tq, :, b] = score[tq, :, first : min(first + config.block_size, tk.stop)].amax(-1)
    return result


def assert_attention(out, lse, data: Data, config: MsaConfig, mask: torch.Tensor) -> None:
    """At most twice the error of a plain PyTorch computation in the storage type, plus a small absolute term; lse within 1e-3."""
    want, want_lse = attention(data, config, mask)
    assert out.dtype == data.q.dtype and out.shape == want.shape
    if out.numel() == 0:
        return
    if data.q.dtype == torch.float64:
        bound = 1e-12
    else:
        plain, _ = attention(data, config, mask, data.q.dtype)
        bound = 2 * (plain.double() - want).abs().max().item() + torch.finfo(data.q.dtype).eps * want.abs().max().item()
    assert (out.double() - want).abs().max().item() <= bound
    empty = ~mask.any(-1)
    assert torch.equal(lse[empty], torch.full_like(lse[empty], -math.inf))
    assert not out[empty].any()
    assert (lse.double() - want_lse)[~empty].abs().max().item() <= 1e-3 if (~empty).any() else True


def to_pages(data: Data, layout: Layout, config: MsaConfig, rng: torch.Generator, num_spare: int = 3) -> tuple[Data, Batch]:
    """The same keys in shuffled pages. Every slot that no token owns holds NaN, in unused pages too."""
    size = config.block_size
    counts = [math.ceil(n / size) for n in layout.seqlens_k]
    order = torch.randperm(sum(counts) + num_spare, generator=rng)
    dtype = data.k.dtype
    shape = (len(order), config.num_kv_heads, size, config.head_dim)
    k, v = torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
    k_idx = torch.full((len(order), size, config.index_dim), math.nan, dtype=dtype)
    page_table = torch.full((len(counts), max([1, *counts])), -1, dtype=torch.int32)
    used = 0
    for row, (_, tk, _) in enumerate(layout.rows()):
        for b in range(counts[row]):
            page = int(order[used])
            used += 1
            page_table[row, b] = page
            tokens = slice(tk.start + b * size, min(tk.start + (b + 1) * size, tk.stop))
            num = tokens.stop - tokens.start
            k[page, :, :num] = data.k[tokens].transpose(0, 1)
            v[page, :, :num] = data.v[tokens].transpose(0, 1)
            k_idx[page, :num] = data.k_idx[tokens]
    packed = layout.batch()
    batch = Batch(
        cu_seqlens_q=packed.cu_seqlens_q,
        seqlens_k=torch.tensor(layout.seqlens_k, dtype=torch.int32),
        page_table=page_table,
        q_start=packed.q_start,
    )
    return Data(q=data.q, k=k, v=v, q_idx=data.q_idx, k_idx=k_idx), batch


def index_kl_loss(data: Data, config: MsaConfig, mask: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """KL(teacher || student) over the keys of `mask` [T, Hq, S], averaged over tokens and groups; the teacher is a constant."""
    num_q, group = data.q.shape[0], config.group_size
    if num_q == 0 or data.k.shape[0] == 0:
        return 0.0 * (data.q_idx.sum() + data.k_idx.sum()).to(dtype)
    some = mask.any(-1, keepdim=True)
    with torch.no_grad():
        k = data.k.to(dtype).repeat_interleave(group, dim=1)
        score = torch.einsum("thd,jhd->thj", data.q.to(dtype), k) * config.effective_softmax_scale
        by_head = torch.softmax(score.masked_fill(~mask, -math.inf).masked_fill(~some, 0.0), dim=-1).masked_fill(~mask, 0.0)
        teacher = by_head.unflatten(1, (config.num_kv_heads, group)).mean(2)
    mask, some = mask[:, ::group], some[:, ::group]
    score = torch.einsum("tgd,jd->tgj", data.q_idx.to(dtype), data.k_idx.to(dtype)) * config.effective_index_scale
    student = torch.log_softmax(score.masked_fill(~mask, -math.inf).masked_fill(~some, 0.0), dim=-1).masked_fill(~mask, 0.0)
    return (torch.xlogy(teacher, teacher) - teacher * student).sum() / (num_q * config.num_kv_heads)
