"""What sweeps reject before anything is trained."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_lab.study import page, sweep
from forge_lab.study.queue import RunQueue, locked, writing
from forge_testing.problems import assert_problem, rejects
from forge_testing.studies import write_study
from forge_train import ConfigError, JobError, StateError

pytestmark = pytest.mark.lane("test")


def test_flags_of_a_sweep(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"gpu": "h100", "site": "here", "report": tmp_path / "x.txt"}
    with rejects("--jobs", 0, "range", ConfigError) as caught:
        sweep.run_sweep(tmp_path / "none.toml", jobs=0, submit=True, **flags)
    assert_problem(caught.value, "--gpu", "h100", "requires")
    assert_problem(caught.value, "--submit", True, "requires")
    assert_problem(caught.value, "--site", "here", "requires")
    assert_problem(caught.value, "--report", str(tmp_path / "x.txt"), "name")
    with rejects("--dry_run", ..., "excludes", ConfigError):
        sweep.run_sweep(tmp_path / "none.toml", dry_run=True, slurm=True)


def test_launchers_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rejects("study.dir", str(tmp_path), "write", JobError), writing(tmp_path, "study.dir"):
        raise OSError(30, "read-only")
    out = str(tmp_path / "out")
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(Path(out), "study.dir"))
        with rejects("study.dir", out, "locked", JobError):
            stack.enter_context(locked(Path(out), "study.dir"))

    def full(*_: Any) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(page, "check_plot", lambda: None)
    monkeypatch.setattr(page, "write_page", full)
    monkeypatch.setattr(RunQueue, "train", lambda self: 0)
    with rejects("--report", str(tmp_path / "a.md"), "write", JobError):
        sweep.run_sweep(write_study(tmp_path), report=tmp_path / "a.md")


def test_pages_of_a_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with rejects("sweep", ..., "requires", ConfigError, where="'forge-lab[plot]'"):
        page.check_plot()
    nan = {"event": "evaluation", "step": 3, "val_loss": float("nan")}
    for events, value in (([], None), ([nan], float("nan"))):
        monkeypatch.setattr(page, "read_run", lambda folder, e=events: SimpleNamespace(events=e))
        with rejects("val_loss", value, "finite", StateError, where="runs/a"):
            page._row(SimpleNamespace(dir="runs/a", steps=3))  # type: ignore[arg-type]
