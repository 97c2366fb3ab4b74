"""docs/prove.md is what happens: its files are written, its commands run, their output compared.

`python tests/documents/test_prove_page.py` writes the output into the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/prove.md"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
FILE = re.compile(r"cat > (\S+) <<'(\w+)'\n(.*?)\2\n", re.DOTALL)


def with_real_output(page: str, folder: Path) -> str:
    """The page, with what the commands of `console` blocks print, after its files are written and its Python has run."""
    for kind, text in BLOCK.findall(page):
        for name, _, file in FILE.findall(text):
            (folder / name).write_text(file)
        if kind == "python":
            _run([sys.executable, "-c", text], folder)
    return BLOCK.sub(lambda found: _filled(found, folder), page)


def _filled(found: re.Match[str], folder: Path) -> str:
    kind, text = found.groups()
    if kind != "console":
        return found[0]
    output = ""
    for command in [line[2:] for line in text.splitlines() if line.startswith("$ ")]:
        arguments = ["bash", "-c", command.replace("python ", f"{sys.executable} ", 1)]
        output += f"$ {command}\n" + _run(arguments, folder)
    return f"```console\n{output}```"


def _run(command: list[str], folder: Path) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def without_figures(page: str) -> str:
    """Errors, seconds and versions differ from machine to machine."""
    page = re.sub(r"torch \d\S*,", "torch,", page)
    page = re.sub(r"\d\.\de[+-]\d\d\b", "error", page)
    return re.sub(r"(?m)(?<=error) +\d+\.\d$", "", page)


@pytest.mark.slow
@pytest.mark.distributed
def test_the_page_shows_what_its_commands_print(tmp_path: Path) -> None:
    page = PAGE.read_text()
    real = with_real_output(page, tmp_path)
    assert without_figures(real) == without_figures(page)
    assert real.count(" green ") >= 24
    assert "parameter layers.1.q_norm.weight, layer layers.1" in real
    assert "1 red" in real


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        PAGE.write_text(with_real_output(PAGE.read_text(), Path(made)))
