"""The notebooks are those of the scripts beside them, and run in a folder of their own; each ends with checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts.write_notebooks import notebook_of

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def files_of_tree() -> str:
    """The notebooks that git finds changed, and files beside them."""
    command = ["git", "status", "--porcelain", "examples/notebooks"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_each_notebook_is_that_of_its_script() -> None:
    assert len(SCRIPTS) == 7
    assert {p.stem for p in SCRIPTS} == {p.stem for p in FOLDER.glob("*.ipynb")}
    for script in SCRIPTS:
        written = script.with_suffix(".ipynb").read_text(encoding="utf-8")
        assert notebook_of(script) == written, "run: hatch run dev:notebooks"
        assert '"image/png"' not in written, "notebooks are committed without outputs"


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_it_runs_and_its_checks_hold(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = files_of_tree()
    notebook: Any = nbformat.read(path.with_suffix(".ipynb"), 4)
    # the kernel of this interpreter, whatever kernels the machine has
    spec = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=600, resources=spec, kernel_name="python3")
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) >= 2
    assert all(len(o["data"]["image/png"]) > 10_000 for o in pictures)
    assert outputs[-1]["text"].endswith("all checks hold\n")
    assert [o["text"] for o in outputs if o.get("name") == "stderr"] == []
    assert files_of_tree() == before


@pytest.mark.slow
def test_points_of_a_hugging_face_folder_are_the_hidden_states_of_transformers() -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "examples/interp_on_hf.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("differs by") == 6
    assert done.stdout.count("without head") == 4
