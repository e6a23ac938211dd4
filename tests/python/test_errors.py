"""Bad input: the exception's class, the argument it names, a text that says what was found, and nothing written."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import torch

import openmsa
from openmsa import Batch, InvalidArgumentError, MsaConfig, UnsupportedError, _core

CONFIG = MsaConfig(num_q_heads=4, num_kv_heads=2, head_dim=16, index_dim=16, block_size=16, top_k=3)
T, S = 5, 50
INT32 = torch.int32


def tensors() -> dict[str, torch.Tensor]:
    return {
        "q": torch.zeros(T, 4, 16), "k": torch.zeros(S, 2, 16), "v": torch.zeros(S, 2, 16),
        "q_idx": torch.zeros(T, 2, 16), "k_idx": torch.zeros(S, 16),
    }  # fmt: skip


def lists() -> torch.Tensor:
    """A valid list for every query of Batch.single(T, S): blocks 0 and 2 and, for the rows that see it, 3."""
    ids = torch.tensor([0, 2, -1], dtype=INT32).repeat(T, 2, 1)
    ids[-2:, :, 2] = 3
    return ids


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=INT32)


def expect(argument: str, text: str, kind: type = InvalidArgumentError):
    """The text opens with the argument's name."""
    return pytest.raises(kind, match=re.compile(rf"^{re.escape(argument)}\b.*{text}", re.DOTALL))


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("q", lambda x: x.long(), "int64.*float32"),
        ("q", lambda x: x.bfloat16(), "bfloat16"),
        ("k", lambda x: x.half(), "float16"),
        ("q", lambda x: x[:, 0], "rank 2"),
        ("q", lambda x: x[None, None], "rank 5"),
        ("q", lambda x: x[0, 0, 0], "rank 0"),
        ("k", lambda x: x[:, :1], "1"),
        ("v", lambda x: x[:-1], "49|50"),
        ("v", lambda x: x.repeat(1, 1, 2)[..., ::2], "stride"),
        ("q", lambda x: x.numpy(), "PyTorch|NumPy"),
        ("k", lambda x: x.numpy(), "numpy.ndarray.*PyTorch"),
        ("v", lambda x: x.tolist(), "list.*PyTorch"),
        ("q_idx", lambda x: x[..., :8], "8"),
        ("k_idx", lambda x: x[:, None], "rank 3"),
        ("k_idx", lambda x: None, "NoneType"),
    ],
)
def test_wrong_tensors(name, change, text, backend):
    given = tensors()
    given[name] = change(given[name])
    with pytest.raises(openmsa.Error, match=re.compile(text)) as error:
        openmsa.msa_attention(*given.values(), Batch.single(T, S), CONFIG, backend=backend)
    # A dtype mismatch is reported at whichever of the two tensors is looked at second.
    assert error.value.argument.startswith(("q", "k", "v"))


@pytest.mark.parametrize(
    ("fields", "argument", "text"),
    [
        ({"cu_seqlens_q": int32(1, T)}, "batch.cu_seqlens_q", "starts at 1"),
        ({"cu_seqlens_q": int32(0, 7, T)}, "batch.cu_seqlens_q", "decreases"),
        ({"cu_seqlens_q": int32(0, T - 1)}, "batch.cu_seqlens_q", "ends at 4"),
        ({"cu_seqlens_q": int32(0, T).long()}, "batch.cu_seqlens_q", "int64"),
        ({"cu_seqlens_q": int32(0, T)[None]}, "batch.cu_seqlens_q", "rank 2"),
        ({"cu_seqlens_q": int32()}, "batch.cu_seqlens_q", "no entries|empty|0"),
        ({"cu_seqlens_k": int32(0, S + 1)}, "batch.cu_seqlens_k", "ends at 51"),
        ({"cu_seqlens_k": int32(0, 10, S)}, "batch.cu_seqlens_k", "2|3"),
        ({"cu_seqlens_k": int32(0, -1)}, "batch.cu_seqlens_k", "decreases"),
        ({"q_start": int32(1, 2)}, "batch.q_start", "2"),
        ({"max_seqlen_q": 4}, "batch.max_seqlen_q", "is 4, but sequence 0 has 5"),
        ({"max_seqlen_k": 49}, "batch.max_seqlen_k", "is 49, but sequence 0 has 50"),
        ({"max_seqlen_k": -1}, "batch.max_seqlen_k", "-1"),
    ],
)  # fmt: skip
def test_wrong_packed_batches(fields, argument, text, backend):
    if fields.get("cu_seqlens_q") is not None and fields["cu_seqlens_q"].numel() == 3:
        fields = {"cu_seqlens_k": int32(0, 10, S), **fields}
    batch = Batch(**{"cu_seqlens_q": int32(0, T), "cu_seqlens_k": int32(0, S), **fields})
    given = tensors()
    with expect(argument, text):
        openmsa.dense_attention(given["q"], given["k"], given["v"], batch, CONFIG, backend=backend)


@pytest.mark.parametrize(
    ("fields", "argument", "text"),
    [
        ({"seqlens_k": int32(-1)}, "batch.seqlens_k", "-1"),
        ({"seqlens_k": int32(65)}, "batch.page_table", "too short"),
        ({"seqlens_k": int32(2**31 - 1)}, "batch.page_table", "too short"),
        ({"page_table": int32(0, 1, 2, 6)[None]}, "batch.page_table", "6"),
        ({"page_table": int32(0, -1, 2, 3)[None]}, "batch.page_table", "-1"),
        ({"page_table": int32(0, 1, 2, 3)}, "batch.page_table", "rank 1"),
    ],
)  # fmt: skip
def test_wrong_paged_batches(fields, argument, text, backend):
    batch = Batch(**{"cu_seqlens_q": int32(0, T), "seqlens_k": int32(S), "page_table": int32(3, 1, 0, 2)[None], **fields})
    pages = torch.zeros(6, 2, 16, 16)
    with expect(argument, text):
        openmsa.dense_attention(tensors()["q"], pages, pages, batch, CONFIG, backend=backend)


def test_page_size_other_than_block_size_is_refused(backend):
    """KNOWN_FAULTS 23."""
    batch = Batch(cu_seqlens_q=int32(0, T), seqlens_k=int32(S), page_table=int32(0, 1)[None])
    pages = torch.zeros(6, 2, 32, 16)
    with expect("k", "32"):
        openmsa.dense_attention(tensors()["q"], pages, pages, batch, CONFIG, backend=backend)


@pytest.mark.parametrize("attend", [openmsa.sparse_attention, openmsa.sparse_decode])
@pytest.mark.parametrize(
    ("row", "text"),
    [
        ([2, 0, 3], "ascending|order|after"),  # KNOWN_FAULTS 7
        ([2, 2, -1], "ascending|twice|order|after"),
        ([0, -1, 3], "-1"),  # KNOWN_FAULTS 2
        ([0, 2, 4], "4"),
        ([0, 2, 2**31 - 1], "2147483647"),
        ([-2, 0, 3], "-2"),
    ],
)
def test_wrong_block_ids(attend, row, text, backend):
    given, ids = tensors(), lists()
    ids[4, 1] = torch.tensor(row, dtype=INT32)
    with expect("block_ids", text):
        attend(given["q"], given["k"], given["v"], ids, Batch.single(T, S), CONFIG, backend=backend)


def test_block_beyond_the_causal_limit_is_refused(backend):
    given, ids = tensors(), lists()
    ids[0, 0] = torch.tensor([0, 2, 3], dtype=INT32)  # query 0 stands at 45, in block 2
    with expect("block_ids", "3"):
        openmsa.sparse_attention(given["q"], given["k"], given["v"], ids, Batch.single(T, S), CONFIG, backend=backend)


def test_list_read_head_major_is_refused(backend):
    """KNOWN_FAULTS 1: [Hkv, T, k] instead of [T, Hkv, k]."""
    given = tensors()
    with expect("block_ids", "2"):
        openmsa.sparse_attention(
            given["q"], given["k"], given["v"], lists().transpose(0, 1), Batch.single(T, S), CONFIG, backend=backend
        )


def test_trusted_indices_are_not_checked_and_give_the_same_result(backend):
    given = tensors()
    given = {name: torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for name, x in given.items()}
    args = (given["q"], given["k"], given["v"], lists(), Batch.single(T, S), CONFIG)
    assert torch.equal(
        openmsa.sparse_attention(*args, backend=backend), openmsa.sparse_attention(*args, backend=backend, trust_indices=True)
    )


def test_stale_score_width_is_refused(backend):
    """KNOWN_FAULTS 9: scores made for shorter sequences."""
    with expect("scores", "1"):
        openmsa.select_blocks(torch.zeros(T, 2, 1), Batch.single(T, S), CONFIG, backend=backend)


@pytest.mark.parametrize("op", ["block_scores", "select_blocks", "index_select", "sparse_attention", "dense_attention"])
def test_nothing_is_written_on_error(op, backend):
    """The extension gets outputs full of a mark and a bad batch; the mark must survive."""
    given = tensors()
    scores, ids = torch.full((T, 2, 4), 7.0), torch.full((T, 2, 3), 7, dtype=INT32)
    out, lse, block_max = torch.full((T, 4, 16), 7.0), torch.full((T, 4), 7.0), torch.full((T, 4, 4), 7.0)
    call = (int32(0, T - 1), int32(0, S), None, None, None, 0, 0, CONFIG._sizes, None, backend, 1, False)
    args = {
        "block_scores": (given["q_idx"], given["k_idx"], scores),
        "select_blocks": (torch.zeros(T, 2, 4), ids),
        "index_select": (given["q_idx"], given["k_idx"], ids),
        "sparse_attention": (given["q"], given["k"], given["v"], lists(), out, lse, False),
        "dense_attention": (given["q"], given["k"], given["v"], out, lse, block_max),
    }
    with expect("batch.cu_seqlens_q", "ends at 4"):
        getattr(_core, op)(*args[op], *call)
    for tensor in (scores, ids, out, lse, block_max):
        assert (tensor == 7).all()


@pytest.mark.parametrize(
    ("fields", "argument", "text"),
    [
        ({"num_q_heads": 5}, "config.num_q_heads", "5.*multiple"),
        ({"num_kv_heads": 0}, "config.num_kv_heads", "0"),
        ({"top_k": 2, "num_init_blocks": 1, "num_local_blocks": 2}, "config.top_k", "force 3"),
        ({"head_dim": -16}, "config.head_dim", "-16"),
        ({"softmax_scale": float("nan")}, "config.softmax_scale", "nan"),
        ({"softmax_scale": 0.0}, "config.softmax_scale", "positive"),
        ({"index_scale": "wide"}, "config.index_scale", "wide.*number"),
        ({"block_size": 16.0}, "config.block_size", "16.0.*integer"),
        ({"block_size": 2**31}, "config.block_size", "2147483648"),
    ],
)  # fmt: skip
def test_wrong_configs(fields, argument, text):
    with expect(argument, text) as error:
        MsaConfig(**{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "index_dim": 16, **fields})
    assert error.value.argument == argument


def test_sizes_that_no_kernel_serves_say_what_is_supported():
    config = MsaConfig(num_q_heads=1, num_kv_heads=1, head_dim=20)
    x = torch.zeros(3, 1, 20)
    with pytest.raises(UnsupportedError, match="head_dim 20.*16"):
        openmsa.dense_attention(x, x, x, Batch.single(3), config, backend="cpu")
    assert not openmsa.dense_attention(x, x, x, Batch.single(3), config, backend="reference").any()


def test_wrong_options():
    given = tensors()
    args = (given["q"], given["k"], given["v"], Batch.single(T, S), CONFIG)
    with expect("backend", "'gpu'.*'reference'"):
        openmsa.dense_attention(*args, backend="gpu")
    with pytest.raises(openmsa.Error, match="cuda|CUDA"):
        openmsa.dense_attention(*args, backend="cuda")
    with pytest.raises(InvalidArgumentError, match="num_threads"):
        openmsa.dense_attention(*args, num_threads=-1)
    with expect("batch", "tuple.*Batch"):
        openmsa.dense_attention(given["q"], given["k"], given["v"], (0, T), CONFIG)
    with expect("config", "dict.*MsaConfig"):
        openmsa.dense_attention(given["q"], given["k"], given["v"], Batch.single(T, S), {})
    with expect("q", "list.*PyTorch tensor or a NumPy array"):
        openmsa.dense_attention([1.0], given["k"], given["v"], Batch.single(T, S), CONFIG)


def test_wrong_batches():
    with expect("batch", "either cu_seqlens_k"):
        Batch(cu_seqlens_q=[0, 1])
    with expect("batch", "either cu_seqlens_k"):
        Batch(cu_seqlens_q=[0, 1], cu_seqlens_k=[0, 1], seqlens_k=[1], page_table=[[0]])
    with expect("batch.cu_seqlens_q", "missing"):
        Batch(cu_seqlens_q=None, cu_seqlens_k=[0])
    with expect("batch.cu_seqlens_k", "32-bit"):
        Batch(cu_seqlens_q=[0, 1], cu_seqlens_k=[0, 2**31])
    with expect("batch.seqlens_k", "1 lengths for 2"):
        Batch.packed([1, 2], [3])


def test_numpy_arrays_that_cannot_be_read():
    q, k = np.zeros((T, 4, 16), np.float32), np.zeros((S, 2, 16), np.float32)
    batch = Batch.single(T, S)
    with expect("k", "dtype >f4"):
        openmsa.dense_attention(q, k.astype(">f4"), k, batch, CONFIG)
    record = np.zeros((S, 2, 16), [("x", "f4"), ("pad", "i2")])["x"]
    with expect("k", "stride.*bytes"):
        openmsa.dense_attention(q, record, k, batch, CONFIG)
    with expect("k", "stride"):
        openmsa.dense_attention(q, k[::-1], k, batch, CONFIG)
    with expect("v", "torch.Tensor.*NumPy"):
        openmsa.dense_attention(q, k, torch.from_numpy(k), batch, CONFIG)


def test_misaligned_memory_is_refused(backend):
    raw = np.zeros(S * 2 * 16 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(S, 2, 16)
    assert raw.ctypes.data % 4
    with expect("k", "align"):
        openmsa.dense_attention(np.zeros((T, 4, 16), np.float32), raw, raw, Batch.single(T, S), CONFIG, backend=backend)


def test_meta_tensors_only_have_shapes():
    given = {name: x.to("meta") for name, x in tensors().items()}
    out = openmsa.dense_attention(given["q"], given["k"], given["v"], Batch.single(T, S).to("meta"), CONFIG)
    assert out.is_meta and out.shape == (T, 4, 16)


class OnTheGpu:
    """What the extension reads of a CUDA tensor, without the GPU."""

    is_cpu, is_cuda, dtype, shape = False, True, torch.float32, (T, 4, 16)

    def stride(self):
        return (64, 16, 1)

    def data_ptr(self):
        return 4096

    def get_device(self):
        return 0


def test_mixed_devices_are_refused():
    given = tensors()
    out, lse = torch.zeros(T, 4, 16), torch.zeros(T, 4)
    call = (int32(0, T), int32(0, S), None, None, None, 0, 0, CONFIG._sizes, None, "auto", 1, False)
    with pytest.raises(openmsa.Error, match="cuda:0"):
        _core.dense_attention(OnTheGpu(), given["k"], given["v"], out, lse, None, *call)


def test_exceptions_are_what_python_expects_and_can_be_pickled():
    assert issubclass(InvalidArgumentError, (openmsa.Error, ValueError)) and issubclass(InvalidArgumentError, ValueError)
    assert issubclass(UnsupportedError, RuntimeError) and issubclass(openmsa.OutOfPagesError, openmsa.Error)
    error = pickle.loads(pickle.dumps(UnsupportedError("text", "q")))
    assert (type(error), str(error), error.argument) == (UnsupportedError, "text", "q")
