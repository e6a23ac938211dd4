"""Random layouts, configurations and page tables: every backend against the golden computation."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import golden
import openmsa
from openmsa import MsaConfig
from test_ops import all_outputs, check_all

SETTINGS = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@st.composite
def configs(draw: st.DrawFn) -> MsaConfig:
    num_kv_heads = draw(st.integers(1, 3))
    top_k = draw(st.integers(1, 5))
    num_init_blocks = draw(st.integers(0, min(2, top_k)))
    return MsaConfig(
        num_q_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=16 * draw(st.integers(1, 3)),
        index_dim=16 * draw(st.integers(1, 3)),
        block_size=16 * draw(st.integers(1, 2)),
        top_k=top_k,
        num_init_blocks=num_init_blocks,
        num_local_blocks=draw(st.integers(0, top_k - num_init_blocks)),
    )


@st.composite
def layouts(draw: st.DrawFn) -> golden.Layout:
    num_seqs = draw(st.integers(0, 4))
    lengths = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 64, 100, 130])
    seqlens_k = [draw(lengths) for _ in range(num_seqs)]
    seqlens_q = [draw(st.sampled_from([0, 1, 4, min(n, 20), n])) for n in seqlens_k]
    starts = [draw(st.integers(-3, n + 3)) for n in seqlens_k] if draw(st.booleans()) else None
    return golden.Layout(seqlens_q, seqlens_k, starts)


@SETTINGS
@given(
    config=configs(), layout=layouts(), paged=st.booleans(), backend=st.sampled_from(["reference", "cpu"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_layout(config, layout, paged, backend, dtype, seed):
    rng = torch.Generator().manual_seed(seed)
    data = golden.make_data(layout, config, rng, dtype)
    inputs, batch = golden.to_pages(data, layout, config, rng) if paged else (data, layout.batch())
    check_all(all_outputs(inputs, batch, config, backend=backend), data, layout, config)


@SETTINGS
@given(config=configs(), layout=layouts(), seed=st.integers(0, 2**31), backend=st.sampled_from(["reference", "cpu"]))
def test_selection_on_real_numbers(config, layout, seed, backend):
    """Rounded sums may swap near-equal blocks, so the rule is: nothing left out beats anything chosen by more than the error bound."""
    rng = torch.Generator().manual_seed(seed)
    data = golden.make_data(layout, config, rng, exact_index=False)
    block_ids = openmsa.index_select(data.q_idx, data.k_idx, layout.batch(), config, backend=backend)
    scores = golden.block_scores(data, layout, config)
    want = golden.select(scores, layout, config)
    length = data.q_idx.norm(dim=-1).amax() * data.k_idx.norm(dim=-1).amax() if want.numel() and data.k_idx.numel() else 0.0
    bound = config.index_dim * torch.finfo(torch.float32).eps * float(length)
    for t, g in torch.cartesian_prod(torch.arange(want.shape[0]), torch.arange(want.shape[1])).tolist():
        found, right = set(block_ids[t, g].tolist()) - {-1}, set(want[t, g].tolist()) - {-1}
        assert len(found) == len(right) and block_ids[t, g, : len(found)].tolist() == sorted(found)
        if found != right:
            assert scores[t, g, list(found - right)].min() >= scores[t, g, list(right - found)].max() - 2 * bound
