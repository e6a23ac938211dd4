"""The package itself: imports without PyTorch, versions that agree, stubs that cover the extension, typing marker, config behaviour."""

from __future__ import annotations

import ast
import copy
import dataclasses
import pathlib
import pickle
import re
import sys

import pytest

import openmsa
from openmsa import MsaConfig, _core
from test_torch_ops import run_python

PACKAGE = pathlib.Path(openmsa.__file__).parent

# Stands in for a machine without PyTorch: any import of it fails as it would there.
WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
"""


def test_numpy_path_works_without_pytorch():
    out = run_python(
        WITHOUT_TORCH
        + """
import numpy as np, openmsa
config = openmsa.MsaConfig(num_q_heads=2, num_kv_heads=1, head_dim=16, index_dim=16, block_size=16, top_k=2)
x = np.random.default_rng(0).standard_normal((50, 2, 16), dtype=np.float32)
batch = openmsa.Batch(cu_seqlens_q=[0, 50], cu_seqlens_k=[0, 50])
out, ids = openmsa.msa_attention(x, x[:, :1], x[:, :1], x[:, :1], x[:, 0], batch, config, return_block_ids=True)
assert isinstance(batch.cu_seqlens_q, np.ndarray) and isinstance(out, np.ndarray) and ids[-1, 0, -1] == 3
assert openmsa.Batch.single(3).cu_seqlens_k.tolist() == [0, 3]
for name in ("nn", "PagedKvCache"):
    try:
        getattr(openmsa, name)
    except ModuleNotFoundError as error:
        assert error.name == "torch"
    else:
        raise AssertionError(name)
print("torch" in sys.modules, openmsa.__version__)
"""
    )
    assert out.split() == ["False", openmsa.__version__]


def test_importing_does_not_import_pytorch_but_registers_with_it():
    out = run_python(
        "import sys, openmsa; print('torch' in sys.modules)\n"
        "import numpy as np; x = np.zeros((3, 1, 16), np.float32)\n"
        "openmsa.dense_attention(x, x, x, openmsa.Batch.single(3), openmsa.MsaConfig(num_q_heads=1, num_kv_heads=1, head_dim=16))\n"
        "print('torch' in sys.modules)\n"
    )
    assert out.split() == ["False", "False"]
    out = run_python("import torch, openmsa; print(torch.ops.openmsa.index_select.default)")
    assert "openmsa" in out


def test_version_is_that_of_the_library():
    assert openmsa.__version__ == _core.version() and re.fullmatch(r"\d+\.\d+\.\d+", openmsa.__version__)
    for path, pattern in (("pyproject.toml", r'^version = "(.*)"'), ("CMakeLists.txt", r"project\(OpenMSA VERSION ([\d.]+)")):
        file = pathlib.Path(__file__).resolve().parents[2] / path
        assert re.search(pattern, file.read_text(), re.MULTILINE).group(1) == openmsa.__version__


def test_every_public_name_exists_and_is_documented():
    for name in openmsa.__all__:
        if name == "hf":
            pytest.importorskip("transformers")
        value = getattr(openmsa, name)
        assert value.__doc__, name
    assert set(openmsa.__all__) <= set(dir(openmsa))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        openmsa.nonsense


def test_stubs_cover_the_extension():
    """Every function of the extension, with its parameters in order, and nothing else."""
    stub = {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.parse((PACKAGE / "_core.pyi").read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    real = {}
    for name, value in vars(_core).items():
        if hasattr(value, "__nb_signature__"):
            signature = value.__nb_signature__[0][0]
            node = ast.parse(re.sub(r"\\\d+", "...", signature) + ": ...").body[0]
            real[name] = [argument.arg for argument in node.args.args]
    assert stub == real
    assert (PACKAGE / "py.typed").exists()


def test_registry_is_listed():
    backends = {row.backend: row for row in openmsa.list_backends()}
    assert backends["reference"].available and backends["cpu"].available and backends["cpu"].detail
    assert all(row.detail for row in backends.values())
    stages = {
        "block_scores", "select_blocks", "index_select", "sparse_attention", "sparse_decode", "msa_attention", "dense_attention",
        "sparse_attention_backward", "dense_attention_backward", "index_kl_loss", "write_pages",
    }  # fmt: skip
    for backend in ("reference", "cpu"):
        assert {row.stage for row in openmsa.list_kernels() if row.backend == backend} == stages
    assert all(row.name and row.supports for row in openmsa.list_kernels())


def test_config_is_a_value():
    sizes = dict(num_q_heads=64, num_kv_heads=4, head_dim=128, index_dim=128)
    config = MsaConfig(**sizes)
    assert config == MsaConfig(**sizes) and hash(config) == hash(MsaConfig(**sizes)) and config != MsaConfig(**sizes, top_k=8)
    assert (config.block_size, config.top_k, config.num_init_blocks, config.num_local_blocks) == (128, 16, 0, 1)
    assert config.group_size == 16 and config.num_blocks(129) == 2
    assert config.effective_softmax_scale == config.effective_index_scale == pytest.approx(128**-0.5)
    assert MsaConfig(**sizes, softmax_scale=1, index_scale=0.5).effective_softmax_scale == 1.0
    assert eval(repr(config), {"MsaConfig": MsaConfig}) == config
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert other == config and other._sizes == config._sizes
    changed = dataclasses.replace(config, top_k=4)
    assert changed.top_k == 4 and changed._sizes[5] == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 1
    with pytest.raises(TypeError):
        MsaConfig(64, 4, 128)


def test_the_extension_exports_nothing_of_the_library():
    """A program may link the C++ library and load this module; their symbols must not meet."""
    if sys.platform != "linux":
        pytest.skip("exported symbols are checked on Linux, with nm")
    import shutil
    import subprocess

    if not shutil.which("nm"):
        pytest.skip("nm (binutils) is not installed")
    symbols = subprocess.run(["nm", "-DC", "--defined-only", _core.__file__], capture_output=True, text=True, check=True).stdout
    assert "PyInit__core" in symbols and "openmsa::" not in symbols
