"""`forge-train slurm` where no Slurm is: scripts, and what is refused before anything waits in a queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_testing import Outcome, forge_train, write_job
from forge_train import Trainer, load_job


def slurm(*arguments: str | Path, PATH: str = "/nowhere", **environ: str) -> Outcome:
    return forge_train("slurm", *arguments, PATH=PATH, HOME="/nowhere", **environ)


@pytest.mark.slow
def test_it_writes_the_script_and_the_configuration_as_it_is(tmp_path: Path) -> None:
    job = write_job(tmp_path, "[slurm]\nnodes = 2\n")
    shown = slurm(job, "--print", "--slurm.time_limit", "1:00:00")
    assert shown.code == 0, shown.err
    assert "#SBATCH --nodes=2" in shown.out
    assert "#SBATCH --time=1:00:00" in shown.out
    assert not (tmp_path / "run").exists()
    written = slurm(job, "--slurm.time_limit", "1:00:00", "--optimizer.lr", "0.5")
    assert written.code == 0, written.err
    folder = tmp_path / "run/slurm"
    assert f"submit it: sbatch {folder}/job.sh" in written.out
    assert (folder / "job.sh").read_text() == shown.out
    own = load_job(folder / "job.toml").config
    assert own == load_job(job, {"optimizer.lr": 0.5, "slurm.time_limit": "1:00:00"}).config
    text = (folder / "job.toml").read_text()
    assert "vocab_size" not in text, "what follows from the rest follows from it again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ('[slurm]\nsrun_options = ["--het-group=1"]\n', "makes a heterogeneous job"),
        ("[slurm]\nnodes = [3]\n", "slurm.nodes: [3] (list) must be int or str"),
        ("[slurm]\nnodes = true\n", "slurm.nodes: True (bool) must be int or str"),
        ('[slurm]\ntime_limit = "5:00"\n', "the job would be told to stop at once"),
        (
            '[slurm]\nnodes = "2-3"\n[resilience]\nsave_limit_seconds = 0\n',
            "save_limit_seconds 0.0 must be from",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, extra: str, sentence: str) -> None:
    done = slurm(write_job(tmp_path, extra), "--print")
    assert (done.code, sentence in done.err) == (78, True), done.err


@pytest.mark.slow
def test_every_number_of_nodes_must_have_a_layout(tmp_path: Path) -> None:
    job = write_job(tmp_path, '[slurm]\nnodes = "2-3"\n')
    done = slurm(job, "--print", "--parallel.dp_replicate", "2")
    assert (done.code, "3" in done.err) == (78, True)
    assert slurm(job, "--print", "--parallel.dp_replicate", "2", "--slurm.nodes", "2").code == 0


@pytest.mark.slow
def test_another_experiment_in_the_run_directory_is_refused_before_it_waits(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    Trainer(load_job(job, {"train.steps": 1})).fit()
    done = slurm(job, "--run.seed", "5")
    assert (done.code, "run.seed was 0" in done.err) == (78, True)
    assert not (tmp_path / "run/slurm").exists()


@pytest.mark.slow
def test_without_sbatch_there_is_a_sentence(tmp_path: Path) -> None:
    done = slurm(write_job(tmp_path), "--submit")
    assert (done.code, "sbatch is not on this machine" in done.err) == (1, True)
    both = slurm(write_job(tmp_path), "--submit", "--print")
    assert (both.code, "--submit stands alone" in both.err) == (78, True)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_supervisor_is_asked_for_by_the_watch(tmp_path: Path) -> None:
    keys = '[resilience.watch]\naction = "restart"\nmax_restarts = 4\nlimits = { save = 60 }\n[slurm]\nnodes = 2\n'
    text = slurm(write_job(tmp_path, keys), "--print").out
    call = text[text.index("exec srun") :]
    assert "-m forge_resilience.supervise --action=restart" in call
    assert "--limits=save=60" in call
    assert f"--journal={tmp_path}/run/events.jsonl --expect_heartbeats --nproc 1 --" in call
    assert "retry $((attempt + 1)) of 4" in text
