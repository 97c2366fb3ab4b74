"""Verbs and flags of before 0.2.0 do what the new ones do, and say so on stderr. They go in 0.3.0."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_lab import evaluate_run
from forge_testing import write_job
from forge_testing.problems import rejects
from forge_train.cli import run_verb
from forge_train.errors import ConfigError

SPELLINGS = [
    ("study replay {} --step 1", "replay {} --step 1"),
    ("study bisect {} {}", "bisect {} {}"),
    ("study sweep {} --plan --jobs 0", "sweep {} --dry_run --jobs 0"),
    ("report {} --text", "goodput {}"),
    ("report {} --json", "goodput {} --json"),
    ("eval {} --rows=0", "eval {} --batch_size=0"),
    ("generate {} --prompts {} --rows 0", "generate {} --prompts {} --batch-size 0"),
    ("slurm {}/job.toml --print --submit", "slurm {}/job.toml --dry_run --submit"),
    ("extract {} --points a --output b.npz --batch 0", "extract {} --points a --output b.npz --batch_size 0"),
]  # fmt: skip


def answer(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The error of a command in a folder with a job, and what it printed to stderr."""
    with pytest.raises(ConfigError) as caught:
        run_verb(command.format(folder, folder).split())
    return str(caught.value), capsys.readouterr().err


@pytest.mark.parametrize(("old", "new"), SPELLINGS)
def test_an_old_spelling_is_read(
    old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path)
    wanted, silent = answer(new, tmp_path, capsys)
    found, said = answer(old, tmp_path, capsys)
    assert found == wanted
    assert silent == ""
    assert said.startswith("forge-train: ")
    assert new.split()[0] in said


def test_old_arguments_are_read(tmp_path: Path) -> None:
    with (
        rejects("--batch_size", 0, "range", ConfigError),
        pytest.warns(DeprecationWarning, match="batch_size"),
    ):
        evaluate_run(tmp_path, rows=0)  # type: ignore[call-arg]
