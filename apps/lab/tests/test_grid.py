"""forge-train grid: what varies, the runs that follow, and a grid that is stopped and goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_lab.study import grid
from forge_lab.study.grid import GridFlags, plan_runs, read_axes, rows_of, run_grid
from forge_lab.study.queue import devices_of_slot
from forge_resilience import ExitCode
from forge_testing import write_job
from forge_testing.problems import assert_problem, rejects
from forge_testing.processes import wait_for_step
from forge_testing.studies import assert_shellcheck
from forge_train import ConfigError, cli, read_layers, read_run

pytestmark = pytest.mark.lane("test")

SLURM = "[resilience]\nsave_limit_seconds = 20\n[slurm]\ncpus_per_task = 1\n"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("32,64", "32 64"),
        ("adamw, lion", "adamw lion"),
        ("1e-4:1e-2:5log", "1e-4 0.000316228 0.001 0.00316228 1e-2"),
        ("32:256:4log", "32 64 128 256"),
        ("8:32:4", "8 16 24 32"),
        ("0:1:4", "0 0.333333 0.666667 1"),
        ("-1:1:3", "-1 0 1"),
        ("16777216:67108864:3log", "16777216 33554432 67108864"),
        ("1,10:100:2log,none", "1 10 100 none"),
        ("module:attr,my.module:3:x", "module:attr my.module:3:x"),
    ],
)
def test_lists_and_ranges(values: str, words: str) -> None:
    assert read_axes([f"a.b={values}"]) == {"a.b": words.split()}


def test_lists_of_lists_keep_their_commas() -> None:
    assert read_axes(["a.b=[1, 2],[3, 4]", 'a.c="x,y",z']) == {
        "a.b": ["[1, 2]", "[3, 4]"],
        "a.c": ['"x,y"', "z"],
    }


def test_all_problems_of_axes_are_reported_at_once() -> None:
    over = ["lr=1", "a.b", "a.c=", "a.d=1:1:3", "a.e=0:1:3log", "a.f=1:2:1", "run.dir=x", "slurm.nodes=1,2"]  # fmt: skip
    with rejects("--over", "lr=1", "form", ConfigError) as caught:
        read_axes([*over, "a.g=1,2", "a.g=3"], ("run.dir.", "slurm."))
    for key, value, code in (
        ("--over", "a.b", "form"),
        ("--over", "a.c=", "form"),
        ("a.d", "1:1:3", "range"),
        ("a.e", "0:1:3log", "range"),
        ("a.f", "1:2:1", "range"),
        ("run.dir", "x", "excludes"),
        ("slurm.nodes", "1,2", "excludes"),
        ("a.g", "3", "duplicate"),
    ):
        assert_problem(caught.value, key, value, code)
    with rejects("--over", 1001 * 2, "size", ConfigError):
        read_axes(["a.b=1:1001:1000,0", "a.c=1,2"])
    with rejects("--over", ..., "missing", ConfigError):
        read_axes([])


def plan(folder: Path, *over: str, nproc: int | None = 1) -> list[grid.GridRun]:
    job = folder / "job.toml"
    return plan_runs(
        read_layers(job if job.exists() else write_job(folder)), read_axes(over), folder, nproc
    )


def test_the_runs_that_follow_from_a_grid(tmp_path: Path) -> None:
    runs = plan(tmp_path, "optimizer.lr=1e-3:1e-1:3log", "model.dim=16,32")
    assert [(run.job.config.optimizer.lr, run.job.config.model.dim) for run in runs] == [
        (lr, dim) for lr in (1e-3, 1e-2, 1e-1) for dim in (16, 32)
    ]
    assert runs[3].varied == {"optimizer.lr": 1e-2, "model.dim": 32}
    assert runs[3].dir == tmp_path / "runs/lr=0.01,dim=32"
    assert runs[3].steps == 12
    (by_tokens, by_size) = plan(tmp_path, "train.tokens_per_parameter=0.5,1")
    assert by_tokens.steps == -(-by_size.steps // 2)
    # keys that end alike have their full names, and names that a folder cannot have do not collide
    (run,) = plan(tmp_path, "run.seed=1", "data.seed=2")
    assert run.name == "run.seed=1,data.seed=2"
    names = [run.name for run in plan(tmp_path, "sample.prompt=a/b,a_b,a b,../c")]
    assert len(set(names)) == 4
    assert not any("/" in name for name in names)


def test_a_combination_that_is_rejected_starts_and_writes_nothing(tmp_path: Path) -> None:
    """All problems of all combinations, each once."""
    over = ("model.dim=16,33,32", "optimizer.lr=1e-3,-1.0", "train.nope=1", "eval.sequences=4,x")
    layers = read_layers(write_job(tmp_path))
    with rejects("model.dim", 33, "divides", ConfigError) as caught:
        run_grid(layers, GridFlags(over[:1], dir=tmp_path / "out"))
    with pytest.raises(ConfigError) as caught:
        run_grid(layers, GridFlags(over[1:], dir=tmp_path / "out"))
    assert sorted((p.key, p.value) for p in caught.value.problems if p.value is not ...) == [
        ("eval.sequences", "x"),
        ("optimizer.lr", -1.0),
    ]
    assert_problem(caught.value, "train.nope", code="unknown_key")
    with rejects("--over", "lr=1e-3", "duplicate", ConfigError):
        plan(tmp_path, "optimizer.lr=0.001,1e-3")
    with rejects("parallel.dp_shard", -1, "divides", ConfigError):
        plan(tmp_path, "parallel.tp=1,2")  # on one process
    assert [run.job.config.parallel.tp for run in plan(tmp_path, "parallel.tp=1,2", nproc=2)] == [
        1,
        2,
    ]
    assert not (tmp_path / "out").exists()


def test_flags_of_a_grid(tmp_path: Path) -> None:
    layers = read_layers(write_job(tmp_path))
    with rejects("--jobs", 0, "range", ConfigError) as caught:
        run_grid(layers, GridFlags(jobs=0, nproc=0, threads=0, submit=True, site="here"))
    for key, value, code in (
        ("--nproc", 0, "range"),
        ("--threads", 0, "range"),
        ("--submit", True, "requires"),
        ("--site", "here", "requires"),
    ):
        assert_problem(caught.value, key, value, code)
    with rejects("--nproc", 2, "excludes", ConfigError) as caught:
        run_grid(layers, GridFlags(nproc=2, slurm=True, dry_run=True))
    assert_problem(caught.value, "--dry_run", ..., "excludes")
    with rejects("resilience.save_limit_seconds", "20,30", "excludes", ConfigError):
        run_grid(layers, GridFlags(("resilience.save_limit_seconds=20,30",), slurm=True))


def test_an_array_has_an_element_for_each_combination(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers, out = read_layers(write_job(tmp_path, SLURM)), tmp_path / "out"
    over = ("optimizer.lr=1e-3,1e-2", "model.dim=16,32")
    assert run_grid(layers, GridFlags(over, dir=out, slurm=True, jobs=3)) == 0
    folder = out / "slurm/runs"
    script = (folder / "job.sh").read_text()
    assert "#SBATCH --array=0-3%3\n" in script
    assert f'{folder}/task-"$SLURM_ARRAY_TASK_ID".toml' in script
    assert_shellcheck(folder / "job.sh")
    assert f"{folder}/job.sh" in capsys.readouterr().out
    combinations = [(lr, dim) for lr in (1e-3, 1e-2) for dim in (16, 32)]
    for number, (lr, dim) in enumerate(combinations):
        element = read_layers(folder / f"task-{number}.toml")
        assert (element.at("optimizer.lr"), element.at("model.dim")) == (lr, dim)
        assert Path(element.at("run.dir")) == (folder / f"task-{number}").resolve()
    with rejects("slurm.array", "0-3%1", "excludes", ConfigError):
        layers.set("slurm.array", "0-3%1", "flag")
        run_grid(layers, GridFlags(over, dir=tmp_path / "other", slurm=True))
    with rejects("parallel.dp_shard", -1, "divides", ConfigError):  # of a later element
        layers.drop_table("slurm.array")
        run_grid(layers, GridFlags(("parallel.tp=1,2",), dir=tmp_path / "other", slurm=True))
    assert not (tmp_path / "other").exists()


def run_of(name: str, done: bool, **columns: list[Any]) -> Any:
    return SimpleNamespace(
        name=name, dir=name, steps=9, varied={"a.b": name}, has_begun=lambda: bool(columns), is_done=lambda: done,
        columns=columns,
    )  # fmt: skip


def test_rows_have_the_best_run_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"good": 1.0, "bad": 3.0, "stopped": 0.5, "wild": float("nan")}
    runs = [run_of("absent", False)]
    for name in ("bad", "good", "stopped", "wild"):
        speeds = [None, 10.0, 30.0, 1000.0]
        runs.append(run_of(name, name != "stopped", step=[4], loss=[2.0], tokens_per_second=speeds))
    columns = {run.dir: run.columns for run in runs}

    def read(folder: str) -> Any:
        events = [{"event": "save"}, {"event": "evaluation", "step": 4, "val_loss": losses[folder]}]
        return SimpleNamespace(metrics=columns[folder], events=events)

    monkeypatch.setattr(grid, "read_run", read)
    rows = rows_of(runs, {"stopped": 76})
    assert [row["run"] for row in rows] == ["good", "bad", "wild", "stopped", "absent"]
    assert rows[0] == {
        "run": "good", "a.b": "good", "loss": 2.0, "val_loss": 1.0, "tokens": None, "tokens_per_second": 30.0,
        "status": "done",
    }  # fmt: skip
    assert rows[2]["val_loss"] is None
    assert "76" in rows[3]["status"]
    grid.print_table(rows)
    assert "validation loss" in capsys.readouterr().out


def test_slots_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.setenv(name, "4,5,6")
    assert [devices_of_slot(slot, 1).get(name) for slot in range(4)] == ["4", "5", "6", "4"]
    assert [devices_of_slot(slot, 2).get(name) for slot in range(2)] == ["4,5", "6,4"]
    assert devices_of_slot(0, 3) == {}
    monkeypatch.setenv(name, "")
    assert devices_of_slot(0, 1) == {}


def test_the_command_line_takes_a_flag_for_each_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = EntryPoint("grid", "forge_lab.cli:grid", "forge.commands")
    monkeypatch.setattr(cli, "_mounted", lambda: {"grid": entry})
    over = ["--over", "optimizer.lr=1e-3,1e-2", "--over", "model.dim=16,32"]
    job = str(write_job(tmp_path))
    assert cli.run_verb(["grid", job, *over, "--train.steps", "3", "--dry_run"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows if row[-1:] == ["started"]] == [
        [lr, dim] for lr in ("0.001", "0.01") for dim in ("16", "32")
    ]
    assert not (tmp_path / "run-grid").exists()
    with rejects("--jobs", ..., "duplicate", ConfigError):
        cli.run_verb(["grid", job, *over, "--jobs", "1", "--jobs", "2"])


# ---- a real grid


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_grid_that_is_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in the first of two runs; a third is added; another job is rejected; nothing is trained twice."""
    job, out = write_job(tmp_path), tmp_path / "out"
    flags = [str(job), "--over=optimizer.lr=1e-3,1e-2", f"--dir={out}", "--train.steps=150"]
    program = "import sys; from forge_lab.cli import grid; sys.exit(grid(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    first, second = out / "runs/lr=1e-3", out / "runs/lr=1e-2"
    wait_for_step(process, first / "metrics.jsonl", 3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == ExitCode.REQUEUE, err

    rows = json.loads((out / "grid.json").read_text())
    assert [(row["run"], row["status"] == "not started") for row in rows] == [
        ("lr=1e-3", False),
        ("lr=1e-2", True),
    ]
    assert 3 <= read_run(first).metrics["step"][-1] < 150
    assert not second.exists()
    assert not (out / "report.html").exists()

    layers = read_layers(job)
    layers.set("train.steps", 150, "flag")
    over = ("optimizer.lr=1e-3,1e-2",)
    layers.set("data.seed", 5, "flag")
    with rejects("--dir", str(out), "changed", ConfigError, where="data.seed"):
        run_grid(layers, GridFlags(over, dir=out))
    layers.drop_table("data.seed")
    assert run_grid(layers, GridFlags(over, dir=out, jobs=2)) == 0
    rows = json.loads((out / "grid.json").read_text())
    assert [row["status"] for row in rows] == ["done", "done"]
    assert rows[0]["val_loss"] <= rows[1]["val_loss"]
    assert [e["event"] for e in read_run(first).events if e["event"] in ("start", "resume")] == [
        "start",
        "resume",
    ]
    assert read_run(first).metrics["step"] == list(range(1, 151))
    assert (out / "report.html").exists()

    attempts = (out / "lives.jsonl").read_text()
    assert len(attempts.splitlines()) == 3
    assert run_grid(layers, GridFlags(over, dir=out)) == 0
    assert (out / "lives.jsonl").read_text() == attempts
    capsys.readouterr()
    more = GridFlags(("optimizer.lr=1e-3,1e-2,2e-2",), dir=out, dry_run=True)
    assert run_grid(layers, more) == 0
    assert capsys.readouterr().out.count("done") == 2
