"""Runs whose data is read ahead: a worker that dies changes nothing, a source that raises ends them in one line."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from forge_testing.runs import columns, make_job
from forge_train import Callback, DataError, Trainer, load_job, read_run

QUIET = {"metrics.console": "off", "sample.max_new_tokens": 0, "train.steps": 12}
BROKEN = """
from forge_testing.models import Alphabet

class Tapes(Alphabet):
    def read(self, start, stop):
        if start <= 640 < stop:
            raise KeyError("tape 7")
        return super().read(start, stop)
"""


class Kill(Callback):
    """Kills a data worker after the second step, as a kernel short of memory would."""

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 2:
            os.kill(trainer.loader._ahead._workers[1].pid, signal.SIGKILL)  # type: ignore[union-attr]


def run(folder: Path, *callbacks: Callback, **more: Any) -> Path:
    job = make_job(folder)
    Trainer(load_job(job, {**QUIET, **more}), callbacks).fit()
    return job


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_run_whose_worker_is_killed_is_the_run_without_workers(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone")
    killed = run(tmp_path / "killed", Kill(), **{"data.num_workers": 2, "data.prefetch": 2})
    thread = run(tmp_path / "thread", **{"data.prefetch": 3})
    assert columns(alone) == columns(killed) == columns(thread)
    (lost,) = [
        e for e in read_run(killed.parent / "run").events if e["event"] == "data_worker_lost"
    ]
    assert (lost["worker"], lost["cause"], lost["restarts"], lost["rank"]) == (1, "SIGKILL", 1, 0)
    assert lost["reading"].startswith("instances ")


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_custom_source_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    (tmp_path / "tapes.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"data.sources.text.name": "tapes:Tapes", "data.num_workers": num_workers}
    with pytest.raises(DataError) as error:
        run(tmp_path, **{**own, "eval.every_steps": 0, "train.steps": 60})
    assert error.value.exit_code == 65
    (line,) = str(error.value).splitlines()
    assert " of source Tapes" in line
    assert " KeyError: 'tape 7' (" in line
    assert "tapes.py:7)" in line
    (fault,) = [e for e in read_run(tmp_path / "run").events if e["event"] == "fault"]
    assert "KeyError" in fault["cause"]
