"""The parts of the demo that can be tested without its model: the prompt, the measurements, and the novel."""

import gzip
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

DEMO = pathlib.Path(__file__).resolve().parents[2] / "recipes" / "demo"
sys.path.insert(0, str(DEMO))

import measure  # noqa: E402
import prompt  # noqa: E402


class CharTokenizer:
    """One token per character, so that every count can be checked."""

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [ord(c) % 251 for c in text]}

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        return f"<user>{messages[0]['content']}<assistant>"

    def decode(self, ids):
        return "".join(chr(i) for i in ids)


@pytest.fixture(scope="module")
def reader_pair():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, initializer_range=0.2, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.inference_mode():
        # Enough blocks for everything: MSA must then measure as dense attention does.
        yield measure.Reader(model, torch.float32), measure.Reader(model, torch.float32, block_size=16, top_k=40)


def test_the_novel_is_whole():
    novel = gzip.decompress((DEMO / "novel.txt.gz").read_bytes()).decode()
    assert novel.startswith("Persuasion\n") and novel.rstrip().endswith("Finis")
    assert len(novel.split()) > 80_000


@pytest.mark.parametrize("depth", [0.3, 0.7])
def test_the_prompt_has_the_size_asked_for_and_hides_one_sentence(depth):
    novel = "Anne looked at the sea. It was grey. " * 200
    made = prompt.build_prompt(CharTokenizer(), novel, "The number is 7.", "Which number?", 3000, depth)
    text = CharTokenizer().decode(made.ids[0].tolist())
    assert made.ids.shape == (1, 3000) and text.count("The number is 7.") == 1
    place = text.index("The number is 7.")
    assert abs(place / 3000 - depth) < 0.05 and text[place - 2] == "."
    hidden = "".join(c for c, n in zip(text, made.is_novel.tolist(), strict=True) if not n)
    assert hidden.startswith("<user>Read this text.") and hidden.endswith("Which number?<assistant>") and "sea" not in hidden
    assert "".join(c for c, n in zip(text, made.is_novel.tolist(), strict=True) if n) == novel[: int(made.is_novel.sum())]


def test_dense_and_msa_are_measured_alike(reader_pair):
    novel = "Anne looked at the sea. It was grey. " * 40
    made = prompt.build_prompt(CharTokenizer(), novel, "The number is 7.", "Which number?", 500, 0.5)
    found = []
    for reader in reader_pair:
        seconds, reading = reader.read(made.ids)
        assert seconds > 0 and reading.cache.get_seq_length() == 500
        perplexity = reader.perplexity(reading, made)
        times = reader.decode_ms(reading)
        assert set(times) == {"float32", "bfloat16"} and min(times.values()) > 0
        assert reading.cache.get_seq_length() == 500  # decoding worked on a copy
        found.append((perplexity, reader.answer(reading, CharTokenizer())))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    assert found[0][1] == found[1][1]


def test_perplexity_against_transformers_own_loss(reader_pair):
    dense = reader_pair[0]
    ids = torch.randint(1, 250, (1, 90), generator=torch.Generator().manual_seed(0))
    _, reading = dense.read(ids)
    made = prompt.Prompt(ids, torch.arange(90) >= 1)
    expected = dense.model(ids, labels=ids).loss.exp().item()
    assert dense.perplexity(reading, made) == pytest.approx(expected, rel=1e-4)
