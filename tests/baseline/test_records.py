"""The five recorded jobs train as they did, anew and from the checkpoint that was saved at step 15."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_testing.runs import fit_alone

from .records import (
    JOBS,
    ROOT,
    bound_here,
    differences,
    job_file,
    recorded,
    rows_of,
    saved_run,
    weights_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.lane("ci")]


@pytest.mark.parametrize("resumed", [False, True], ids=["new", "resumed"])
@pytest.mark.parametrize("name", JOBS)
def test_a_job_trains_as_it_was_recorded(
    name: str, resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the jobs name files below it
    run = saved_run(name, tmp_path) if resumed else tmp_path / name
    fit_alone(job_file(name), **{"run.dir": str(run)})
    assert not list(differences((rows_of(run), weights_of(run)), recorded(name), bound_here(name)))
