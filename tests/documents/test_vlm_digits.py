"""The page about the reader of digits: its commands run, and its table and picture are those of its rows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forge_testing.processes import forge_train

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/vision.md"
FEW = ["--train.steps", "2", "--train.global_batch", "4"]


@pytest.mark.slow
def test_the_commands_that_write_the_table_run(tmp_path: Path) -> None:
    """In a folder of its own, with two steps each; `--write` makes table, rows and picture."""
    for extra in ("sklearn", "PIL", "tokenizers", "matplotlib"):
        pytest.importorskip(extra)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "docs").mkdir()
    shutil.copy(PAGE, tmp_path / "docs")
    found = re.search(
        r"```text\n(forge-train run examples/digits.*?)```", PAGE.read_text(), re.DOTALL
    )
    assert found
    commands = ["python -m examples.digits.write runs/digits_data", *found[1].splitlines()]
    assert len(commands) == 6
    for command in commands:
        program, *words = command.split()
        if program == "forge-train":
            done = forge_train(*words, *FEW, cwd=tmp_path)
            assert done.code == 0, done.err
        else:
            assert program == "python"
            out = _python(words, tmp_path)
    made = tmp_path / "docs/vision.md"
    rows = json.loads((tmp_path / "docs/data/vision.json").read_text())
    assert [json.loads(line) for line in out.splitlines()] == rows
    assert len({row["fusion"] for row in rows}) == 4
    assert [row["tokens"] for row in rows] == [74, 11, 74, 74]
    assert {row["steps"] for row in rows} == {2}
    assert made.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    names = re.findall(r"^\| (\w+) \| [\d.]+%", made.read_text(), re.MULTILINE)
    assert names == [row["fusion"] for row in rows]
    ends = [text[text.index("## Where") :] for text in (made.read_text(), PAGE.read_text())]
    assert ends[0] == ends[1]


def _python(words: list[str], folder: Path) -> str:
    """What `python words...` prints, in a folder."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_table_of_the_page_is_that_of_its_rows() -> None:
    pytest.importorskip("PIL")
    from examples.digits.read import table

    rows = json.loads((ROOT / "docs/data/vision.json").read_text())
    assert table(rows) in PAGE.read_text()
    best = {row["fusion"]: row["right"] for row in rows}
    assert min(best.values()) >= 0.95
    assert all(row["right_blank"] < 0.2 and row["ended"] >= 0.99 for row in rows)
