"""forge-train eval: the numbers of the run itself, of any of its checkpoints, and of another file's sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_lab.cli import evaluate
from forge_lab.evaluate import evaluate_run
from forge_testing.evaluations import asked, losses_by_hand, questions, rows_of
from forge_testing.problems import rejects
from forge_testing.runs import fit_alone, make_job
from forge_train import ConfigError, StateError, load_job, load_model

pytestmark = pytest.mark.lane("test")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_job(tmp_path_factory.mktemp("evaluated"))
    fit_alone(path, **asked(path.parent))
    return path


def said(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert evaluate([*args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("step", "rows"), [(6, 8), (3, 3), (6, 1)])
def test_a_checkpoint_has_the_numbers_of_its_run(
    job: Path, capsys: pytest.CaptureFixture[str], step: int, rows: int
) -> None:
    found = said(capsys, str(job.parent / "run"), "--step", str(step), "--batch_size", str(rows))
    assert found["step"] == step
    row = rows_of(job)[step]
    own = {c: v for c, v in row.items() if c.startswith("eval/")}
    assert set(own) >= {"eval/seen/loss"}
    got = {f"eval/{n}/{m}": v for n, ms in found.items() if n != "step" for m, v in ms.items()}
    assert {c: got[c] for c in own} == pytest.approx(own, rel=1e-5)
    if "val_loss" in row:
        for measure in ("loss", "bits_per_byte"):
            assert got[f"eval/validation/{measure}"] == pytest.approx(row[f"val_{measure}"], rel=1e-5)  # fmt: skip


@pytest.mark.lane("quick")
def test_another_file_gives_other_sets(job: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(
        f"""
[eval]
sequences = 3
[eval.sets.mine]
split = "train"
[eval.choices.asked]
path = "{questions(tmp_path)}"
samples = 2
"""
    )
    step, found = evaluate_run(job.parent / "run", other)
    assert step == 6
    assert found.keys() == {"validation", "mine", "asked"}  # not those of the run
    model, _, _ = load_model(job.parent / "run")
    nats, labels, _ = losses_by_hand(model, "train", 3, load_job(job).config.data.seq_len)
    assert found["mine"]["loss"] == pytest.approx(nats / labels, rel=1e-6)
    assert found["asked"]["accuracy"] in (0.0, 0.5, 1.0)


@pytest.mark.lane("quick")
def test_a_run_that_never_evaluated_has_only_the_sets_of_the_file(tmp_path: Path) -> None:
    job, other = make_job(tmp_path), tmp_path / "other.toml"
    fit_alone(job, **{"train.steps": 1, "eval.every_steps": 0, "metrics.console": "off"})
    other.write_text('[eval.sets.mine]\nsplit = "validation"\nsequences = 2\n')
    _, found = evaluate_run(job.parent / "run", other)
    assert found.keys() == {"mine"}
    with rejects("run", str(job.parent / "run"), "nothing", ConfigError):
        evaluate_run(job.parent / "run")


def test_the_run_is_only_read(job: Path) -> None:
    run = job.parent / "run"
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    evaluate_run(run)
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_checkpoints_that_cannot_be_evaluated_are_rejected(job: Path, tmp_path: Path) -> None:
    run, other = job.parent / "run", tmp_path / "other.toml"
    with rejects("step", 5, "unknown", StateError, where="[3, 6]"):
        evaluate_run(run, step=5)
    other.write_text("[optimizer]\nlr = 1.0\n")
    with rejects("optimizer.lr", ..., "unknown_key", ConfigError, where=other):
        evaluate_run(run, other)
    with rejects("--batch_size", 0, "range", ConfigError):
        evaluate_run(run, batch_size=0)
    with rejects("run_dir", str(tmp_path), "not_found", ConfigError):
        evaluate_run(tmp_path)
