"""openmsa.hf.convert on tiny random Llama models, against a plain PyTorch golden that shares no code with it."""

import copy
import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache  # noqa: E402

import openmsa  # noqa: E402
from openmsa import hf, quality  # noqa: E402

VOCAB = 97


def tiny_llama(layers=3, seed=0, **overrides):
    torch.manual_seed(seed)
    values = dict(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=6, num_key_value_heads=2,
        head_dim=16, initializer_range=0.2, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(values | overrides))).eval()


def tokens(length, batch=1, seed=1):
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


# --- the golden: stock Llama, whose attention function builds a boolean mask from the training-free index ---------------------

GOLDEN = {}


def _golden_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """query [B, Hq, T, D] and key [B, Hkv, S, D] after rotary, no padding. The mask is boolean: an additive one leaks in bf16."""
    o = GOLDEN
    batch, num_q_heads, num_queries, _ = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    position = torch.arange(num_queries) + num_keys - num_queries
    visible = torch.arange(num_keys) <= position[:, None]
    keep = visible.expand(batch, num_q_heads, num_queries, num_keys)
    if module.layer_idx not in o["dense_layers"]:
        group = num_q_heads // num_kv_heads
        mean_q = query.double().unflatten(1, (num_kv_heads, group)).mean(2)
        scores = (mean_q @ key.double().transpose(2, 3)).masked_fill(~visible, -math.inf)
        block_of_key = torch.arange(num_keys) // o["block_size"]
        num_blocks = int(block_of_key[-1]) + 1
        best = torch.full((batch, num_kv_heads, num_queries, num_blocks), -math.inf, dtype=torch.float64)
        best = best.scatter_reduce(3, block_of_key.expand(scores.shape), scores, "amax")
        own = position // o["block_size"]
        block = torch.arange(num_blocks)
        forced = (block <= own[:, None]) & ((block > own[:, None] - o["num_local_blocks"]) | (block < o["num_init_blocks"]))
        best = best.masked_fill(forced, math.inf)
        rank = best.argsort(dim=3, descending=True, stable=True).argsort(dim=3)
        chosen = (rank < o["top_k"]) & (best > -math.inf)
        keep = keep & chosen[..., block_of_key].repeat_interleave(group, dim=1)
    group = num_q_heads // num_kv_heads
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), attn_mask=keep, scale=scaling
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("openmsa_test_golden", _golden_attention)


class golden_model:
    """The dense model, run as MSA by the golden attention function."""

    def __init__(self, model, **options):
        options = dict(block_size=16, top_k=3, num_init_blocks=0, num_local_blocks=1, dense_layers=()) | options
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("openmsa_test_golden")
        self.options = options

    def logits(self, ids):
        GOLDEN.update(self.options)
        return self.model(ids, use_cache=False).logits

    def greedy(self, ids, count):
        for _ in range(count):
            ids = torch.cat([ids, self.logits(ids)[:, -1:].argmax(-1)], dim=1)
        return ids


def close(a, b, tolerance=2e-4):
    assert a.shape == b.shape
    assert (a - b).abs().max().item() <= tolerance * max(1.0, b.abs().max().item())


# --- results ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        dict(block_size=16, top_k=3),
        dict(block_size=16, top_k=4, num_init_blocks=1, num_local_blocks=2),
        dict(block_size=32, top_k=2, dense_layers=(0,)),
        dict(block_size=16, top_k=2, dense_layers=(1, 2)),
    ],
)
@pytest.mark.parametrize("length", [1, 15, 17, 209])
def test_logits_equal_the_golden(options, length):
    model = tiny_llama()
    sparse = hf.convert(model, **options)
    ids = tokens(length, batch=2)
    expected = golden_model(model, **options).logits(ids)
    close(sparse(ids, use_cache=False).logits, expected)
    close(sparse(ids).logits, expected)
    hf.assert_sparse(sparse, dropped=length == 209)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_index_slots_equal_index_queries_with_zeros(backend):
    """The starting index as the issue words it, zeros and all, against the way it is computed: one group's slice at a time."""
    model = tiny_llama(layers=1)
    sparse = hf.convert(model, block_size=16, top_k=3, backend=backend)
    ids = tokens(150)
    with hf.record_selection(sparse, max_queries=None, with_quality=False) as recorded:
        sparse(ids)
    seen = {}

    def keep(module, args, output):
        seen["q"], seen["k"] = args[1][0], args[2][0]

    handle = sparse.model.layers[0].self_attn.index.register_forward_hook(keep)
    sparse(ids)
    handle.remove()
    q_idx = torch.zeros(150, 2, 32)
    for g in range(2):
        q_idx[:, g, 16 * g : 16 * g + 16] = seen["q"][:, 3 * g : 3 * g + 3].mean(1)
    config = sparse.model.layers[0].self_attn.msa_config
    assert config.index_dim == 32
    ids = openmsa.index_select(q_idx, seen["k"].reshape(150, 32), openmsa.Batch.single(150), config, backend=backend)
    assert torch.equal(recorded.selections[0][0].block_ids, ids)


def test_enough_blocks_give_the_dense_model():
    model = tiny_llama()
    ids = tokens(150)
    dense = model(ids).logits
    close(hf.convert(model, block_size=16, top_k=10)(ids).logits, dense)
    dropped = hf.convert(model, block_size=16, top_k=2)(ids).logits
    assert (dropped - dense).abs().max() > 0.1  # the comparison above would otherwise prove little


def test_generate_equals_the_golden():
    model = tiny_llama()
    sparse = hf.convert(model, block_size=16, top_k=3)
    ids = tokens(120)
    expected = golden_model(model).greedy(ids, 40)
    assert torch.equal(sparse.generate(ids, max_new_tokens=40, do_sample=False), expected)
    assert torch.equal(sparse.generate(ids, max_new_tokens=40, do_sample=False, use_cache=False), expected)
    # Prompt lookup proposes several tokens per step and takes rejected ones back with Cache.crop.
    assert torch.equal(sparse.generate(ids, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=4), expected)


def test_generate_reading_the_prompt_in_chunks():
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=3)
    ids = tokens(120)
    expected = sparse.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(sparse.generate(ids, max_new_tokens=20, do_sample=False, prefill_chunk_size=35), expected)


@pytest.mark.parametrize("sizes", [[1] * 70, [16] * 5, [17, 15, 33, 5], [64, 1, 1, 4]])
def test_chunked_prefill_equals_one_pass(sizes):
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=2)
    ids = tokens(sum(sizes), batch=2)
    expected = sparse(ids).logits
    cache, start = DynamicCache(config=sparse.config), 0
    for size in sizes:
        out = sparse(ids[:, start : start + size], past_key_values=cache)
        close(out.logits, expected[:, start : start + size])
        start += size
    assert cache.get_seq_length() == sum(sizes)


@pytest.mark.parametrize("pad", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_move_block_borders(pad, side):
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=2)
    long, short = tokens(100), tokens(100 - pad, seed=2)
    filler = torch.zeros(1, pad, dtype=torch.long)
    padded = torch.cat([filler, short] if side == "left" else [short, filler], dim=1)
    ids = torch.cat([long, padded])
    mask = (ids != 0).long()
    real = slice(pad, 100) if side == "left" else slice(0, 100 - pad)
    for cached in (False, True):
        out = sparse(ids, attention_mask=mask, use_cache=cached)
        close(out.logits[:1], sparse(long).logits)
        close(out.logits[1:, real], sparse(short).logits)


@pytest.mark.parametrize("pad", [1, 16, 23])
def test_generate_with_left_padding(pad):
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=2)
    long, short = tokens(90), tokens(90 - pad, seed=2)
    ids = torch.cat([long, torch.cat([torch.zeros(1, pad, dtype=torch.long), short], dim=1)])
    out = sparse.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=20, do_sample=False)
    assert torch.equal(out[:1], sparse.generate(long, max_new_tokens=20, do_sample=False))
    assert torch.equal(out[1:, pad:], sparse.generate(short, max_new_tokens=20, do_sample=False))


def test_rows_without_tokens_are_legal():
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=2)
    ids = tokens(40, batch=2)
    mask = torch.ones_like(ids)
    mask[1] = 0
    out = sparse(ids, attention_mask=mask)
    close(out.logits[:1], sparse(ids[:1]).logits)
    assert bool(out.logits.isfinite().all())


def test_bfloat16_follows_float32():
    model = tiny_llama(initializer_range=0.1)
    ids = tokens(150)
    half = hf.convert(copy.deepcopy(model).bfloat16(), block_size=16, top_k=10)(ids).logits.float()
    plain = copy.deepcopy(model).bfloat16()(ids).logits.float()
    exact = model(ids).logits
    assert (half - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-2


def test_speculative_rows_equal_single_steps():
    """Fault 25: four rows in one step against four single steps, same lists and same outputs."""
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=3)
    ids = tokens(130)
    caches = [sparse(ids[:, :126]).past_key_values for _ in range(2)]
    with hf.record_selection(sparse, max_queries=None, with_quality=False) as once:
        four = sparse(ids[:, 126:], past_key_values=caches[0]).logits
    with hf.record_selection(sparse, max_queries=None, with_quality=False) as stepwise:
        single = torch.cat([sparse(ids[:, i : i + 1], past_key_values=caches[1]).logits for i in range(126, 130)], dim=1)
    close(four, single)
    for layer, selections in once.selections.items():
        steps = torch.cat([s.block_ids for s in stepwise.selections[layer]])
        assert torch.equal(selections[0].block_ids, steps)


# --- the cache ----------------------------------------------------------------------------------------------------------------


def test_index_keys_decide_the_selection():
    """Fault 22: 2,049 tokens at block 128 and k 16; zeroed index keys must give other lists than the real ones."""
    sparse = hf.convert(tiny_llama(layers=1))
    ids = tokens(2050)
    lists = []
    for zero in (False, True):
        cache = sparse(ids[:, :2049]).past_key_values
        if zero:
            cache.layers[0].index_keys.zero_()
        with hf.record_selection(sparse, with_quality=False) as recorded:
            sparse(ids[:, 2049:], past_key_values=cache)
        lists.append(recorded.selections[0][0].block_ids)
    assert not torch.equal(lists[0], lists[1])


def test_copied_and_cropped_cache_continue_alike():
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=2)
    ids = tokens(100)
    expected = sparse(ids).logits
    cache = sparse(ids[:, :80]).past_key_values
    copied = copy.deepcopy(cache)
    sparse(tokens(37, seed=9), past_key_values=cache)
    cache.crop(-57)
    assert cache.get_seq_length() == 60
    close(sparse(ids[:, 60:], past_key_values=cache).logits, expected[:, 60:])
    close(sparse(ids[:, 80:], past_key_values=copied).logits, expected[:, 80:])
    copied.reset()
    close(sparse(ids.repeat(2, 1), past_key_values=copied).logits[1:], expected)


def test_moved_rows_keep_their_index_keys():
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=2)
    ids = tokens(90, batch=3)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    expected = sparse(ids, attention_mask=mask).logits[:, 80:]

    def prefilled():
        return sparse(ids[:, :80], attention_mask=mask[:, :80]).past_key_values

    order = torch.tensor([2, 0, 1])
    cache = prefilled()
    cache.reorder_cache(order)
    close(sparse(ids[order, 80:], attention_mask=mask[order], past_key_values=cache).logits, expected[order])
    cache = prefilled()
    cache.batch_select_indices(torch.tensor([1]))
    close(sparse(ids[1:2, 80:], attention_mask=mask[1:2], past_key_values=cache).logits, expected[1:2])
    cache = prefilled()
    cache.batch_repeat_interleave(2)
    twice = torch.tensor([0, 0, 1, 1, 2, 2])
    close(sparse(ids[twice, 80:], attention_mask=mask[twice], past_key_values=cache).logits, expected[twice])


def test_beam_search_with_and_without_cache():
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=2)
    ids = tokens(70)
    cached = sparse.generate(ids, max_new_tokens=12, num_beams=3, do_sample=False)
    plain = sparse.generate(ids, max_new_tokens=12, num_beams=3, do_sample=False, use_cache=False)
    assert torch.equal(cached, plain)


def test_unread_slots_may_hold_nan():
    """Faults 4 and 18: what lies past the live tokens in the pages is never read."""
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=2)
    ids = tokens(101)
    expected = sparse(ids).logits[:, 100:]
    cache = sparse(ids[:, :100]).past_key_values
    for layer in cache.layers:
        for pages in (layer.keys, layer.values):
            pages[:, -1, :, 100 % 16 :] = math.nan
        layer.index_keys[:, -1, 100 % 16 :] = math.nan
    close(sparse(ids[:, 100:], past_key_values=cache).logits, expected)


# --- saved and loaded; nothing engages or disengages in silence -------------------------------------------------------------------


def test_save_and_load(tmp_path):
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=3, num_init_blocks=1, dense_layers=1)
    ids = tokens(120)
    sparse.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, hf.MsaLlamaForCausalLM)
    assert loaded.config.msa == sparse.config.msa
    close(loaded(ids).logits, sparse(ids).logits, 1e-6)
    stats = hf.msa_stats(loaded)
    assert [s.sparse_queries for s in stats.values()] == [0, 120, 120]
    assert [s.dense_queries for s in stats.values()] == [120, 0, 0]
    assert [s.dropped_queries for s in stats.values()] == [0, 120 - 48, 120 - 48]
    with pytest.raises(openmsa.UnsupportedError, match="runs with 'openmsa' only"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")


def test_a_model_made_from_its_config():
    config = hf.convert(tiny_llama(), block_size=16, top_k=2).config
    made = hf.MsaLlamaForCausalLM(hf.MsaLlamaConfig(**config.to_dict())).eval()
    assert not any(p.is_meta for p in made.parameters())
    assert 0.1 < made.model.layers[1].self_attn.q_proj.weight.std() < 0.3  # initializer_range, so transformers has initialised it
    assert bool(made(tokens(60)).logits.isfinite().all())
    hf.assert_sparse(made, dropped=True)


def test_gradients_are_those_of_the_dense_model_when_nothing_is_dropped():
    dense = tiny_llama()
    sparse = hf.convert(dense, block_size=16, top_k=4)  # shares the weights, so gradients would land in the same place
    weights = [p for p in dense.parameters() if p.requires_grad]
    ids = tokens(60)
    with torch.enable_grad():
        want = torch.autograd.grad(dense(ids, labels=ids).loss, weights)
        found = torch.autograd.grad(sparse(ids, labels=ids, use_cache=False).loss, weights)
    for x, y in zip(found, want):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_gradients_through_a_cache_are_refused_and_not_dropped():
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=2)
    with torch.enable_grad(), pytest.raises(openmsa.UnsupportedError, match="Pass use_cache=False to train"):
        sparse(tokens(20))


def test_weights_are_shared_and_the_dense_model_stays():
    model = tiny_llama()
    ids = tokens(60)
    before = model(ids).logits
    sparse = hf.convert(model, block_size=16, top_k=2)
    assert {p.data_ptr() for p in sparse.parameters()} == {p.data_ptr() for p in model.parameters()}
    assert torch.equal(model(ids).logits, before)


def test_assert_sparse_tells_what_did_not_run():
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=3)
    with pytest.raises(AssertionError, match="layer 0 is meant to be sparse, but no query"):
        hf.assert_sparse(sparse)
    sparse(tokens(48))
    hf.assert_sparse(sparse)
    with pytest.raises(AssertionError, match="more blocks than top_k"):
        hf.assert_sparse(sparse, dropped=True)
    sparse(tokens(49))
    hf.assert_sparse(sparse, dropped=True)
    hf.msa_stats(sparse, reset=True)
    with pytest.raises(AssertionError):
        hf.assert_sparse(sparse)
    with pytest.raises(openmsa.UnsupportedError, match="has no MSA layers"):
        hf.msa_stats(tiny_llama())


# --- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(blocksize=16), "unknown MSA option 'blocksize'"),
        (dict(top_k=1, num_init_blocks=1), "top_k"),
        (dict(dense_layers=3), "nothing is sparse"),
        (dict(dense_layers=[7]), "names layer 7"),
        (dict(index_branch="magic"), "unknown index_branch 'magic'"),
        (dict(config=3), "config is a int"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(openmsa.Error, match=text):
        hf.convert(tiny_llama(), **options)


def test_options_at_the_wrong_level():
    """Fault 24: transformers keeps unknown config keys without a word."""
    with pytest.raises(openmsa.InvalidArgumentError, match="block_size stands at the top level"):
        hf.MsaLlamaConfig(block_size=16)
    with pytest.raises(openmsa.InvalidArgumentError, match="unknown MSA option 'topk'"):
        hf.MsaLlamaConfig(msa={"topk": 4})


def test_wrong_models():
    with pytest.raises(openmsa.UnsupportedError, match="takes LlamaForCausalLM"):
        hf.convert(torch.nn.Linear(2, 2))
    with pytest.raises(openmsa.InvalidArgumentError, match="MSA layers already"):
        hf.convert(hf.convert(tiny_llama()))
    with pytest.raises(openmsa.UnsupportedError, match="attention_dropout"):
        hf.convert(tiny_llama(attention_dropout=0.1))
    stock = tiny_llama()
    stock.set_attn_implementation("openmsa")
    with pytest.raises(openmsa.UnsupportedError, match="does not turn LlamaAttention into sparse"):
        stock(tokens(5))


def test_refused_calls():
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=2)
    ids = tokens(40)
    with pytest.raises(openmsa.UnsupportedError, match="output_attentions"):
        sparse(ids, output_attentions=True)
    with pytest.raises(openmsa.UnsupportedError, match="ready-made Tensor mask"):
        sparse(ids, attention_mask=torch.ones(1, 1, 40, 40, dtype=torch.bool))
    with pytest.raises(openmsa.InvalidArgumentError, match="attention_mask has shape"):
        sparse(ids, attention_mask=torch.ones(1, 39, dtype=torch.long))
    with pytest.raises(openmsa.UnsupportedError, match="packed in one row"):
        sparse(ids, position_ids=torch.cat([torch.arange(20), torch.arange(20)])[None], use_cache=False)
    sparse.set_attn_implementation("sdpa")
    with pytest.raises(openmsa.UnsupportedError, match="another attn_implementation"):
        sparse(ids)


def test_refused_caches():
    model = tiny_llama()
    sparse = hf.convert(model, block_size=16, top_k=2)
    ids = tokens(40)
    with pytest.raises(openmsa.UnsupportedError, match="without the model's config"):
        sparse(ids, past_key_values=DynamicCache())
    with pytest.raises(openmsa.UnsupportedError, match="keeps no index keys"):
        sparse(ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(openmsa.UnsupportedError, match="offloaded"):
        sparse(ids, past_key_values=DynamicCache(config=sparse.config, offloading=True))
    with pytest.raises(openmsa.UnsupportedError, match="static"):
        StaticCache(config=sparse.config, max_cache_len=64)
    with pytest.raises(openmsa.UnsupportedError, match="not converted"):
        model(ids, past_key_values=DynamicCache(config=sparse.config))
    cache = sparse(ids.repeat(2, 1)).past_key_values
    with pytest.raises(openmsa.InvalidArgumentError, match="cache holds 2 rows, the step has 1"):
        sparse(ids[:, :1], past_key_values=cache)
    other = hf.convert(model, block_size=32, top_k=2)
    with pytest.raises(openmsa.InvalidArgumentError, match="block_size 16, used by a layer with block_size 32"):
        other(ids[:, :1].repeat(2, 1), past_key_values=cache)


def test_a_mask_that_rewrites_the_past_is_refused():
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=2)
    ids = tokens(40, batch=2)
    mask = torch.ones(2, 41, dtype=torch.long)
    mask[1, :3] = 0
    padded = sparse(ids, attention_mask=mask[:, :40]).past_key_values
    for wrong in (torch.ones_like(mask), None):
        with pytest.raises(openmsa.InvalidArgumentError, match="marked otherwise"):
            sparse(ids[:, :1], attention_mask=wrong, past_key_values=copy.deepcopy(padded))
    with pytest.raises(openmsa.InvalidArgumentError, match="marked otherwise"):
        sparse(ids[:, :1], attention_mask=mask, past_key_values=sparse(ids).past_key_values)
    sparse(ids[:, :1], attention_mask=mask, past_key_values=padded)


# --- quality measures ---------------------------------------------------------------------------------------------------------


def test_block_mass_and_recall_by_hand():
    config = openmsa.MsaConfig(num_q_heads=4, num_kv_heads=2, head_dim=16, block_size=16, top_k=3)
    torch.manual_seed(0)
    q, k = torch.randn(5, 4, 16), torch.randn(100, 2, 16)
    positions = torch.tensor([99, 80, 64, 50, 48])
    mass = quality.block_mass(q, k, positions, config)
    for t, position in enumerate(positions.tolist()):
        for g in range(2):
            expected = torch.zeros(7)
            for h in (2 * g, 2 * g + 1):
                prob = torch.softmax(k[: position + 1, g] @ q[t, h] / 4.0, 0)
                for j, p in enumerate(prob.tolist()):
                    expected[j // 16] += p / 2
            assert torch.allclose(mass[t, g], expected, atol=1e-5)
    best = mass.topk(3, dim=2).indices.sort(2).values.int()
    assert quality.selection_quality(q, k, best, positions, config).block_recall == 1.0
    assert quality.selection_quality(q, k, best, positions, config).score_recall == pytest.approx(1.0)
    ids = torch.tensor([[[0, 1, 6], [2, 3, 6]]], dtype=torch.int32)
    found = quality.selection_quality(q[:1], k, ids, positions[:1], config)
    for_groups = [set(ids[0, g].tolist()) & set(best[0, g].tolist()) for g in range(2)]
    assert found.block_recall == pytest.approx(sum(len(s) for s in for_groups) / 6)
    shares = [sum(mass[0, g, b].item() for b in for_groups[g]) / mass[0, g].topk(3).values.sum().item() for g in range(2)]
    assert found.score_recall == pytest.approx(sum(shares) / 2, abs=1e-5)
    assert found.num_pairs == 2


def test_recorded_quality():
    sparse = hf.convert(tiny_llama(), block_size=16, top_k=3)
    ids = tokens(200)
    with hf.record_selection(sparse, layers=[1, 2], max_queries=64) as recorded:
        sparse(ids)
    assert sorted(recorded.selections) == [1, 2]
    selection = recorded.selections[1][0]
    assert selection.block_ids.shape == (64, 2, 3) and selection.positions[-1] == 199
    own = selection.positions // 16
    last = torch.where(own >= 2, selection.block_ids[:, 0, 2], own)
    assert torch.equal(last.long(), own)  # the query's own block is always in, as the last valid entry
    for layer in (1, 2, None):
        found = recorded.quality(layer)
        assert 0 < found.block_recall < 1 and found.block_recall <= found.score_recall < 1 and 0 < found.mass_kept < 1
    sparse(ids)
    assert len(recorded.selections[1]) == 1  # nothing is kept outside the block


# --- what a GPU would say, asked without one ------------------------------------------------------------------------------------


@pytest.mark.skipif(not openmsa.list_backends()[-1].compiled, reason="built without CUDA: there are no limits to tell")
@pytest.mark.parametrize(
    "options, dtype, reason",
    [
        (dict(), torch.bfloat16, ""),
        (dict(), torch.float16, ""),
        (dict(), torch.float32, "layer 0: dtype float32 is not one of bfloat16|float16"),
        (dict(block_size=16), torch.bfloat16, "layer 0: block_size 16 is not in 64..128 step 64"),
        (dict(top_k=33, dense_layers=1), torch.bfloat16, "layer 1: top_k 33 is not in 1..32"),
    ],
)
def test_why_not_on_gpu(options, dtype, reason):
    """SmolLM2's shape: groups of 3, D 64. The index keys of its three KV heads are 192 wide, but scored 64 at a time."""
    model = tiny_llama(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64).to(dtype)
    assert hf.why_not_on_gpu(hf.convert(model, **options)) == reason
    if reason.startswith("layer 0: dtype"):
        assert hf.why_not_on_gpu(hf.convert(model, **options), torch.bfloat16) == ""


def test_why_not_on_gpu_needs_msa_layers():
    with pytest.raises(openmsa.UnsupportedError, match="has no MSA layers"):
        hf.why_not_on_gpu(tiny_llama())
