"""forge-train sweep: the runs of a study, killed and continued, and the page about them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_core.scaling import ScalingFit
from forge_lab.study.page import draw, fitted, page
from forge_lab.study.queue import RunQueue
from forge_lab.study.runs import Study, read_study
from forge_lab.study.sweep import run_sweep
from forge_resilience import ExitCode
from forge_testing.problems import assert_problem, rejects
from forge_testing.processes import orphan_code, start, wait_for_step
from forge_testing.runs import assert_same_bits, fit_alone, saved_tensors
from forge_testing.studies import LONG, SHORT, TRUNK, assert_shellcheck, write_study
from forge_train import ConfigError, RunDirectory
from forge_train.errors import JobError

pytestmark = pytest.mark.lane("test")

SLURM = "[base.resilience]\nsave_limit_seconds = 20\n[base.slurm]\ncpus_per_task = 1\n"


def test_the_runs_that_follow_from_a_study(tmp_path: Path) -> None:
    """Numbers by hand: without 257 x 8 of embedding and of head; 4 x 8 x 8 of attention, 3 x 8 x 64 of the feed-forward, 3 norms."""
    path = write_study(
        tmp_path,
        'seeds = [0, 7]\nparameters = "non_embedding"',
        base="[base.schedule]\nwarmup_steps = 2",
    )
    study = read_study(path)
    trunk, other, *forks = study.runs
    assert [trunk.name, other.name] == [TRUNK, TRUNK.replace("0", "7")]
    assert [fork.parent for fork in forks] == [TRUNK, TRUNK, other.name, other.name]
    count = 4 * 8 * 8 + 3 * 8 * 64 + 3 * 8
    assert {run.parameters for run in study.runs} == {count}
    steps = [-(-2 * count // 256), -(-6 * count // 256)]
    assert [(fork.begin, fork.steps) for fork in forks[:2]] == [
        (s - max(1, round(s / 5)), s) for s in steps
    ]
    assert trunk.steps == forks[1].begin
    assert trunk.job.config.callbacks["save_at"].options == {"steps": [f.begin for f in forks[:2]]}
    assert forks[1].tokens == 256 * steps[1]
    assert {fork.job.config.run.seed for fork in forks} == {0, 7}


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write_study(
        tmp_path, "seeds = [1, 1]\nlevel = 2.0", "[sizes.a-b]\ndim = 8\n[size.typo]\ndim = 8"
    )
    with rejects("size", ..., "unknown_key", ConfigError) as error:
        read_study(path)
    for key, value, code in (
        ("study.seeds", [1, 1], "duplicate"),
        ("study.level", 2.0, "range"),
        ("sizes", "a-b", "name"),
    ):
        assert_problem(error.value, key, value, code)
    path = write_study(tmp_path, sizes="[sizes.odd]\ndim = 9\nnum_heads = 2\n[sizes.bad]\ndin = 8")
    with pytest.raises(ConfigError) as error:
        read_study(path)
    assert {"model.dim", "model.din"} <= {p.key for p in error.value.problems}
    for base, key, value, code in (
        ("[base.run]\nseed = 3", "run.seed", 3, "excludes"),
        ("[[base.data.phases.x]]", "data.phases", ..., "unsupported"),
        ("[base.schedule]\nwarmup_steps = 38", "schedule.warmup_steps", 38, "decay"),
        ('[schedules.a]\nname = "cosine"', "schedule.name", "cosine", "trunk"),
        (
            '[schedules.a]\nname = "wsd"\n[schedules.b]\nname = "wsd"\nwarmup_steps = 3',
            "schedule.warmup_steps",
            [0, 3],
            "trunk",
        ),
        ("[schedules]\na = 1", "schedules", {"wsd": {"name": "wsd"}, "a": 1}, "type"),
    ):
        with rejects(key, value, code, ConfigError):
            read_study(write_study(tmp_path, base=base))
    with pytest.raises(ConfigError) as error:
        read_study(write_study(tmp_path, base="[base.schedule]\nwarmup_steps = 40"))
    assert error.value.problems[0].value == 40
    assert error.value.problems[0].origin.endswith(SHORT)
    text = path.read_text().replace("[base.eval]", "[base.eval]\nevery_steps = 0")
    path.write_text(text)
    with rejects("eval.every_steps", 0, "range", ConfigError):
        read_study(path)


def test_runs_of_a_study_have_names_and_lengths_of_their_own(tmp_path: Path) -> None:
    """Names become folders, and two runs of one length would count twice in the fit."""
    (tmp_path / "empty.toml").touch()
    budgets, empty = "study.tokens_per_parameter", str(tmp_path / "empty.toml")
    for old, new, key, value, code in (
        ("[2.0, 6.0]", "[2.0, 2.0000001]", budgets, [2.0, 2.0000001], "range"),
        ("[2.0, 6.0]", "[2.0, 2.001]", budgets, 2.001, "duplicate"),
        ("sizes.d8", f"sizes.{'d' * 41}", "sizes", "d" * 41, "name"),
        ("dim = 8", 'path = "empty.toml"', "sizes.d8.path", empty, "model"),
        (f'"{tmp_path}/out"', '" "', "study.dir", " ", "missing"),
        ("[study]", "[study]\nthreads = 0", "study.threads", 0, "range"),
        ("[sizes.d8]", "[schedules.d8]", "sizes", ..., "missing"),
    ):
        path = write_study(tmp_path)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with rejects(key, value, code, ConfigError):
            read_study(path)
    path.write_text(
        'base = 1\n[study]\ndir = "x"\ntokens_per_parameter = [1.0]\n[sizes.a]\ndim = 8\n'
    )
    with rejects("base", 1, "type", ConfigError):
        read_study(path)
    path.write_text(text.replace("[2.0, 6.0]", "[6.0, 2.0]"))
    assert [run.name for run in read_study(path).runs] == [TRUNK, SHORT, LONG]


def test_a_run_of_another_configuration_is_not_continued(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path))
    run = study.runs[0]
    run.write()
    (run.dir / "checkpoints/step-00000003").mkdir(parents=True)
    (run.dir / "checkpoints/step-00000003/manifest.json").touch()
    run.write()  # the same configuration
    run.file.write_text(run.toml.replace(" # ", " # from another folder: "))
    run.write()  # a comment is no value
    text = (tmp_path / "study.toml").read_text().replace("lr = 1e-2", "lr = 2e-2")
    (tmp_path / "study.toml").write_text(text)
    with rejects("study.dir", str(tmp_path / "out"), "changed", ConfigError, where="optimizer.lr"):
        read_study(tmp_path / "study.toml").runs[0].write()
    with rejects("study.dir", str(tmp_path / "out"), "changed", ConfigError):
        queue_of(read_study(tmp_path / "study.toml")).train()
    passed = run.dir / f"checkpoints/step-{run.steps:08d}"
    passed.mkdir()
    (passed / "manifest.json").touch()
    with rejects(
        "study.dir", str(tmp_path / "out"), "parent", ConfigError
    ):  # a trunk of other budgets
        study.runs[1].write()


# ---- real runs


def queue_of(study: Study) -> RunQueue:
    return RunQueue(study.dir, study.runs, jobs=1)


def sweep(path: Path) -> subprocess.Popen[str]:
    return start("sweep", path)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out + err


def lives(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out/lives.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("undisturbed")
    code, said = finish(sweep(write_study(folder)))
    assert code == 0, said
    return folder


@pytest.mark.slow
def test_a_decay_of_the_trunk_is_the_run_that_trained_all_steps(
    undisturbed: Path, tmp_path: Path
) -> None:
    """And a trunk saves where its decays fork, also one step behind a save that is due anyway (38 behind 37)."""
    trunk, short, long = read_study(undisturbed / "study.toml").runs
    assert (short.begin, long.begin) == (38, 111)
    assert {short.begin, long.begin, 37, 74} == RunDirectory(trunk.dir).committed().keys()
    path = write_study(tmp_path, "trunk = false")
    (alone, _) = read_study(path).runs
    alone.write()
    fit_alone(alone.file)
    assert_same_bits(saved_tensors(short.dir, short.steps), saved_tensors(alone.dir, alone.steps))
    rows = json.loads((undisturbed / "out/study.json").read_text())["runs"]
    assert [row["name"] for row in rows] == [SHORT, LONG]
    assert rows[1]["val_loss"] < rows[0]["val_loss"] < 5.6


@pytest.mark.slow
def test_a_sweep_that_is_killed_ends_with_the_same_table(undisturbed: Path, tmp_path: Path) -> None:
    """SIGKILL within the trunk and within a decay, SIGTERM in between; no run outlives its sweep; what is done stays."""
    path = write_study(tmp_path)
    runs = tmp_path / "out/runs"
    for name, step, sig in (
        (TRUNK, 20, signal.SIGKILL),
        (TRUNK, 60, signal.SIGTERM),
        (LONG, 1, signal.SIGKILL),
    ):
        process = sweep(path)
        wait_for_step(process, runs / name / "metrics.jsonl", step)
        process.send_signal(sig)
        code, said = finish(process)
        assert code == (75 if sig == signal.SIGTERM else -9), said
        if sig == signal.SIGKILL:
            (pid,) = {
                json.loads(line)["pid"]
                for line in (runs / name / "events.jsonl").read_text().splitlines()[-1:]
            }
            wait_until_gone(pid)
        assert (
            name != TRUNK or 111 not in RunDirectory(runs / name).committed()
        )  # no run without its sweep ended it
    assert [life["exit_code"] for life in lives(tmp_path)] == [75, 0]
    code, said = finish(sweep(path))
    assert code == 0, said
    before = len(lives(tmp_path))
    assert run_sweep(path) == 0
    assert len(lives(tmp_path)) == before  # nothing is trained twice
    mine, theirs = (
        json.loads((folder / "out/study.json").read_text()) for folder in (tmp_path, undisturbed)
    )
    assert mine["runs"] == theirs["runs"]
    assert mine["fits"] == theirs["fits"]
    for name in (TRUNK, SHORT, LONG):
        assert_same_bits(saved_tensors(runs / name), saved_tensors(undisturbed / "out/runs" / name))


@pytest.mark.parametrize(("code", "wanted"), [(-9, 1), (1, 1), (76, 76)])
def test_F197_a_sweep_with_a_killed_run_ends_with_an_exit_code(
    tmp_path: Path, code: int, wanted: int
) -> None:
    """A negative code, of a run that a signal ended, would be 247 and the like for a shell."""
    found = queue_of(read_study(write_study(tmp_path)))
    found.waiting, found.failed = [], {TRUNK: code}
    assert found.train() == wanted


@pytest.mark.slow
def test_a_run_that_fails_stops_only_its_forks(tmp_path: Path) -> None:
    """The sweep of another process is refused meanwhile."""
    path = write_study(tmp_path, base="[optimizers.wild]\nlr = 1e30")
    process = sweep(path)
    wait_for_step(process, tmp_path / "out/runs" / TRUNK / "metrics.jsonl", 1)
    with rejects("study.dir", str(tmp_path / "out"), "locked", JobError):
        run_sweep(path)
    code, said = finish(process)
    assert code == ExitCode.NUMERICS
    wild = TRUNK.replace("adamw", "wild")
    assert re.search(rf"{wild} .* 76\b.* {tmp_path}/out/runs/{wild}\.log", said)
    assert re.search(r"\b6 runs 1 .* 2 ", said)  # all, failed, not started
    assert [run.name for run in read_study(path).runs if run.is_done()] == [TRUNK, SHORT, LONG]


@pytest.mark.slow
def test_a_sweep_outlives_a_file_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path)
    (tmp_path / f"out/runs/{SHORT}.log").mkdir(parents=True)
    (tmp_path / "out/lives.jsonl").mkdir()
    assert run_sweep(path) == ExitCode.ERROR
    said = capsys.readouterr()
    assert re.search(rf"^{SHORT} .*{SHORT}\.log'$", said.out, re.MULTILINE)
    assert f"{tmp_path}/out/lives.jsonl" in said.err
    assert [run.name for run in read_study(path).runs if run.is_done()] == [TRUNK, LONG]


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_F164_a_run_whose_sweep_died_below_a_supervisor_ends(tmp_path: Path, monkeypatch) -> None:
    found = queue_of(read_study(write_study(tmp_path)))
    found.waiting[0].write()
    assert orphan_code(monkeypatch, lambda: found._start(found.waiting[0])) == 1


def wait_until_gone(pid: int) -> None:
    """A child of the killed sweep is killed by the kernel; whoever adopts it may be late to bury it."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(10**6):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        os.sched_yield()
    raise AssertionError(f"process {pid} outlives its sweep")


@pytest.mark.slow
def test_the_plan_prices_runs_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path, base="[optimizers.wild]\nlr = 1e30")  # measured, too
    assert run_sweep(path, dry_run=True, gpu="h100") == 0
    by_planner = capsys.readouterr().out
    assert run_sweep(path, dry_run=True) == 0
    measured = capsys.readouterr().out
    for text, source in (
        (by_planner, "h100"),
        (measured, "12 steps"),
    ):
        assert source in text
        assert "6 runs, " in text
        assert all(
            f"{name} " in text for name in (TRUNK, SHORT, LONG)
        )  # also where a terminal is narrow
    assert not (tmp_path / "out").exists()


# ---- the page


def rows_of(
    law: ScalingFit, sizes: tuple[int, ...] = (1000, 2000, 4000, 8000)
) -> list[dict[str, Any]]:
    return [
        {
            "name": f"n{n}-x{x}", "size": f"n{n}", "optimizer": "adamw", "schedule": "", "seed": 0,
            "tokens_per_parameter": x, "parameters": n, "steps": 10 * x, "forked_at": 8 * x, "tokens": n * x,
            "flops": 6.0 * n * n * x, "val_loss": law.loss(n, n * x),
        }
        for n in sizes for x in (5, 10, 20)
    ]  # fmt: skip


LAW = ScalingFit(E=1.2, A=40.0, alpha=0.45, B=300.0, beta=0.5, objective=0.0)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_runs_of_an_exact_power_law_give_it_and_its_largest_size() -> None:
    found = fitted(rows_of(LAW), resamples=10, level=0.9)
    for name, (value, low, high) in found["constants"].items():
        assert value == pytest.approx(getattr(LAW, name), rel=1e-4)
        assert low <= value * 1.0001
        assert high >= value * 0.9999
    held = found["held_out"]
    assert held["parameters"] == 8000
    assert len(held["errors"]) == 3
    assert held["mean_absolute_error"] < 1e-6
    # a largest size that behaves otherwise is seen where it is held out
    rows = [
        row | {"val_loss": row["val_loss"] * (1.1 if row["parameters"] == 8000 else 1)}
        for row in rows_of(LAW)
    ]
    error = fitted(rows, resamples=2, level=0.9)["held_out"]["mean_absolute_error"]
    assert error == pytest.approx(1 - 1 / 1.1, rel=1e-4)
    assert "5 constants" in fitted(rows[:5], 2, 0.9)["refused"]
    assert "distinct" in fitted(rows[:9], 2, 0.9)["held_out"]["refused"]


@pytest.mark.slow
def test_the_page_of_the_shipped_study_matches_its_numbers(tmp_path: Path) -> None:
    """And the numbers are a fit of its own rows."""
    pytest.importorskip("matplotlib")
    docs = Path(__file__).parents[3] / "docs"
    # `sweep --report` writes the JSON next to the page; here it lies with the other data.
    result = json.loads((docs / "data/scaling-study.json").read_text())
    assert (docs / "scaling-study.md").read_text() == page(result, "scaling-study")
    (fit,) = result["fits"]
    again = fitted(result["runs"], resamples=2, level=result["level"])
    for name, (value, low, high) in fit["constants"].items():
        assert again["constants"][name][0] == pytest.approx(value, rel=1e-3), name
        assert low <= high
    study = read_study(docs.parent / "examples/scaling/study.toml")
    trained = {run.name for run in study.runs if run.budget is not None}
    assert trained == {row["name"] for row in result["runs"]}
    assert len({row["size"] for row in result["runs"]}) >= 4
    assert len({row["tokens_per_parameter"] for row in result["runs"]}) >= 3
    draw(result, tmp_path / "again.svg")
    assert "held-out loss" in (tmp_path / "again.svg").read_text()


def test_options_that_an_array_of_runs_cannot_have_are_rejected(tmp_path: Path) -> None:
    path = write_study(tmp_path, base='[base.slurm]\narray = "0-3%1"\non_stop = "resubmit"')
    with rejects("slurm.array", "0-3%1", "excludes", ConfigError) as error:
        run_sweep(path, slurm=True)
    assert_problem(error.value, "slurm.on_stop", "resubmit", "trunk")
    assert not (tmp_path / "out").exists()


def test_scripts_of_its_arrays_pass_shellcheck(tmp_path: Path, capsys: Any) -> None:
    path = write_study(tmp_path, base=SLURM)
    assert run_sweep(path, slurm=True) == 0
    said = capsys.readouterr().out
    for name, elements in (("trunks", [TRUNK]), ("forks", [SHORT, LONG])):
        folder = tmp_path / "out/slurm" / name
        assert f"#SBATCH --array=0-{len(elements) - 1}" in (folder / "job.sh").read_text()
        for number, run in enumerate(elements):
            assert (folder / f"task-{number}.toml").resolve() == tmp_path / f"out/runs/{run}.toml"
            assert (folder / f"task-{number}").resolve() == tmp_path / "out/runs" / run
        assert f"{folder}/job.sh" in said
        assert_shellcheck(folder / "job.sh")
    assert "--dependency=afterok:$first" in said
