"""What verbs of a study reject before anything is trained."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forge_lab.study import bisect, difference, private_job, replay, verbs
from forge_lab.study.record import Part, Record
from forge_testing.problems import rejects
from forge_train import ConfigError, StateError

pytestmark = pytest.mark.lane("test")


def test_flags_of_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rejects("--from_step", 3, "requires", ConfigError):
        verbs.replay(tmp_path, step=4, from_step=3)
    with rejects("--record", str(tmp_path), "excludes", ConfigError):
        verbs.replay(tmp_path, step=4, record=tmp_path, anomaly=True)
    with rejects("--nproc", 0, "range", ConfigError):
        verbs.replay(tmp_path, step=4, nproc=0)
    with rejects("--hook", "no_module:x", "not_found", ConfigError):
        verbs._import("no_module:x")
    with rejects("--hook", "os:sep", "type", ConfigError):
        verbs._import("os:sep")
    monkeypatch.setattr(private_job, "find_start", lambda run, step: 0)
    with rejects("--debugger", ..., "processes", ConfigError):
        verbs.replay(tmp_path, step=4, debugger=True, nproc=2)
    with rejects("--from_step", 4, "order", ConfigError):
        verbs.replay(tmp_path, step=4, from_step=4, record=tmp_path, nproc=1)
    (tmp_path / "record.json").touch()
    with rejects("--record", str(tmp_path), "exists", StateError):
        verbs.replay(tmp_path, step=4, record=tmp_path, nproc=1)
    monkeypatch.setattr(verbs, "is_rank_of_many", lambda: True)
    with rejects("--output", ..., "missing", ConfigError):
        verbs.replay(tmp_path, step=4)


def test_flags_of_bisect(tmp_path: Path) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    for folder in (one, two):
        folder.mkdir()
    with rejects("--tolerance", 1.0, "range", ConfigError):
        verbs.bisect(one, two, tolerance=1.0)
    with rejects("run_b", str(one), "duplicate", ConfigError):
        bisect.bisect_runs(one, one, lambda *_: None)
    with rejects("run_b", str(two), "common", StateError):
        bisect.find_interval(one, two)
    (one / "record.json").touch()
    with rejects("run_b", str(two), "mismatch", ConfigError):
        verbs.bisect(one, two)
    (two / "record.json").touch()
    for flag in ("logged_only", "callbacks"):
        with rejects(f"--{flag}", ..., "excludes", ConfigError):
            verbs.bisect(one, two, **{flag: True})
    with rejects("record", str(one), "damaged", ConfigError):
        Record(one)


def test_runs_of_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def saved(path: Path) -> Any:
        table = SimpleNamespace(tensors={} if "b" in path.parts else {"model.w": 1})
        meta = torch.empty(2, device="meta")
        yield SimpleNamespace(
            digest=str(path), names=lambda patterns: ["model.w"], table=table, meta=lambda n: meta
        )

    monkeypatch.setattr(bisect, "SavedTensors", saved)
    with rejects("run_b", "b", "mismatch", ConfigError, where="w in"):
        bisect.different_tensor(Path("a"), Path("b"), 2)

    def record(folder: str, first: int) -> Any:
        head = SimpleNamespace(first=first, last=first + 1, run=folder, world_size=1, layout={}, device="cpu")  # fmt: skip
        return SimpleNamespace(head=head, folder=Path(folder))

    a, b = record("a", 1), record("b", 7)
    with rejects("run_b", "b", "common", ConfigError):
        difference.first_difference(a, b)
    part = Part((2, 3), "float32", "", 0.0, np.zeros(1))
    with rejects("w", None, "mismatch", ConfigError):
        difference._require_same_model(a, b, {"w": {(-1, 0): [part]}}, {})


def test_steps_of_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SimpleNamespace(begin=0, total_steps=4, rollbacks=[])
    for module in (private_job, replay):
        monkeypatch.setattr(module, "read_journal", lambda run: journal)
    (tmp_path / "config.toml").write_text("[run]\nseed = 0\n")
    for step in (0, 5):
        with rejects("--step", step, "range", ConfigError):
            private_job.find_start(tmp_path, step)
    assert private_job.find_start(tmp_path, 2) == 0
    (tmp_path / "model.toml").touch()
    with rejects("--step", 2, "imported", StateError):
        private_job.find_start(tmp_path, 2)
    with rejects("--run.seed", ..., "fixed", ConfigError):
        private_job.private_job(tmp_path, 0, tmp_path / "x", {"run.seed": 1})
    with rejects("--set", "parallel.tp", "form", ConfigError):
        private_job.parse_settings(("parallel.tp",))


def test_the_folder_of_a_replay(tmp_path: Path) -> None:
    inside, other = tmp_path / "run/x", tmp_path / "other"
    with rejects("--output", str(inside), "inside", ConfigError):
        replay.private_folder(tmp_path / "run", inside).__enter__()
    other.mkdir()
    (other / "config.toml").touch()
    with rejects("--output", str(other), "exists", StateError):
        replay.private_folder(tmp_path / "run", other).__enter__()
