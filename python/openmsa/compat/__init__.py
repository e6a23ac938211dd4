"""The interface of the MSA authors' package `fmha_sm100`, on top of OpenMSA, so that a program written for it runs unchanged.

    import openmsa
    openmsa.compat.install()       # once, before the program imports fmha_sm100

Their kernels need a Blackwell GPU (SM100); these functions run wherever OpenMSA does, and choose the backend by the tensors' device.
BF16 and FP16 (and float32 on the CPU); FP8 and FP4 are refused by name. What their names mean:

- *page*, *tile*, *block*: the same thing, ``page_size`` (128) consecutive tokens of one sequence. Pages are [pages, Hkv, 128, D].
- ``kv_indices`` is the page table without its padding: the pages of sequence 0 in order, then those of sequence 1, and so on.
- ``kv_block_indexes``, selections and ``q2k_indices`` count blocks from the start of the token's own sequence. They are no page ids.
- ``max_score`` is the largest *raw* dot product of each query head with the visible keys of each block: no softmax scale in it.
- ``topk`` forces nothing: the query's own block competes like any other unless ``force_end_blocks`` says otherwise. (OpenMSA's own
  ``select_blocks`` keeps it always.)

The layouts cost something here: OpenMSA keeps scores as [T, H, blocks], their default is [H, blocks, T], so scores are transposed on
the way out and on the way in. ``openmsa.msa_attention`` and ``openmsa.index_select`` do the same work without storing any scores.
"""

from __future__ import annotations

from .csr import SparseAttentionSchedule, build_k2q_csr, sparse_atten_func
from .fmha import Plan, fmha_sm100, fmha_sm100_plan
from .registration import install, uninstall
from .topk import sparse_topk_select

__all__ = [
    "Plan", "SparseAttentionSchedule", "build_k2q_csr", "fmha_sm100", "fmha_sm100_plan", "install", "sparse_atten_func",
    "sparse_topk_select", "uninstall",
]  # fmt: skip
