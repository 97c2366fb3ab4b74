"""The arrays that `forge-train study sweep --slurm` writes, on a real Slurm: preempted elements end with the same bits."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.slurm.cluster import wait_until
from tests.use.test_sweep import LONG, SHORT, TRUNK, write_study

from forge_testing import forge_train
from forge_testing.processes import last_step
from forge_testing.runs import assert_same_bits, saved_tensors
from forge_train import ConfigError, read_run
from forge_train.study.runs import read_study
from forge_train.study.sweep import run_sweep

ROOT = Path(__file__).parents[2]
_PAUSES = '[base.callbacks.pause]\nname = "tests.slurm.pause:Pause"\nevery_steps = {}\n'
_SLURM = "[base.resilience]\nsave_limit_seconds = 20\n[base.slurm]\ncpus_per_task = 1\n"


def test_what_an_array_of_runs_cannot_have_is_refused(tmp_path: Path) -> None:
    path = write_study(tmp_path, base='[base.slurm]\narray = "0-3%1"\non_stop = "resubmit"')
    with pytest.raises(
        ConfigError, match=r"(?s)slurm\.array '0-3%1' is made by the study.*forks wait for"
    ):
        run_sweep(path, slurm=True)
    assert not (tmp_path / "out").exists()


def test_its_scripts_give_shellcheck_nothing_to_say(tmp_path: Path, capsys: Any) -> None:
    path = write_study(tmp_path, base=_SLURM)
    assert run_sweep(path, slurm=True) == 0
    said = capsys.readouterr().out
    for name, elements in (("trunks", [TRUNK]), ("forks", [SHORT, LONG])):
        folder = tmp_path / "out/slurm" / name
        assert f"#SBATCH --array=0-{len(elements) - 1}" in (folder / "job.sh").read_text()
        for number, run in enumerate(elements):
            assert (folder / f"task-{number}.toml").resolve() == tmp_path / f"out/runs/{run}.toml"
            assert (folder / f"task-{number}").resolve() == tmp_path / "out/runs" / run
        assert f"{folder}/job.sh" in said
        done = subprocess.run(
            ["shellcheck", "--shell=bash", "--severity=style", "--exclude=SC2016", folder / "job.sh"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
    assert "--dependency=afterok:$first" in said


@pytest.mark.slow
@pytest.mark.distributed
def test_preempted_elements_end_with_the_bits_of_an_undisturbed_sweep(
    slurm: Any, tmp_path: Path
) -> None:
    """The trunk is preempted while forks wait for it; then a fork is."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    undisturbed = write_study(tmp_path / "here", base=_PAUSES.format(10**6))
    assert forge_train("study", "sweep", undisturbed, "--jobs", "2", cwd=ROOT).code == 0
    path = write_study(tmp_path / "there", base=_PAUSES.format(1) + _SLURM)
    done = forge_train("study", "sweep", path, "--slurm", "--submit", cwd=ROOT, **slurm.environ)
    assert done.code == 0, done.err
    runs = tmp_path / "there/out/runs"
    for run, step in ((TRUNK, 20), (LONG, 1)):
        wait_until(lambda: last_step(runs / run / "metrics.jsonl") >= step, 180)  # noqa: B023
        assert run == LONG or not (runs / LONG).joinpath("metrics.jsonl").exists()
        high = slurm.preempt()
        slurm.wait_for(high, "RUNNING")
        slurm.cancel(high)
    wait_until(lambda: not slurm.run("squeue", "--noheader"), 300, every=0.3)
    for run in read_study(path).runs:
        assert run.is_done(), slurm_log(tmp_path / "there/out/slurm")
        theirs = tmp_path / "here/out/runs" / run.name
        assert_same_bits(saved_tensors(run.dir), saved_tensors(theirs))
        begun = [e for e in read_run(run.dir).events if e["event"] in ("start", "resume")]
        assert run.name == SHORT or len(begun) > 1
    assert forge_train("study", "sweep", path, cwd=ROOT).code == 0
    pages = [(tmp_path / name / "out/study.md").read_text() for name in ("here", "there")]
    assert pages[0].partition("Cost:")[0] == pages[1].partition("Cost:")[0]


def slurm_log(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("*/job-*.out")))
