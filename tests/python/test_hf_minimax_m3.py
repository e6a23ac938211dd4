"""transformers' own MiniMax-M3 as an independent golden: the same logits from its code and from ours, with blocks really dropped."""

import copy
import math

import pytest

torch = pytest.importorskip("torch")
m3 = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")

from transformers import DynamicCache, StaticCache  # noqa: E402

import openmsa  # noqa: E402
from openmsa import hf  # noqa: E402

VOCAB, LENGTH, TOP_K, BLOCK = 128, 400, 4, 16
SPARSE_LAYERS = [1, 2, 3]


def tiny_m3(**overrides):
    """One dense layer, then three sparse ones; 8 query heads in 4 KV groups; 25 blocks, of which each list keeps 4."""
    torch.manual_seed(0)
    values = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=32, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=16, dense_intermediate_size=64, shared_intermediate_size=32, num_local_experts=4, num_experts_per_tok=2,
        index_n_heads=4, index_head_dim=16, index_block_size=BLOCK, index_topk_blocks=TOP_K,
        layer_types=["full_attention"] + ["minimax_m3_sparse"] * 3, mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=0, max_position_embeddings=2048,
    )  # fmt: skip
    model = m3.MiniMaxM3VLForCausalLM(m3.MiniMaxM3VLTextConfig(**(values | overrides))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # w = 0, the initial value, would hide a gain that is (1+w) twice or w alone
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def models():
    golden = tiny_m3()
    return golden, hf.use_openmsa(copy.deepcopy(golden))


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def tokens(length=LENGTH, batch=1, seed=1):
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(a, b, tolerance=2e-5):
    assert a.shape == b.shape
    assert (a - b).abs().max().item() <= tolerance * b.abs().max().item()


def golden_lists(model, ids):
    """What transformers' indexers chose, per sparse layer: int [T, Hkv, k], ascending, -1 in the tail."""
    found = {}

    def keep(layer):
        def hook(module, args, output):
            big = output[0].transpose(0, 1).masked_fill(output[0].transpose(0, 1) < 0, 1 << 30).sort(-1).values
            found[layer] = big.masked_fill(big == 1 << 30, -1)

        return hook

    hooks = [model.model.layers[i].self_attn.indexer.register_forward_hook(keep(i)) for i in SPARSE_LAYERS]
    try:
        model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def test_prefill(models):
    golden, ours = models
    hf.msa_stats(ours, reset=True)
    close(ours(tokens()).logits, golden(tokens()).logits)
    hf.assert_sparse(ours, dropped=True)
    stats = hf.msa_stats(ours)
    assert stats[0].dense_queries == LENGTH and stats[0].sparse_queries == 0
    for layer in SPARSE_LAYERS:
        assert stats[layer].sparse_queries == LENGTH and stats[layer].dense_queries == 0


def test_prefill_by_the_oracle(models):
    golden, _ = models
    oracle = hf.use_openmsa(copy.deepcopy(golden), backend="reference")
    close(oracle(tokens()).logits, golden(tokens()).logits)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 79, 80, 81])
def test_lengths_around_block_borders(models, length):
    golden, ours = models
    close(ours(tokens(length)).logits, golden(tokens(length)).logits)


def test_lists_are_the_same_and_differ_between_groups(models):
    """Fault 14, and the reason this golden means something: blocks are dropped, and each group drops others."""
    golden, ours = models
    ids = tokens()
    expected = golden_lists(golden, ids)
    with hf.record_selection(ours, max_queries=None, with_quality=False) as recorded:
        ours(ids)
    for layer in SPARSE_LAYERS:
        lists = recorded.selections[layer][0].block_ids.long()
        assert torch.equal(lists[..., : expected[layer].shape[-1]], expected[layer])
        late = lists[TOP_K * BLOCK :]
        assert bool((late >= 0).all()) and bool((late.max(-1).values >= TOP_K).all())
        assert bool((late[:, 0] != late[:, 1]).any(-1).float().mean() > 0.5)
        assert len({tuple(late[-1, g].tolist()) for g in range(4)}) > 1


def test_sparse_differs_from_dense():
    """With every block kept the logits are others, so the dropped blocks do matter to the comparison above."""
    sparse = hf.use_openmsa(tiny_m3())(tokens()).logits
    dense = hf.use_openmsa(tiny_m3(index_topk_blocks=25))(tokens()).logits
    assert (sparse - dense).abs().max() > 0.1 * dense.abs().max()


@pytest.mark.parametrize("own_cache", [False, True])
def test_cached_decoding(models, own_cache):
    golden, ours = models
    ids = tokens()
    a = DynamicCache(config=golden.config)
    b = hf.MsaCache(ours.config) if own_cache else DynamicCache(config=ours.config)
    start = 0
    for size in (337, 1, 1, 14, 1, 1, 1, 16, 5, 1, 1, 1, 20):  # prefill, single tokens, several tokens, over block borders
        step = ids[:, start : start + size]
        close(ours(step, past_key_values=b).logits, golden(step, past_key_values=a).logits)
        start += size
    assert start == LENGTH == a.get_seq_length() == b.get_seq_length()


@pytest.mark.parametrize("own_cache", [False, True])
def test_generate(models, own_cache):
    golden, ours = models
    ids = tokens(300, batch=2)
    expected = golden.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    cache = {"past_key_values": hf.MsaCache(ours.config)} if own_cache else {}
    found = ours.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, **cache)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("pad", [1, 15, 16, 17])
@pytest.mark.parametrize("own_cache", [False, True])
def test_padding_counts_from_the_first_real_token(models, pad, own_cache):
    """Fault 16. transformers' own code shifts its block borders under left padding (it says so), so the golden is the unpadded row."""
    golden, ours = models
    short, long = tokens(200 - pad, seed=2), tokens(200)
    expected_short, expected_long = golden(short).logits, golden(long).logits
    filler = torch.zeros(1, pad, dtype=torch.long)
    for left in (True, False):
        ids = torch.cat([long, torch.cat([filler, short] if left else [short, filler], dim=1)])
        mask = (ids != 0).long()
        cache = hf.MsaCache(ours.config) if own_cache else DynamicCache(config=ours.config)
        first = ours(ids[:, :150], attention_mask=mask[:, :150], past_key_values=cache).logits
        rest = ours(ids[:, 150:], attention_mask=mask, past_key_values=cache).logits
        logits = torch.cat([first, rest], dim=1)
        close(logits[:1], expected_long)
        close(logits[1:, pad:] if left else logits[1:, : 200 - pad], expected_short)


def test_a_right_padded_batch_equals_transformers(models):
    golden, ours = models
    ids = tokens(200, batch=2)
    mask = torch.ones_like(ids)
    mask[1, 170:] = 0
    a, b = golden(ids, attention_mask=mask).logits, ours(ids, attention_mask=mask).logits
    close(b[mask.bool()], a[mask.bool()])


def test_index_keys_of_the_cache_matter(models):
    """Fault 22, with the cache transformers makes."""
    _, ours = models
    ids = tokens()
    lists = []
    for zero in (False, True):
        cache = ours(ids[:, :-1]).past_key_values
        if zero:
            for layer in SPARSE_LAYERS:
                cache.layers[layer].idx_keys.zero_()
        with hf.record_selection(ours, with_quality=False) as recorded:
            ours(ids[:, -1:], past_key_values=cache)
        lists.append([recorded.selections[layer][0].block_ids for layer in SPARSE_LAYERS])
    assert not any(torch.equal(a, b) for a, b in zip(*lists, strict=True))


def test_norm_gain_is_one_plus_w(models):
    """Fault 21: w = 0 gives gain exactly 1, and our layers apply the gain once, as the golden does with w from N(0, 0.3)."""
    norm = m3.MiniMaxM3VLRMSNorm(16, eps=0.0)
    x = torch.full((1, 16), 3.0)
    assert torch.equal(norm(x), torch.ones(1, 16))
    golden, ours = models
    for layer in SPARSE_LAYERS:
        for a, b in zip(
            golden.model.layers[layer].self_attn.parameters(), ours.model.layers[layer].self_attn.parameters(), strict=True
        ):
            assert torch.equal(a, b)
    changed = copy.deepcopy(ours)
    for layer in changed.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight += 1.0  # what a gain applied twice would look like
    assert (changed(tokens()).logits - ours(tokens()).logits).abs().max() > 0.1


def test_swigluoai_has_its_alpha_and_beta(models):
    """Fault 20: gate 2, up 0 gives 1.936; gate 9, up 9 is clamped to 7, 7."""
    _, ours = models
    experts = ours.model.layers[2].mlp.experts
    for gate, up, expected in ((2.0, 0.0, 1.936), (9.0, 9.0, 7 / (1 + math.exp(-1.702 * 7)) * 8)):
        assert experts._apply_gate(torch.tensor([gate, up])).item() == pytest.approx(expected, abs=1e-3)


def test_state_dict_and_config_stay_transformers_own(models, tmp_path):
    golden, ours = models
    assert list(ours.state_dict()) == list(golden.state_dict())
    ours.save_pretrained(tmp_path)
    loaded = m3.MiniMaxM3VLForCausalLM.from_pretrained(tmp_path)
    close(loaded(tokens(100)).logits, golden(tokens(100)).logits, 1e-6)
    with pytest.raises(openmsa.UnsupportedError, match="has no MSA layers"):
        hf.msa_stats(loaded)
    close(hf.use_openmsa(loaded)(tokens(100)).logits, golden(tokens(100)).logits)


def test_refusals(models):
    _, ours = models
    with pytest.raises(openmsa.UnsupportedError, match="output_attentions"):
        ours(tokens(20), output_attentions=True)
    with pytest.raises(openmsa.UnsupportedError, match="Static and sliding caches are not supported"):
        ours(tokens(20), past_key_values=StaticCache(config=ours.config, max_cache_len=64))
    with pytest.raises(openmsa.UnsupportedError, match="without the model's config"):
        ours(tokens(20), past_key_values=DynamicCache())
    with pytest.raises(openmsa.UnsupportedError, match="keeps no index keys"):
        dense = copy.copy(ours.config)
        dense.layer_types = ["full_attention"] * 4
        ours(tokens(20), past_key_values=DynamicCache(config=dense))


def test_a_config_that_names_no_sparse_layer_is_refused():
    """Fault 24: sparse settings at the wrong level leave layer_types all dense."""
    with pytest.raises(openmsa.InvalidArgumentError, match="names no 'minimax_m3_sparse' layer"):
        hf.use_openmsa(tiny_m3(layer_types=["full_attention"] * 4))
    with pytest.raises(openmsa.UnsupportedError, match="index_n_heads is 2"):
        hf.use_openmsa(tiny_m3(index_n_heads=2))
    with pytest.raises(openmsa.UnsupportedError, match="exactly one"):
        hf.use_openmsa(torch.nn.Linear(2, 2))
