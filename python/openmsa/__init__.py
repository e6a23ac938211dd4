"""OpenMSA: MiniMax Sparse Attention for CPUs and Hopper GPUs.

Works on PyTorch tensors and NumPy arrays; PyTorch is imported only when something here needs it.
"""

from __future__ import annotations

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import errors
from ._core import version as _version
from .batch import Batch
from .config import MsaConfig
from .errors import DeviceError, Error, InvalidArgumentError, OutOfPagesError, OutOfWorkspaceError, UnsupportedError
from .info import BackendInfo, KernelInfo, list_backends, list_kernels, synchronize
from .ops import (
    block_scores,
    dense_attention,
    dense_attention_backward,
    index_kl_loss,
    index_select,
    load_torch_ops as _load_torch_ops,
    msa_attention,
    select_blocks,
    sparse_attention,
    sparse_attention_backward,
    sparse_decode,
    write_pages,
)

if _TYPE_CHECKING:
    from . import compat, hf, nn
    from .cache import CacheStep, PagedKvCache

__version__ = _version()

__all__ = [
    "BackendInfo", "Batch", "CacheStep", "DeviceError", "Error", "InvalidArgumentError", "KernelInfo", "MsaConfig",
    "OutOfPagesError", "OutOfWorkspaceError", "PagedKvCache", "UnsupportedError", "block_scores", "compat", "dense_attention",
    "dense_attention_backward", "errors", "hf", "index_kl_loss", "index_select", "list_backends", "list_kernels", "msa_attention",
    "nn", "select_blocks", "sparse_attention", "sparse_attention_backward", "sparse_decode", "synchronize", "write_pages",
]  # fmt: skip

_LAZY_MODULES = {"nn": "nn", "hf": "hf", "compat": "compat", "PagedKvCache": "cache", "CacheStep": "cache"}


def __getattr__(name: str):
    """The parts that need PyTorch, imported on first use."""
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module 'openmsa' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"openmsa.{_LAZY_MODULES[name]}")
    value = module if name == _LAZY_MODULES[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Whoever imported PyTorch first can use torch.ops.openmsa and torch.compile at once.
if "torch" in _sys.modules:
    _load_torch_ops()
