"""`forge-train slurm` where no Slurm is: scripts, and what is refused before anything waits in a queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_testing import Outcome, forge_train, write_job
from forge_testing.problems import rejects
from forge_train import ConfigError, DataError, JobError, Trainer, load_job
from forge_train.cli import run_verb

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[3]


def slurm(*arguments: str | Path, PATH: str = "/nowhere", **environ: str) -> Outcome:
    return forge_train("slurm", *arguments, PATH=PATH, HOME="/nowhere", **environ)


@pytest.mark.slow
def test_it_writes_the_script_and_the_configuration_as_it_is(tmp_path: Path) -> None:
    job = write_job(tmp_path, "[slurm]\nnodes = 2\n")
    shown = slurm(job, "--dry_run", "--slurm.time_limit", "1:00:00")
    assert shown.code == 0, shown.err
    assert "#SBATCH --nodes=2" in shown.out
    assert "#SBATCH --time=1:00:00" in shown.out
    assert not (tmp_path / "run").exists()
    written = slurm(job, "--slurm.time_limit", "1:00:00", "--optimizer.lr", "0.5")
    assert written.code == 0, written.err
    folder = tmp_path / "run/slurm"
    assert f"sbatch {folder}/job.sh" in written.out
    assert (folder / "job.sh").read_text() == shown.out
    own = load_job(folder / "job.toml").config
    assert own == load_job(job, {"optimizer.lr": 0.5, "slurm.time_limit": "1:00:00"}).config
    text = (folder / "job.toml").read_text()
    assert "vocab_size" not in text, "what follows from the rest follows from it again"


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Slurm and site files."""
    for name in ("PATH", "HOME"):
        monkeypatch.setenv(name, "/nowhere")


@pytest.mark.parametrize(
    ("extra", "key", "value", "code"),
    [
        ('srun_options = ["--het-group=1"]', "srun_options", "--het-group=1", "heterogeneous"),
        ("nodes = [3]", "nodes", [3], "type"),
        ("nodes = true", "nodes", True, "type"),
        ('time_limit = "5:00"', "time_limit", "5:00", "lead"),
    ],
)
def test_invalid_arguments_are_rejected(
    tmp_path: Path, nowhere: None, extra: str, key: str, value: Any, code: str
) -> None:
    with rejects(f"slurm.{key}", value, code, ConfigError):
        run_verb(["slurm", str(write_job(tmp_path, f"[slurm]\n{extra}\n")), "--dry_run"])


def test_every_number_of_nodes_must_have_a_layout(
    tmp_path: Path, nowhere: None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, '[slurm]\nnodes = "2-3"\n')
    flags = ["slurm", str(job), "--dry_run", "--parallel.dp_replicate", "2"]
    with rejects("parallel.dp_shard", -1, "divides", ConfigError, where="3"):
        run_verb(flags)
    assert run_verb([*flags, "--slurm.nodes", "2"]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out


def test_F175_a_job_that_requests_no_gpu_lists_its_request(
    tmp_path: Path, nowhere: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verb(["slurm", str(write_job(tmp_path)), "--dry_run"]) == 0
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_another_experiment_in_the_run_directory_is_rejected_before_it_waits(
    tmp_path: Path, nowhere: None
) -> None:
    job = write_job(tmp_path)
    Trainer(load_job(job, {"train.steps": 1})).fit()
    with rejects("run.seed", 5, "fixed", ConfigError):
        run_verb(["slurm", str(job), "--run.seed", "5"])
    assert not (tmp_path / "run/slurm").exists()


def test_without_sbatch_nothing_is_submitted(tmp_path: Path, nowhere: None) -> None:
    job = str(write_job(tmp_path))
    with pytest.raises(JobError, match="sbatch"):
        run_verb(["slurm", job, "--submit"])
    with rejects("--dry_run", ..., "excludes", ConfigError):
        run_verb(["slurm", job, "--submit", "--dry_run"])
    (tmp_path / "run/slurm/job.sh").unlink()
    (tmp_path / "run/slurm/job.sh").mkdir()
    with rejects("run.dir", str(tmp_path / "run"), "write", ConfigError):
        run_verb(["slurm", job])


def test_a_queued_job_of_the_run_is_named(
    tmp_path: Path, nowhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = [("7", "PENDING")]
    monkeypatch.setattr("forge_resilience.slurm.job_scripts.jobs_of", lambda *scripts: queued)
    with rejects("run.dir", str(tmp_path / "run"), "queued", ConfigError, where="7"):
        run_verb(["slurm", str(write_job(tmp_path)), "--submit"])
    with rejects("run.dir", str(tmp_path / "run"), "queued", ConfigError, where="7"):
        run_verb(["slurm", str(write_job(tmp_path)), "--orchestrate", "--sizes", "1"])


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_supervisor_is_asked_for_by_the_watch(tmp_path: Path) -> None:
    keys = '[resilience.watch]\naction = "restart"\nmax_restarts = 4\nlimits = { save = 60 }\n[slurm]\nnodes = 2\n'
    text = slurm(write_job(tmp_path, keys), "--dry_run").out
    call = text[text.index("exec srun") :]
    assert "-m forge_resilience.supervise --action=restart" in call
    assert "--limits=save=60" in call
    assert f"--journal={tmp_path}/run/events.jsonl --expect_heartbeats --nproc 1 --" in call
    assert "retry $((attempt + 1)) of 4" in text


def test_F176_a_preset_is_shown_without_its_data(
    nowhere: None, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = str(ROOT / "configs/presets/20m_4gpu.toml")
    shown = {}
    for verb in ("explain", "slurm"):
        flags = ["--dry_run"] if verb == "slurm" else []
        assert run_verb([verb, preset, *flags]) == 0
        shown[verb] = capsys.readouterr()
        text = "".join(shown[verb])
        assert "data.sources.main.path 'data/tokens'" in text, "what was not checked is named"
        with rejects("train.micro_batch", 0, "range", ConfigError):
            run_verb([verb, preset, *flags, "--train.micro_batch", "0"])
        debug = [str(ROOT / "apps/train/configs/debug.toml"), "--data.sources.python_docs.name"]
        with rejects("data.sources.python_docs.path", "no", "not_found", DataError):
            run_verb([verb, *debug, "tokens", "--data.sources.python_docs.path", "no", *flags])
    assert "data.sources.main.path" in shown["explain"].out.split()
    assert "#SBATCH" in shown["slurm"].out
    assert "data.sources" not in shown["slurm"].out, "the script is only the script"
    with rejects("data.sources.main.path", "data/tokens", "not_found", DataError):
        run_verb(["slurm", preset])
