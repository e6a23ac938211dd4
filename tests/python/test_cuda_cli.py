"""The `openmsa` command where there is a GPU: it is used, and the reports say so."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import test_cli  # noqa: E402
from cuda_support import needs_gpu  # noqa: E402
from openmsa.cli import main  # noqa: E402
from test_cli import BAD_INPUT, OK, TEXT, assert_clean_error, run_json  # noqa: E402

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """test_cli's tiny Llama with heads of 64, which the GPU kernels take."""
    return test_cli.make_model(tmp_path_factory.mktemp("model"), hidden_size=256)


def test_generate_runs_on_the_gpu(model_folder, capsys):
    options = ["--prompt", TEXT, "--max-new-tokens", "5", "--block-size", "64", "--top-k", "2"]
    code, report = run_json(capsys, "generate", str(model_folder), *options)
    assert code == OK
    assert (report["device"], report["device_name"], report["dtype"]) == ("cuda", torch.cuda.get_device_name(), "bfloat16")
    assert report["new_tokens"] == 5 and report["dropped_queries"] > 0
    assert report["sparse_queries"] == 2 * (len(TEXT) + 4)  # the warm-up is not counted
    code, again = run_json(capsys, "generate", str(model_folder), *options, "--device", "cuda", "--dtype", "float16")
    assert code == OK and again["dtype"] == "float16" and again["device"] == "cuda"
    code, dense = run_json(capsys, "generate", str(model_folder), *options, "--dense", "--dtype", "float32")
    assert code == OK and dense["device"] == "cuda" and dense["dtype"] == "float32"
    code, on_cpu = run_json(capsys, "generate", str(model_folder), *options, "--device", "cpu")
    assert code == OK and (on_cpu["device"], on_cpu["dtype"]) == ("cpu", "float32")
    assert main(["generate", str(model_folder), *options]) == OK
    assert f"msa on {torch.cuda.get_device_name()} (bfloat16): prompt of" in capsys.readouterr().err


def test_what_the_kernels_do_not_take_goes_to_the_cpu(model_folder, capsys):
    options = ["generate", str(model_folder), "--prompt", TEXT, "--max-new-tokens", "2", "--block-size", "16", "--top-k", "4"]
    assert main(options) == OK
    assert "runs on the CPU, not on the GPU: layer 0: block_size 16" in capsys.readouterr().err
    assert main([*options, "--device", "cuda"]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), "--device cuda: layer 0: block_size 16")
    assert main([*options[:-4], "--device", "cuda", "--dtype", "float32"]) == BAD_INPUT
    assert_clean_error(capsys.readouterr(), "float32 is not one of bfloat16|float16")


def test_inspect_reads_on_the_gpu(model_folder, tmp_path, capsys):
    options = ["--text", TEXT, "--block-size", "64", "--top-k", "2", "--format", "html", "-o", str(tmp_path / "picture")]
    code, report = run_json(capsys, "inspect", str(model_folder), *options)
    assert code == OK and report["device"] == "cuda" and len(report["rows"]) == 4
    code, on_cpu = run_json(capsys, "inspect", str(model_folder), *options, "--device", "cpu")
    assert code == OK and on_cpu["device"] == "cpu"
    for x, y in zip(report["rows"], on_cpu["rows"]):
        assert abs(x["blocks_per_query"] - y["blocks_per_query"]) < 1e-6


@pytest.mark.parametrize("arguments", [
    [], ["--dtype", "float16", "--block-size", "128", "--head-dim", "128", "--seqlens-q", "4,1,0", "--seqlens-k", "1500,129,7"],
], ids=["defaults", "decode"])  # fmt: skip
def test_check_holds_the_gpu_against_the_oracle(arguments, capsys):
    code, report = run_json(capsys, "check", *arguments)
    assert code == OK, [row for row in report["rows"] if not row["passed"]]
    assert report["skipped"] == {} and report["dtypes"]["cuda"] in ("bfloat16", "float16")
    assert sum(row["backend"] == "cuda" for row in report["rows"]) == sum(row["backend"] == "cpu" for row in report["rows"]) > 0
