"""The C++ library. Private: use the functions of openmsa."""

from collections.abc import Sequence
from typing import Any, TypeAlias

_Array: TypeAlias = Any  # torch.Tensor | numpy.ndarray

def version() -> str: ...
def list_backends() -> list[tuple[str, bool, bool, str]]: ...
def list_kernels() -> list[tuple[str, str, str, str]]: ...
def synchronize(device: int, stream: int) -> None: ...
def why_unsupported(backend: str, dtype: str, sizes: Sequence[int]) -> str: ...
def simd_target() -> str: ...
def limit_simd_target(name: str) -> None: ...
def validate_config(sizes: Sequence[int], softmax_scale: float | None, index_scale: float | None) -> None: ...
def block_scores(
    q_idx: _Array, k_idx: _Array, scores: _Array,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None, seqlens_k: _Array | None, page_table: _Array | None,
    q_start: _Array | None, max_seqlen_q: int, max_seqlen_k: int, sizes: Sequence[int], softmax_scale: float | None,
    backend: str, num_threads: int, trust_indices: bool,
) -> None: ...
def select_blocks(
    scores: _Array, block_ids: _Array,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None, seqlens_k: _Array | None, page_table: _Array | None,
    q_start: _Array | None, max_seqlen_q: int, max_seqlen_k: int, sizes: Sequence[int], softmax_scale: float | None,
    backend: str, num_threads: int, trust_indices: bool,
) -> None: ...
def index_select(
    q_idx: _Array, k_idx: _Array, block_ids: _Array,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None, seqlens_k: _Array | None, page_table: _Array | None,
    q_start: _Array | None, max_seqlen_q: int, max_seqlen_k: int, sizes: Sequence[int], softmax_scale: float | None,
    backend: str, num_threads: int, trust_indices: bool,
) -> None: ...
def index_select_workspace_bytes(
    q_idx: _Array, k_idx: _Array, block_ids: _Array,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None, seqlens_k: _Array | None, page_table: _Array | None,
    q_start: _Array | None, max_seqlen_q: int, max_seqlen_k: int, sizes: Sequence[int], softmax_scale: float | None,
    backend: str, num_threads: int, trust_indices: bool,
) -> int: ...
def sparse_attention(
    q: _Array, k: _Array, v: _Array, block_ids: _Array, out: _Array, lse: _Array | None, decode: bool,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None, seqlens_k: _Array | None, page_table: _Array | None,
    q_start: _Array | None, max_seqlen_q: int, max_seqlen_k: int, sizes: Sequence[int], softmax_scale: float | None,
    backend: str, num_threads: int, trust_indices: bool,
) -> None: ...
def msa_attention(
    q: _Array, k: _Array, v: _Array, q_idx: _Array, k_idx: _Array, out: _Array, lse: _Array | None, block_ids: _Array | None,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None, seqlens_k: _Array | None, page_table: _Array | None,
    q_start: _Array | None, max_seqlen_q: int, max_seqlen_k: int, sizes: Sequence[int], softmax_scale: float | None,
    backend: str, num_threads: int, trust_indices: bool,
) -> None: ...
def dense_attention(
    q: _Array, k: _Array, v: _Array, out: _Array, lse: _Array | None, block_max: _Array | None,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None, seqlens_k: _Array | None, page_table: _Array | None,
    q_start: _Array | None, max_seqlen_q: int, max_seqlen_k: int, sizes: Sequence[int], softmax_scale: float | None,
    backend: str, num_threads: int, trust_indices: bool,
) -> None: ...
def sparse_attention_backward(
    q: _Array, k: _Array, v: _Array, block_ids: _Array, out: _Array, lse: _Array, d_out: _Array,
    d_q: _Array, d_k: _Array, d_v: _Array, deterministic: bool,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None, seqlens_k: _Array | None, page_table: _Array | None,
    q_start: _Array | None, max_seqlen_q: int, max_seqlen_k: int, sizes: Sequence[int], softmax_scale: float | None,
    backend: str, num_threads: int, trust_indices: bool,
) -> None: ...
def dense_attention_backward(
    q: _Array, k: _Array, v: _Array, out: _Array, lse: _Array, d_out: _Array,
    d_q: _Array, d_k: _Array, d_v: _Array, deterministic: bool,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None, seqlens_k: _Array | None, page_table: _Array | None,
    q_start: _Array | None, max_seqlen_q: int, max_seqlen_k: int, sizes: Sequence[int], softmax_scale: float | None,
    backend: str, num_threads: int, trust_indices: bool,
) -> None: ...
def index_kl_loss(
    q: _Array, k: _Array, lse: _Array, q_idx: _Array, k_idx: _Array, block_ids: _Array | None, loss: _Array | None,
    d_q_idx: _Array | None, d_k_idx: _Array | None, num_tokens: int, deterministic: bool, index_scale: float | None,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None, seqlens_k: _Array | None, page_table: _Array | None,
    q_start: _Array | None, max_seqlen_q: int, max_seqlen_k: int, sizes: Sequence[int], softmax_scale: float | None,
    backend: str, num_threads: int, trust_indices: bool,
) -> None: ...
def write_pages(
    k: _Array, v: _Array, k_idx: _Array, slots: _Array, k_pages: _Array, v_pages: _Array, k_idx_pages: _Array,
    backend: str, num_threads: int, trust_indices: bool,
) -> None: ...
