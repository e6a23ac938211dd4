"""The guide's programs run, and the guide shows exactly their text."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import openmsa

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = sorted(path.name for path in (DOCS / "examples").iterdir() if path.is_file())


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.endswith(".py")])
def test_python_example_runs(name, tmp_path):
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    package_root = str(pathlib.Path(openmsa.__file__).resolve().parents[1])
    path = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, str(DOCS / "examples" / name)], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": path}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_guide_shows_the_programs_as_they_are():
    guide = (DOCS / "guide.md").read_text(encoding="utf-8")
    shown = {}
    for name, text in re.findall(r"<!-- examples/(\S+) -->\n```\w+\n(.*?)^```$", guide, flags=re.DOTALL | re.MULTILINE):
        shown[name] = text
    assert sorted(shown) == EXAMPLES
    for name, text in shown.items():
        assert text == (DOCS / "examples" / name).read_text(encoding="utf-8"), f"docs/guide.md and docs/examples/{name} differ"


@pytest.mark.parametrize("document", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_lead_somewhere(document):
    text = (DOCS / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (DOCS / target).resolve().exists(), f"{document} links to {target}"


def error_examples() -> tuple[str, list[tuple[str, str]]]:
    """The inputs that docs/errors.md gives all its examples, and (code, text shown) of each."""
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    prelude = re.search(r"<!-- prelude -->\n```python\n(.*?)```", text, flags=re.DOTALL)[1]
    return prelude, re.findall(r"```python\n((?:(?!```).)*?)```\n```text\n(.*?)```", text, flags=re.DOTALL)


PRELUDE, ERROR_EXAMPLES = error_examples()


def test_errors_document_has_its_examples():
    assert len(ERROR_EXAMPLES) > 20


@pytest.mark.parametrize("code, shown", ERROR_EXAMPLES, ids=[code.strip().splitlines()[-1][:60] for code, _ in ERROR_EXAMPLES])
def test_error_example_reads_as_documented(code, shown):
    names: dict = {}
    exec(PRELUDE, names)
    with pytest.raises(openmsa.Error) as raised:
        exec(code, names)
    text = f"{type(raised.value).__name__}: {raised.value}"
    assert text == " ".join(shown.split()), "run the example and put the new text into docs/errors.md"


def test_errors_document_names_every_class_and_code():
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    for name in ("Error", "InvalidArgumentError", "UnsupportedError", "OutOfWorkspaceError", "OutOfPagesError", "DeviceError"):
        assert f"`{name}`" in text
    header = (ROOT / "include" / "openmsa" / "error.hpp").read_text(encoding="utf-8")
    codes = re.findall(r"^  (k\w+),", header, flags=re.MULTILINE)
    assert codes
    for code in codes:
        assert code in text
