"""Shared set-up of the Python tests: the package of this tree where none is installed, markers, and the backends to try."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import pytest

if importlib.util.find_spec("openmsa") is None:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))

try:
    import torch
except ModuleNotFoundError:
    torch = None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU that PyTorch can use")
    config.addinivalue_line("markers", "slow: takes more than about ten seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch is not None and torch.cuda.is_available():
        return
    reason = "PyTorch is not installed" if torch is None else "PyTorch sees no CUDA device on this machine"
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that runs on the CPU."""
    return request.param


@pytest.fixture
def rng() -> "torch.Generator":
    return torch.Generator().manual_seed(20261130)
