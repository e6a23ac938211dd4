"""Answering to the name `fmha_sm100`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types

from ..errors import InvalidArgumentError
from . import csr, fmha, topk

NAME = "fmha_sm100"
# The modules of theirs that programs import from, and what each offers of what is here.
_DENSE = {"fmha_sm100": fmha.fmha_sm100, "fmha_sm100_plan": fmha.fmha_sm100_plan, "sparse_topk_select": topk.sparse_topk_select}
_SPARSE = {"build_k2q_csr": csr.build_k2q_csr, "sparse_atten_func": csr.sparse_atten_func}
_MODULES = {NAME: {**_DENSE, **_SPARSE}, f"{NAME}.api": _DENSE, f"{NAME}.sparse": _SPARSE}


def _is_ours(module: types.ModuleType | None) -> bool:
    return getattr(module, "__openmsa__", False)


def _make(name: str, members: dict) -> types.ModuleType:
    module = types.ModuleType(name, f"`{name}` as provided by openmsa.compat.")
    # With a spec, importlib.util.find_spec answers for it; with a (bare) path, submodules are looked for in sys.modules alone.
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == NAME)
    if name == NAME:
        module.__path__ = []
    module.__all__ = sorted(members)
    module.__openmsa__ = True
    module.__dict__.update(members)
    return module


def install(*, replace: bool = False) -> types.ModuleType:
    """Registers this implementation as the module ``fmha_sm100`` (with ``.api`` and ``.sparse``) for this process, and returns it.

    Call it before the program imports ``fmha_sm100``; a second call changes nothing. If the authors' own package is imported or
    installed, it is left alone and this raises, unless ``replace=True`` asks for ours in its place. What was imported from it
    earlier stays theirs.
    """
    present = sys.modules.get(NAME)
    if _is_ours(present):
        return present
    if not replace:
        what = "already imported" if present is not None else "installed"
        if present is not None or importlib.util.find_spec(NAME) is not None:
            raise InvalidArgumentError(
                f"replace is False, but another {NAME} is {what}; it is left as it is. Call install(replace=True) to use OpenMSA in "
                "its place in this process.",
                "replace",
            )
    for name in [name for name in sys.modules if name.startswith(f"{NAME}.")]:
        del sys.modules[name]  # a submodule of theirs must not be found under ours
    for name, members in _MODULES.items():
        sys.modules[name] = _make(name, members)
    package = sys.modules[NAME]
    package.api, package.sparse = sys.modules[f"{NAME}.api"], sys.modules[f"{NAME}.sparse"]
    return package


def uninstall() -> None:
    """Takes the registration back; without one, does nothing. Functions already imported keep working."""
    for name in _MODULES:
        if _is_ours(sys.modules.get(name)):
            del sys.modules[name]
