"""What this build can do on this machine."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _core
from .config import MsaConfig


class BackendInfo(NamedTuple):
    """One backend; a row of :func:`list_backends`."""

    backend: str
    """"reference", "cpu" or "cuda"."""
    compiled: bool
    """Part of this build."""
    available: bool
    """Usable on this machine now."""
    detail: str
    """SIMD target and threads, GPU name, or the reason why it is not available."""


class KernelInfo(NamedTuple):
    """One kernel; a row of :func:`list_kernels`."""

    stage: str
    """The operator: "block_scores", "sparse_decode", ..."""
    backend: str
    name: str
    supports: str
    """The dtypes and sizes it takes, in words."""


def synchronize(device: Any = "cuda") -> None:
    """Waits for PyTorch's current stream on a GPU and raises what checks on the device found: broken offsets, page ids, block ids.

    Without it, the next call on that device raises them; the results of the faulty call are undefined.
    """
    import torch

    device = torch.device(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    _core.synchronize(index, torch.cuda.current_stream(index).cuda_stream)


def why_unsupported(backend: str, dtype: str, config: MsaConfig) -> str:
    """Which limit of the backend's kernels a layer of these sizes and dtype ("bfloat16") breaks; empty if it can run there.

    A config with ``index_dim`` 0 stands for a dense layer. Says nothing about whether the backend is available on this machine.
    """
    return _core.why_unsupported(backend, dtype, config._sizes)


def list_backends() -> list[BackendInfo]:
    """Every backend this version knows, with the reason where one is not available."""
    return [BackendInfo(*row) for row in _core.list_backends()]


def list_kernels() -> list[KernelInfo]:
    """The kernel registry, one row per kernel and operator."""
    return [KernelInfo(*row) for row in _core.list_kernels()]
