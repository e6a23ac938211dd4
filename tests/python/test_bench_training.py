"""The training benchmark rehearsed on the CPU: every row it would write on a GPU, at sizes that take seconds."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

import openmsa  # noqa: E402
from openmsa import bench_training  # noqa: E402
from openmsa.bench_training import Options, bench_training as run  # noqa: E402
from openmsa.cli import main  # noqa: E402

CONFIG = openmsa.MsaConfig(num_q_heads=8, num_kv_heads=2, head_dim=64, index_dim=64, block_size=64, top_k=4)
PACKS = [{"name": f"pack{i}", "cu_seqlens": [0, cut, 600]} for i, cut in enumerate((1, 200, 599, 300, 450))]
KINDS = ("random", "clustered")


def options(**changes) -> Options:
    tiny = dict(
        config=CONFIG, lengths=(256, 512, 1024), longest_dense=512, first_bar=256, warmup_lengths=(256,), packs=PACKS, device="cpu"
    )
    return Options(**{**tiny, **changes})


def test_all_rows():
    rows = {row["name"]: row for row in run(options())}
    wanted = {f"training_{what}_{n}_{kind}" for what in ("step", "forward_backward", "backward", "index_kl")
              for n in (256, 512, 1024) for kind in KINDS}  # fmt: skip
    assert rows.keys() == wanted | {"training_dense_backward_256", "training_index_kl_all_256", "training_packs"}
    for row in rows.values():
        assert row["measured"] > 0 and row["ours_ms" if row["name"] != "training_packs" else "measured"] > 0
        assert row["verdict"] in ("measured", "good", "excellent", "missed")
    dense = {n: rows[f"training_step_{n}_random"]["theirs_ms"] for n in (256, 512, 1024)}
    assert dense[1024] == 4 * dense[512] and "extrapolated by N^2 from 512" in rows["training_step_1024_clustered"]["note"]
    assert rows["training_step_512_clustered"]["theirs_ms"] == dense[512] and not rows["training_step_512_clustered"]["note"]
    step = rows["training_step_512_random"]
    assert step["measured"] == pytest.approx(step["theirs_ms"] / step["ours_ms"])
    # 256 tokens have four blocks of 64, which are all chosen: five products over all that is visible, in every head.
    backward = rows["training_backward_256_random"]
    assert backward["visible_pairs"] == 2 * 256 * 257 // 2
    assert backward["measured"] == pytest.approx(5 * 2 * 64 * 8 * 256 * 257 / 2 / backward["ours_ms"] / 1e9)
    assert (backward["good"], backward["excellent"]) == (280, 420)
    packs = rows["training_packs"]
    assert "5 of 5" in packs["what"] and packs["tokens_per_s"] == pytest.approx(600e3 / packs["measured"])
    assert packs["dense_ms_by_pairs"] > 0 and packs["slowest"].startswith("pack")
    json.dumps(list(rows.values()), allow_nan=False)


def test_a_spent_budget_leaves_cases_out():
    rows = run(options(budget_s=0.0))
    assert [row["verdict"] for row in rows] == ["skipped"] * 4
    assert rows[-1]["what"].endswith("no time was left for them (--budget)")


def test_memory_growth_is_of_doubled_tokens():
    seen = bench_training.Seen(peak_bytes={128: 1, 256: 100, 512: 190, 1024: 400})
    (row,) = bench_training.memory_growth(seen, options())
    assert row["measured"] == 400 / 190 and row["verdict"] == "missed"
    assert bench_training.memory_growth(bench_training.Seen(), options()) == []


def test_without_kernels_the_part_is_skipped(monkeypatch):
    kernels = [kernel for kernel in openmsa.list_kernels() if kernel.stage != "index_kl_loss"]
    monkeypatch.setattr(openmsa, "list_kernels", lambda: kernels)
    (row,) = run(options())
    assert row["verdict"] == "skipped" and row["what"].endswith("no GPU kernel for index_kl_loss")


def test_command(monkeypatch, tmp_path, capsys):
    """`openmsa bench --cuda --only training` as far as it goes without a GPU: options, workload files, the table, the JSON."""
    gpu = openmsa.BackendInfo("cuda", True, True, "NVIDIA H200")
    monkeypatch.setattr(openmsa, "list_backends", lambda: [gpu])
    monkeypatch.setattr(openmsa, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu.detail)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    seen = {}

    def quick(packs, budget_s):
        seen.update(packs=packs, budget_s=budget_s)
        return options(lengths=(256,), warmup_lengths=(), packs=packs, budget_s=budget_s)

    monkeypatch.setattr(Options, "quick", quick)
    (tmp_path / "training_packs.json").write_text(json.dumps({"packs": PACKS}))
    path = tmp_path / "result.json"
    arguments = ["bench", "--cuda", "--quick", "--only", "training", "--budget", "30", "--json", str(path)]
    code = main([*arguments, "--workloads", str(tmp_path)])
    result = json.loads(path.read_text())
    assert code == any(row["verdict"] == "missed" for row in result["rows"])
    assert seen == {"packs": PACKS, "budget_s": 30}
    assert result["gpu"] == "NVIDIA H200" and len(result["rows"]) == 9 and result["quick"] is True
    table = capsys.readouterr().out
    assert "5 of 5 real training packs" in table and "sparse backward, 256 tokens, clustered" in table
    assert main(arguments) == code and seen["packs"] is None
    assert "no pack file given" in capsys.readouterr().out
