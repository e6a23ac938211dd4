"""The `openmsa` command: every subcommand, its JSON, its exit codes, its refusals, and the examples in its help."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch

import openmsa
from openmsa import checking
from openmsa.cli import COMMANDS, build_parser, main

OK, FAILED, BAD_INPUT = 0, 1, 2
PACKAGE_ROOT = pathlib.Path(openmsa.__file__).resolve().parents[1]


def run_command(*arguments: str, cwd: pathlib.Path | None = None) -> subprocess.CompletedProcess:
    """`python -m openmsa` in a process of its own."""
    path = os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, "-m", "openmsa", *arguments], capture_output=True, text=True, cwd=cwd,
                          env={**os.environ, "PYTHONPATH": path}, timeout=300)


def run_json(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, dict]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def assert_clean_error(captured, *parts: str) -> None:
    """One paragraph on standard error, no traceback, and each part in it."""
    assert captured.err.startswith("openmsa")
    assert "Traceback" not in captured.err and "\n\n" not in captured.err
    for part in parts:
        assert part in captured.err


# --- the command itself ------------------------------------------------------------------------------------------------------

def test_module_runs_and_prints_the_version():
    done = run_command("--version")
    assert (done.returncode, done.stdout) == (OK, f"openmsa {openmsa.__version__}\n")


def test_without_a_command_shows_help_and_exits_2(capsys):
    assert main([]) == BAD_INPUT
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nonsense"], ["check", "--no-such-option"], ["bench"], ["generate"], ["check", "--seqlens", "x"]])
def test_wrong_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == BAD_INPUT
    assert capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_they_parse(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == OK
    text = capsys.readouterr().out
    examples = re.findall(r"^  (?:.*\| )?(openmsa .*?)(?:  .*)?$", text[text.index("examples:"):], flags=re.MULTILINE)
    assert examples
    for example in examples:
        arguments = shlex.split(example)[1:]
        assert arguments[0] == command
        build_parser().parse_args(arguments)  # exits, failing the test, if the example is out of date
    assert "--json" in text and "--quiet" in text and "--debug" in text


def test_debug_shows_the_traceback():
    done = run_command("inspect", "missing.npz", "--debug")
    assert done.returncode == FAILED and "Traceback" in done.stderr


# --- info --------------------------------------------------------------------------------------------------------------------

def test_info_lists_backends_and_kernels(capsys):
    code, facts = run_json(capsys, "info")
    assert code == OK
    assert facts["version"] == openmsa.__version__
    backends = {b["name"]: b for b in facts["backends"]}
    assert backends["reference"]["available"] and backends["cpu"]["available"]
    assert all(b["detail"] for b in backends.values())
    stages = {k["stage"] for k in facts["kernels"] if k["backend"] == "cpu"}
    assert stages == {
        "block_scores", "select_blocks", "index_select", "sparse_attention", "sparse_decode", "msa_attention", "dense_attention",
        "sparse_attention_backward", "dense_attention_backward", "index_kl_loss", "write_pages",
    }  # fmt: skip
    assert facts["simd_target"] and facts["threads"] >= 1


def test_info_table_names_every_kernel(capsys):
    assert main(["info"]) == OK
    text = capsys.readouterr().out
    for kernel in openmsa.list_kernels():
        assert kernel.name in text


# --- check -------------------------------------------------------------------------------------------------------------------

SMALL = ["--seqlens", "150,1,33", "--num-q-heads", "4", "--num-kv-heads", "2", "--head-dim", "32", "--index-dim", "16",
         "--block-size", "16", "--top-k", "3"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_check_passes(dtype, capsys):
    code, report = run_json(capsys, "check", *SMALL, "--dtype", dtype)
    assert code == OK and report["passed"]
    assert report["query_tokens_checked"] == report["query_tokens"] == 184
    seen = {(row["layout"], row["stage"]) for row in report["rows"]}
    assert len(seen) == 12  # six stages, packed and paged; msa_attention is checked where it has a kernel of its own
    assert all(row["passed"] and row["measured"] <= row["allowed"] for row in report["rows"])


def test_check_takes_decode_shapes_and_empty_sequences(capsys):
    code, report = run_json(capsys, "check", "--seqlens-q", "3,5,0,7", "--seqlens-k", "0,100,10,3", "--block-size", "16")
    assert code == OK and report["seqlens_k"] == [0, 100, 10, 3]


def test_check_includes_msa_attention_for_few_queries(capsys, monkeypatch):
    few = ["check", "--seqlens-q", "1,4,0", "--seqlens-k", "300,170,5", *SMALL[2:]]
    code, report = run_json(capsys, *few)
    assert code == OK and len({(row["layout"], row["stage"]) for row in report["rows"]}) == 14
    right = openmsa.msa_attention

    def slightly_wrong(*args, **kwargs):
        out, lse, ids = right(*args, **kwargs)
        return out + 1e-3, lse, ids

    monkeypatch.setattr(openmsa, "msa_attention", slightly_wrong)
    assert main([*few, "--json"]) == FAILED
    report = json.loads(capsys.readouterr().out)
    assert {row["stage"] for row in report["rows"] if not row["passed"]} == {"msa_attention"}


def test_check_uses_windows_on_long_sequences(capsys, monkeypatch):
    monkeypatch.setattr(checking, "ORACLE_BUDGET", 2_000_000)
    code, report = run_json(capsys, "check", "--seqlens", "1500")
    assert code == OK
    assert 2 * checking.WINDOW <= report["query_tokens_checked"] < 1500


def test_check_fails_on_wrong_results(capsys, monkeypatch):
    right = openmsa.sparse_attention

    def slightly_wrong(q, *args, **kwargs):
        result = right(q, *args, **kwargs)
        if kwargs.get("backend") == "cpu" and kwargs.get("return_lse"):
            result[0][-1] += 1e-3
        return result

    monkeypatch.setattr(openmsa, "sparse_attention", slightly_wrong)
    code = main(["check", *SMALL, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == FAILED and not report["passed"]
    assert {row["stage"] for row in report["rows"] if not row["passed"]} == {"sparse_attention"}


def test_check_fails_on_a_wrong_selection(capsys, monkeypatch):
    right = openmsa.index_select

    def last_blocks(q_idx, k_idx, batch, config, **kwargs):
        ids = right(q_idx, k_idx, batch, config, **kwargs)
        if kwargs.get("backend") == "cpu":
            # Well-formed lists, badly chosen: the newest blocks instead of the best.
            full = (ids >= 0).all(dim=-1)
            own = ids[full][:, -1:]
            ids[full] = own - torch.arange(config.top_k - 1, -1, -1, dtype=torch.int32)
        return ids

    monkeypatch.setattr(openmsa, "index_select", last_blocks)
    code = main(["check", *SMALL, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == FAILED
    assert {row["stage"] for row in report["rows"] if not row["passed"]} == {"index_select"}


@pytest.mark.parametrize("arguments, parts", [
    (["--head-dim", "72"], ["head_dim", "72", "16..256 step 16"]),
    (["--top-k", "0"], ["top_k"]),
    (["--num-q-heads", "5"], ["num_q_heads", "5"]),
    (["--backend", "tpu"], ["no 'tpu'", "cpu"]),
    (["--seqlens-q", "3"], ["--seqlens-k"]),
])
def test_check_refuses_bad_input(arguments, parts, capsys):
    assert main(["check", *arguments]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), *parts)


def pretend_gpu(monkeypatch, reason: str = "") -> None:
    """The commands believe that a GPU can be used (or cannot, for this reason); nothing may be sent to it."""
    rows = [openmsa.BackendInfo("cuda", True, not reason, reason or "NVIDIA H200") if row.backend == "cuda" else row
            for row in openmsa.list_backends()]
    monkeypatch.setattr(openmsa, "list_backends", lambda: rows)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not reason)


def test_check_takes_the_gpu_where_it_fits(capsys, monkeypatch):
    pretend_gpu(monkeypatch)
    ran = []

    def on_cpu(backend, stage, *args, **options):
        ran.append((backend, args[0].dtype))
        return getattr(openmsa, stage)(*args, backend="cpu", **options)

    monkeypatch.setattr(checking, "run_on", on_cpu)
    fits = ["--seqlens", "150,1", "--top-k", "2"]
    code, report = run_json(capsys, "check", *fits)
    assert code == OK and report["dtypes"] == {"cpu": "float32", "cuda": "bfloat16"} and report["skipped"] == {}
    assert {backend for backend, dtype in ran} == {"cpu", "cuda"} == {row["backend"] for row in report["rows"]}
    assert ("cuda", torch.bfloat16) in ran and ("cpu", torch.bfloat16) not in ran
    assert main(["check", *SMALL]) == OK
    assert "cuda was left out: head_dim 32 is not in 64..128 step 32." in capsys.readouterr().out
    code, report = run_json(capsys, "check", *fits, "--dtype", "float32")
    assert code == OK and report["dtypes"] == {"cpu": "float32"} and "float32 is not one of" in report["skipped"]["cuda"]
    for arguments, part in ((["--dtype", "float32"], "float32 is not one of"), (["--block-size", "16"], "block_size 16")):
        assert main(["check", "--backend", "cuda", *arguments]) == BAD_INPUT
        assert_clean_error(capsys.readouterr(), "--backend cuda", part)
    pretend_gpu(monkeypatch, "no CUDA device: the driver is asleep")
    assert main(["check", "--backend", "cuda"]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), "--backend cuda", "the driver is asleep")


# --- bench -------------------------------------------------------------------------------------------------------------------

def test_bench_quick_writes_json(tmp_path):
    path = tmp_path / "deep" / "result.json"
    done = run_command("bench", "--cpu", "--quick", "--repeats", "1", "--json", str(path), cwd=tmp_path)
    assert done.returncode == OK, done.stderr
    assert "NOT the bars" in done.stdout and str(path) in done.stderr
    result = json.loads(path.read_text())
    for key in ("date", "cpu", "cores", "threads", "simd_target", "torch", "openmsa", "command", "git_commit"):
        assert key in result
    assert 0 <= result.get("other_load", 0) <= 1
    rows = {row["id"]: row for row in result["rows"]}
    expected = {f"prefill_{d}_{k}" for d in ("f32", "bf16") for k in ("random", "clustered")}
    expected |= {f"rate_{s}_{d}" for d in ("f32", "bf16") for s in ("score", "attend_random", "attend_clustered")}
    expected |= {"decode_bf16", "memory_index_select"}
    assert set(rows) == expected
    for row in rows.values():
        assert row["bar"] > 0 and row["verdict"] in ("quick: not the bar", "skipped")
        assert row["measured"] is not None or row["reason"]
    assert rows["prefill_f32_random"]["measured"] == pytest.approx(
        rows["prefill_f32_random"]["theirs_s"] / rows["prefill_f32_random"]["ours_s"])
    # What was timed was also right, and clustered selections really are clustered.
    assert rows["prefill_f32_random"]["sampled_error"] < 1e-5
    assert rows["decode_bf16"]["sampled_error"] < 1e-2
    assert rows["prefill_f32_clustered"]["neighbour_union_4"] < rows["prefill_f32_random"]["neighbour_union_4"]


def test_bench_default_path_and_avx2_limit(tmp_path):
    done = run_command("bench", "--cpu", "--quick", "--repeats", "1", "--only", "rates", "--dtype", "f32", "--simd", "avx2",
                       cwd=tmp_path)
    if "has no AVX2" in done.stderr:
        assert done.returncode == BAD_INPUT
        pytest.skip("this processor has no AVX2")
    assert done.returncode == OK, done.stderr
    (path,) = tmp_path.glob("cpu-*.json")
    result = json.loads(path.read_text())
    assert result["simd_target"] == "AVX2" and result["torch_cpu_capability"] == "AVX2"


def test_bench_counts_only_visible_pairs():
    from openmsa import bench_cpu

    # Query 5 of block 1 (size 4) chose blocks 0 and 1: keys 0..3 and 4, 5. Query 0 sees itself.
    ids = torch.full((6, 1, 2), -1, dtype=torch.int32)
    ids[0, 0, 0] = 0
    ids[5, 0] = torch.tensor([0, 1])
    assert bench_cpu.selected_pairs(ids, block_size=4) == 1 + 4 + 2


def test_bench_refuses_unknown_parts(capsys):
    assert main(["bench", "--cpu", "--only", "prefill,nonsense"]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), "nonsense", "prefill, rates, decode, memory")


# --- inspect -----------------------------------------------------------------------------------------------------------------

def some_selection(num_tokens: int = 40, block_size: int = 4, top_k: int = 3) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    config = openmsa.MsaConfig(num_q_heads=2, num_kv_heads=2, head_dim=16, index_dim=16, block_size=block_size, top_k=top_k)
    q_idx = torch.randn(num_tokens, 2, 16, generator=generator)
    k_idx = torch.randn(num_tokens, 16, generator=generator)
    return openmsa.index_select(q_idx, k_idx, openmsa.Batch.single(num_tokens), config, backend="reference").numpy()


def page_data(path: pathlib.Path) -> dict:
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, flags=re.DOTALL)[1])


def decode_ids(encoded: str) -> np.ndarray:
    import base64

    return np.frombuffer(base64.b64decode(encoded), dtype="<i4")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_inspect_file(tmp_path, capsys, suffix):
    ids = some_selection()
    path = tmp_path / f"chosen{suffix}"
    arrays = {"block_ids": np.stack([ids, ids[:, ::-1]]).copy(), "block_size": np.array([4])}
    if suffix == ".npz":
        np.savez(path, **arrays)
    else:
        pytest.importorskip("safetensors.numpy").save_file(arrays, path)
    code, report = run_json(capsys, "inspect", str(path), "--layers", "1")
    assert code == OK
    assert report["files"] == [str(path.with_suffix(".png")), str(path.with_suffix(".html"))]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    data = page_data(path.with_suffix(".html"))
    assert data["block_size"] == 4 and data["num_blocks"] == 10
    (layer,) = data["layers"]
    assert layer["name"] == "layer 1"
    np.testing.assert_array_equal(decode_ids(layer["ids"]).reshape(40, 2, 3), ids[:, ::-1])
    np.testing.assert_array_equal(decode_ids(layer["positions"]), np.arange(40))


def test_inspect_page_is_self_contained(tmp_path):
    from openmsa.inspect_html import LayerSelection, SelectionPicture, render_page

    ids = some_selection()
    evil = ["</script><script>alert(1)</script>"] + ["x"] * 39
    page = render_page(SelectionPicture("title", 4, 40, [LayerSelection("layer 0", np.arange(40), ids)], evil))
    assert page.count("</script>") == 2  # ours: the data and the program
    assert not re.search(r"(?:src|href)\s*=|https?://|@import|url\(", page)
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    assert page_data(path)["tokens"][0] == evil[0]


def test_inspect_thins_long_selections():
    from openmsa.inspect_html import LayerSelection, thinned

    long = LayerSelection("layer", np.arange(10_000), np.zeros((10_000, 1, 1), dtype=np.int32))
    short = thinned(long, 100)
    assert short.positions.shape == (100,) and short.positions[0] == 0 and short.positions[-1] == 9_999


def test_inspect_states():
    from openmsa.inspect_html import LayerSelection
    from openmsa.inspect_plot import CHOSEN, FREE, FUTURE, OWN, cell_states

    layer = LayerSelection("layer", np.array([9]), np.array([[[0, 2, -1]]], dtype=np.int32))
    assert cell_states(layer, 0, block_size=4, num_blocks=4).tolist() == [[CHOSEN, FREE, OWN, FUTURE]]


def with_value(ids: np.ndarray, value: list[int]) -> np.ndarray:
    ids = ids.copy()
    ids[30, 1] = value
    return ids


@pytest.mark.parametrize("arrays, parts", [
    (lambda ids: {"other": ids}, ["no array block_ids", "other"]),
    (lambda ids: {"block_ids": ids[0]}, ["[2, 3]", "[T, Hkv, k]"]),
    (lambda ids: {"block_ids": ids.astype(np.float32)}, ["float32"]),
    (lambda ids: {"block_ids": ids[:0]}, ["empty"]),
    (lambda ids: {"block_ids": with_value(ids, [3, 1, -1])}, ["do not ascend", "query token 30, group 1", "[3, 1, -1]"]),
    (lambda ids: {"block_ids": with_value(ids, [1, 1, -1])}, ["do not ascend"]),
    (lambda ids: {"block_ids": with_value(ids, [1, -1, 3])}, ["after a -1"]),
    (lambda ids: {"block_ids": with_value(ids, [-5, 1, 2])}, ["below -1"]),
    (lambda ids: {"block_ids": with_value(ids, [0, 1, 8])}, ["after the query's own"]),
    (lambda ids: {"block_ids": ids, "positions": np.arange(3)}, ["positions"]),
    (lambda ids: {"block_ids": ids, "block_size": np.array([0])}, ["block_size is 0"]),
])
def test_inspect_refuses_bad_files(tmp_path, capsys, arrays, parts):
    path = tmp_path / "bad.npz"
    np.savez(path, **{"block_size": np.array(4), **arrays(some_selection())})
    assert main(["inspect", str(path)]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), *parts)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.npz"]


def test_inspect_refuses_what_it_cannot_read(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "missing.npz")]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), "missing.npz")
    (tmp_path / "noise.npz").write_bytes(b"not an archive")
    assert main(["inspect", str(tmp_path / "noise.npz")]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), "noise.npz", "cannot be read")
    assert main(["inspect", "./no-such-model", "--text", "x"]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), "./no-such-model")
    assert main(["inspect", "./no-such-model"]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), "--text-file")


# --- with a model ------------------------------------------------------------------------------------------------------------

def make_model(folder: pathlib.Path, hidden_size: int) -> pathlib.Path:
    """A tiny random Llama, of four heads, with a tokenizer of single characters."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letters = {token: i for i, token in enumerate(["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz ."])}
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    plain.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(letters), hidden_size=hidden_size, intermediate_size=96, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                                      bos_token_id=0, eos_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> pathlib.Path:
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=64)


TEXT = "the quick brown fox jumps over the lazy dog. " * 6


def test_generate_sparse_and_dense(model_folder, capsys):
    # On a GPU the two kinds of attention would round differently, and bfloat16 more than the likeliest letters allow.
    options = ["--prompt", TEXT, "--max-new-tokens", "5", "--device", "cpu", "--block-size", "16", "--top-k", "4"]
    code, sparse = run_json(capsys, "generate", str(model_folder), *options)
    assert code == OK
    assert sparse["attention"] == "msa" and sparse["prompt_tokens"] == len(TEXT) and sparse["new_tokens"] == 5
    assert sparse["dropped_queries"] > 0 and sparse["prefill_s"] > 0
    code, chunked = run_json(capsys, "generate", str(model_folder), *options, "--prefill-chunk", "50")
    assert code == OK and chunked["text"] == sparse["text"]
    code, dense = run_json(capsys, "generate", str(model_folder), *options, "--dense")
    assert code == OK and dense["attention"] == "dense" and "dropped_queries" not in dense
    # With room for every block the two kinds of attention are the same function.
    code, complete = run_json(capsys, "generate", str(model_folder), *options[:-1], "64")
    assert code == OK and complete["text"] == dense["text"] and complete["dropped_queries"] == 0


def test_generate_streams_the_text(model_folder, capsys):
    assert main(["generate", str(model_folder), "--prompt", "abc", "--max-new-tokens", "4"]) == OK
    captured = capsys.readouterr()
    assert captured.out.endswith("\n") and len(captured.out.strip("\n")) <= 4
    assert "tokens/s" in captured.err and "nothing was left unread" in captured.err


@pytest.mark.parametrize("device, dtype, gpu, want", [
    ("auto", None, True, ("cuda", "bfloat16")),
    ("auto", "float32", True, ("cuda", "float32")),
    ("auto", "float16", True, ("cuda", "float16")),
    ("auto", None, False, ("cpu", "float32")),
    ("cpu", None, True, ("cpu", "float32")),
    ("cpu", "bfloat16", True, ("cpu", "bfloat16")),
    ("cuda", None, True, ("cuda", "bfloat16")),
    ("cuda", None, False, None),
])
def test_choice_of_device_and_dtype(device, dtype, gpu, want, monkeypatch):
    from openmsa.cli import common

    pretend_gpu(monkeypatch, "" if gpu else "no CUDA device: none")
    arguments = ["generate", "model", "--prompt", "x", "--device", device, *([] if dtype is None else ["--dtype", dtype])]
    args = build_parser().parse_args(arguments)
    if want is None:
        with pytest.raises(common.BadInputError, match="--device cuda: no GPU can be used: no CUDA device: none. Leave --device out"):
            common.choose_device(args)
    else:
        place = common.choose_device(args)
        assert (place.device, place.dtype) == want


def test_a_pytorch_without_cuda_is_the_reason(monkeypatch):
    from openmsa.cli import common

    pretend_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch.__version__ in common.no_gpu_reason() and "with CUDA" in common.no_gpu_reason()


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_models_that_the_gpu_kernels_cannot_run(model_folder, tmp_path, capsys, monkeypatch, command):
    """Head dim 16: by itself the command goes to the CPU, in float32, and says why; told to use the GPU it refuses."""
    pretend_gpu(monkeypatch)
    arguments = [command, str(model_folder), "--block-size", "64", "--top-k", "2"]
    if command == "generate":
        arguments += ["--prompt", TEXT, "--max-new-tokens", "3"]
    else:
        arguments += ["--text", TEXT, "-o", str(tmp_path / "picture"), "--format", "html"]
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert code == OK and (report["device"], report["device_name"], report["dtype"]) == ("cpu", "CPU", "float32")
    assert "runs on the CPU, not on the GPU: layer 0: head_dim 16 is not in 64..128 step 32" in captured.err
    assert "on CPU (float32)" in captured.err
    assert main([*arguments, "--device", "cuda"]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), "--device cuda: layer 0: head_dim 16", "openmsa info", "--device cpu")
    pretend_gpu(monkeypatch, "no CUDA device: none")
    assert main([*arguments, "--device", "cuda"]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), "--device cuda: no GPU can be used: no CUDA device: none")


@pytest.mark.parametrize("arguments, parts", [
    (["./missing", "--prompt", "x"], ["./missing"]),
    (["MODEL", "--prompt", ""], ["empty"]),
    (["MODEL", "--prompt", "x", "--chat"], ["chat template"]),
    (["MODEL", "--prompt-file", "missing.txt"], ["missing.txt"]),
    (["MODEL", "--prompt", "x", "--top-k", "0"], ["top_k"]),
    (["MODEL", "--prompt", "x", "--temperature", "-1"], ["--temperature"]),
])
def test_generate_refuses_bad_input(model_folder, capsys, arguments, parts):
    arguments = [str(model_folder) if a == "MODEL" else a for a in arguments]
    assert main(["generate", *arguments]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), *parts)


def test_generate_refuses_a_broken_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), "could not be loaded")


def test_inspect_model(model_folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    stem = tmp_path / "out" / "picture"
    code, report = run_json(capsys, "inspect", str(model_folder), "--text-file", str(text), "--block-size", "16", "--top-k", "4",
                            "-o", str(stem))
    assert code == OK
    assert [row["layer"] for row in report["rows"]] == ["layer 0", "layer 0", "layer 1", "layer 1"]
    data = page_data(pathlib.Path(f"{stem}.html"))
    assert "".join(data["tokens"]) == TEXT and data["num_keys"] == len(TEXT)
    assert pathlib.Path(f"{stem}.png").exists()
    assert main(["inspect", str(model_folder), "--text", TEXT, "--layers", "7"]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), "no layer 7")
