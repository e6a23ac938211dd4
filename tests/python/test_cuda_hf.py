"""transformers on the GPU: MiniMax-M3 and a Llama of SmolLM2's shape run through the CUDA kernels, with the results of the CPU."""

from __future__ import annotations

import contextlib
import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")

import openmsa  # noqa: E402
import test_hf_minimax_m3  # noqa: E402
from cuda_support import assert_selection, needs_gpu, no_waiting  # noqa: E402
from openmsa import hf  # noqa: E402
from test_hf_convert import tiny_llama  # noqa: E402

pytestmark = needs_gpu

BF16 = torch.bfloat16
VOCAB = 97
OPERATORS = ("msa_attention", "index_select", "sparse_attention", "sparse_decode", "dense_attention")


def tokens(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def tiny_m3():
    """test_hf_minimax_m3's golden with heads that the GPU kernels take: one dense layer, three sparse ones, blocks of 64."""
    return test_hf_minimax_m3.tiny_m3(
        hidden_size=256, head_dim=64, index_head_dim=64, index_block_size=64, index_topk_blocks=4, initializer_range=0.1
    )


def smollm2():
    """The layers of SmolLM2-135M, four of its thirty, with random weights: 9 query heads in 3 KV groups of width 64."""
    return tiny_llama(
        layers=4, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        initializer_range=0.05,
    )  # fmt: skip


@pytest.fixture(scope="module")
def m3():
    """(transformers' own in float32, ours in bfloat16 on the CPU, the same on the GPU), all with the same rounded weights."""
    model = tiny_m3().to(BF16)
    ours = hf.use_openmsa(copy.deepcopy(model))
    return model.float(), ours, copy.deepcopy(ours).cuda()


@pytest.fixture(scope="module")
def llama():
    model = smollm2().to(BF16)
    options = dict(block_size=64, top_k=4, dense_layers=1)
    exact = hf.convert(copy.deepcopy(model).float(), **options)
    return exact, hf.convert(model, **options), hf.convert(copy.deepcopy(model).cuda(), **options)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@contextlib.contextmanager
def held_against_the_cpu():
    """What the GPU's operators return is held against the CPU engine on the same inputs. Yields how often each was called."""
    calls = dict.fromkeys(OPERATORS, 0)
    real = {name: getattr(openmsa, name) for name in OPERATORS}

    def check_ids(found, q_idx, k_idx, batch, config):
        scores = openmsa.block_scores(q_idx, k_idx, batch, config).double()
        visible = torch.isfinite(scores)
        slack = 1e-3 + 1e-5 * scores[visible].abs().max().item()
        assert_selection(found, scores, config, batch, slack)
        assert (found.cpu() == real["index_select"](q_idx, k_idx, batch, config)).float().mean() > 0.99

    def check_out(found, function, *args):
        want = function(*args).float()
        assert (found.cpu().float() - want).abs().max() <= 1e-2 * want.abs().max()

    def checked(name):
        def call(*args, **options):
            assert all(x.is_cuda for x in args if isinstance(x, torch.Tensor))
            found = real[name](*args, **options)
            calls[name] += 1
            host = [x.to("cpu") if isinstance(x, (torch.Tensor, openmsa.Batch)) else x for x in args]
            if name == "index_select":
                check_ids(found, *host)
            elif name == "msa_attention":
                q, k, v, q_idx, k_idx, batch, config = host
                out, ids = found
                check_ids(ids, q_idx, k_idx, batch, config)
                check_out(out, real["sparse_attention"], q, k, v, ids.cpu(), batch, config)
            else:
                check_out(found, real[name], *host)
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATORS:
            patch.setattr(openmsa, name, checked(name))
        yield calls
    openmsa.synchronize("cuda")


def typical_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Median over the tokens: a near tie between two blocks or two experts may move single ones by more."""
    found, exact = found.cpu().float().flatten(0, -2), exact.float().flatten(0, -2)
    assert found.isfinite().all()
    return ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).median().item()


@pytest.mark.parametrize("name", ["m3", "llama"])
def test_logits_are_as_right_as_on_the_cpu(name, request):
    """M3 against transformers' own code; both against float32, within twice what bfloat16 costs on the CPU."""
    exact, cpu, gpu = request.getfixturevalue(name)
    ids = tokens(700, batch=2)
    hf.msa_stats(gpu, reset=True)
    want = exact(ids).logits
    with held_against_the_cpu() as calls:
        found = gpu(ids.cuda()).logits
    assert found.is_cuda and calls["msa_attention"] + calls["sparse_attention"] == 3 and calls["dense_attention"] == 1
    assert 0 < typical_error(found, want) <= 2 * typical_error(cpu(ids).logits, want)
    hf.assert_sparse(gpu, dropped=True)
    for layer, stats in hf.msa_stats(gpu).items():
        assert stats == hf.LayerStats(1, *((0, 1400, 0) if layer == 0 else (1400, 0, 2 * (700 - 4 * 64))))


@pytest.mark.parametrize("name, own_cache", [("m3", False), ("m3", True), ("llama", False)])
def test_cached_decoding(name, own_cache, request):
    """Prefill, single tokens, speculative steps up to 16 by the decode path, over page borders; both kinds of cache."""
    exact, _, gpu = request.getfixturevalue(name)
    ids = tokens(420, batch=2)
    cache = hf.MsaCache(gpu.config) if own_cache else None
    outs, start = [], 0
    with held_against_the_cpu() as calls:
        for size in (250, 1, 1, 8, 60, 16, 1, 17, 1, 65):
            result = gpu(ids[:, start : start + size].cuda(), past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            outs.append(result.logits)
            start += size
    if name == "m3":
        assert calls["msa_attention"] == 3 * 10
    else:
        assert calls["sparse_decode"] == 3 * 6 and calls["sparse_attention"] == 3 * 4
    assert typical_error(torch.cat(outs, dim=1), exact(ids).logits) < 0.05


@pytest.mark.parametrize("name", ["m3", "llama"])
@pytest.mark.parametrize("left", [True, False])
def test_padded_batches(name, left, request):
    _, _, gpu = request.getfixturevalue(name)
    pad = 65
    long, short = tokens(400).cuda(), tokens(400 - pad, seed=2).cuda()
    filler = torch.zeros(1, pad, dtype=torch.long, device="cuda")
    ids = torch.cat([long, torch.cat([filler, short] if left else [short, filler], dim=1)])
    mask = (ids != 0).long()
    cache = hf.MsaCache(gpu.config)
    with held_against_the_cpu():
        first = gpu(ids[:, :330], attention_mask=mask[:, :330], past_key_values=cache).logits
        rest = gpu(ids[:, 330:], attention_mask=mask, past_key_values=cache).logits
    logits = torch.cat([first, rest], dim=1)
    assert typical_error(logits[:1], gpu(long).logits.cpu()) < 0.05
    assert typical_error(logits[1:, pad:] if left else logits[1:, : 400 - pad], gpu(short).logits.cpu()) < 0.05


@pytest.mark.parametrize("name", ["m3", "llama"])
def test_generate(name, request):
    """The tokens written are the likeliest by the model's own logits for the finished text, up to near ties."""
    _, _, gpu = request.getfixturevalue(name)
    ids = tokens(300, batch=2).cuda()
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    written = gpu.generate(ids, **options)
    assert written.shape == (2, 324) and torch.equal(written[:, :300], ids)
    assert torch.equal(written, gpu.generate(ids, **options))
    logits = gpu(written).logits[:, 299:-1].float()
    chosen = logits.gather(-1, written[:, 300:, None])[..., 0]
    near = logits.amax(-1) - chosen <= 0.05 * logits.std(-1)
    assert near.float().mean() > 0.9
    if name == "llama":
        assert (gpu.generate(ids, prefill_chunk_size=128, **options)[:, 300] == written[:, 300]).all()


def test_attention_layers_do_not_wait(llama, monkeypatch):
    """In an unpadded step no attention layer makes the host wait; what transformers does around them is its own affair."""
    from openmsa.hf import llama as module

    _, _, gpu = llama
    waited = []

    def watched(real):
        def run(*args):
            with no_waiting():
                out = real(*args)
            waited.append(False)
            return out

        return run

    for name in ("run_sparse", "run_dense"):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    ids = tokens(300).cuda()
    cache = gpu(ids[:, :256], use_cache=True).past_key_values
    for i in range(256, 260):  # over a page border: the cache grows
        gpu(ids[:, i : i + 1], past_key_values=cache)
    assert len(waited) == 4 * 5


def test_quality_is_measured_on_the_gpu(llama):
    _, cpu, gpu = llama
    ids = tokens(900)
    found = []
    for model, x in ((cpu, ids), (gpu, ids.cuda())):
        with hf.record_selection(model, max_queries=128) as recorder:
            model(x)
        assert all(s.block_ids.device.type == "cpu" for s in recorder.selections[1])
        found.append(recorder.quality())
    assert found[0].num_pairs == found[1].num_pairs > 0
    for name in ("block_recall", "score_recall", "mass_kept"):
        assert abs(getattr(found[0], name) - getattr(found[1], name)) < 0.03


def test_dtypes(llama):
    exact, _, gpu = llama
    wide = copy.deepcopy(exact).cuda()
    ids = tokens(400).cuda()
    with pytest.raises(openmsa.UnsupportedError, match=r"layer 0 is on cuda:0.*float32 is not one of.*dtype=torch.bfloat16"):
        wide(ids)
    want = exact(ids.cpu()).logits
    assert typical_error(copy.deepcopy(wide).to(torch.float16)(ids).logits, want) < 0.02
    with torch.autocast("cuda", BF16):
        assert typical_error(wide(ids).logits, want) < 0.05
    small = hf.convert(smollm2().to(BF16), block_size=16).cuda()
    with pytest.raises(openmsa.UnsupportedError, match=r"layer 0 is on cuda:0.*block_size 16 is not in 64..128.*model.to\('cpu'\)"):
        small(ids)
    assert hf.why_not_on_gpu(gpu) == "" and "block_size 16" in hf.why_not_on_gpu(small)
