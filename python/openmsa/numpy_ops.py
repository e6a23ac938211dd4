"""The operators for NumPy arrays, under the names and signatures of openmsa.torch_ops."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from . import kernels


def _empty(like: np.ndarray, shape: Any, dtype: str | None) -> np.ndarray:
    return np.empty(shape, like.dtype if dtype is None else dtype)


def _threads(num_threads: int) -> int:
    torch = sys.modules.get("torch")
    return num_threads or (torch.get_num_threads() if torch else 0)


def _bind(kernel: Any, **options: Any) -> Any:
    def implementation(*args: Any) -> Any:
        return kernel(_empty, *args[:-2], _threads(args[-2]), args[-1], **options)

    return implementation


block_scores = _bind(kernels.block_scores)
select_blocks = _bind(kernels.select_blocks)
index_select = _bind(kernels.index_select)
sparse_attention = _bind(kernels.sparse_attention)
sparse_decode = _bind(kernels.sparse_attention, decode=True)
msa_attention = _bind(kernels.msa_attention)
dense_attention = _bind(kernels.dense_attention)
sparse_attention_backward = _bind(kernels.sparse_attention_backward)
dense_attention_backward = _bind(kernels.dense_attention_backward)
index_kl_loss = _bind(kernels.index_kl_loss)
write_pages = _bind(kernels.write_pages)
