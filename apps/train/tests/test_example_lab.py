"""A distribution of somebody else adds parts of eight kinds: installed, not patched in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forge_testing import write_job
from forge_testing.vlm_jobs import SETTINGS
from forge_train import read_run

pytestmark = pytest.mark.lane("test")

LAB = Path(__file__).parent / "example_lab"
PARTS = """
[model.mixer_options]
half_life = 3.0
[schedule]
name = "halving"
options = {every = 2, floor = 0.1}
[optimizer]
name = "sign"
lr = 1e-2
options = {momentum = 0.8}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distribution, as pip lays it out; its sources are copied, as building writes to them."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "site"))
    shutil.copytree(LAB, source, dirs_exist_ok=True)
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "-q", "install", *offline, "--target", target, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(target.glob("example_lab-1.0.dist-info/entry_points.txt"))
    return target


def job_with_parts(folder: Path) -> Path:
    job = write_job(folder)
    text = job.read_text().replace("[model]", '[model]\nmixer = "decay"')
    job.write_text(text.replace("[optimizer]\nlr = 1e-2\n", PARTS.lstrip()))
    return job


def job_with_family(folder: Path) -> Path:
    """Their model, data, objective, callback and sink."""
    (folder / "job.toml").write_text(f"""
[run]
dir = "{folder / "run"}"
[model]
name = "neighbours"
args = {{dim = 16}}
[data]
seq_len = 24
[data.sources.sums]
name = "sums"
options = {{largest = 5}}
[train]
steps = 4
global_batch = 6
objective = "smoothed"
objective_options = {{smoothing = 0.2}}
{SETTINGS}
[metrics.sinks.columns]
name = "csv"
options = {{columns = "loss lr"}}
[callbacks.losses]
name = "losses"
every_steps = 2
options = {{file = "kept.txt"}}
""")
    return folder / "job.toml"


def train(job: Path, site: Path | None, *flags: object) -> subprocess.CompletedProcess[str]:
    """`forge-train run` in a fresh interpreter, with what is installed in `site`."""
    path = os.pathsep.join(p for p in (str(site or ""), os.environ.get("PYTHONPATH", "")) if p)
    every = ("--checkpoint.every_steps", "2", "--eval.every_steps", "2")
    command = [sys.executable, "-m", "forge_train", "run", job, *every, *flags]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment
    )


def test_each_part_is_one_short_file(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {p.name: len(p.read_text().splitlines()) for p in sorted(LAB.glob("*/*.py"))}
    lines["pyproject.toml"] = len((LAB / "pyproject.toml").read_text().splitlines())
    with capsys.disabled():
        print("\n" + "\n".join(f"  {name:16} {count:3} lines" for name, count in lines.items()))
    kinds = ("model", "mixer", "source", "objective", "schedule", "optimizer", "sink", "callback")
    assert {f"{kind}.py" for kind in kinds} <= lines.keys()
    assert max(lines.values()) < 60
    hooks = LAB / "example_lab/callback.py"  # derives from ours
    assert not [p for p in LAB.glob("*/*.py") if "forge" in p.read_text() and p != hooks]


@pytest.mark.slow
def test_they_train_and_resume_with_the_same_bits(installed: Path, tmp_path: Path) -> None:
    job = job_with_parts(tmp_path)
    straight = train(job, installed, "--train.steps", 4, "--run.dir", tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    for steps in (2, 4):
        done = train(job, installed, "--train.steps", steps)
        assert done.returncode == 0, done.stderr
    one, two = (read_run(tmp_path / name) for name in ("straight", "run"))
    assert [e["event"] for e in two.events if e["event"] in ("start", "resume")] == [
        "start",
        "resume",
    ]
    assert one.metrics["lr"] == [0.01, 0.01, 0.005, 0.005]
    for name in ("step", "loss", "val_loss", "grad_norm", "lr"):
        assert one.metrics[name] == two.metrics[name], name
    assert one.metrics["loss"][-1] < one.metrics["loss"][0]


@pytest.mark.slow
def test_a_family_a_source_an_objective_a_callback_and_a_sink_train_and_resume(
    installed: Path, tmp_path: Path
) -> None:
    job = job_with_family(tmp_path)
    straight = train(job, installed, "--run.dir", tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    for flags in (("--train.steps", 2), ("--nproc", 4)):  # four ranks do not divide six rows
        done = train(job, installed, *flags)
        assert done.returncode == 0, done.stderr
    one, two = (read_run(tmp_path / name).metrics for name in ("straight", "run"))
    for name in ("loss", "val_loss", "grad_norm", "objective.right"):
        got = [value for value in two[name] if value is not None]
        assert got == pytest.approx([v for v in one[name] if v is not None], rel=1e-5), name
    assert one["step"] == two["step"] == [1, 2, 3, 4]
    assert one["loss"][-1] < one["loss"][0]
    assert 0 < one["objective.right"][-1] <= 1
    kept = (tmp_path / "run/kept.txt").read_text().split()
    assert list(map(float, kept)) == two["loss"], "two lives, one list"
    assert (tmp_path / "run/steps-kept.txt").read_text() == "[2, 4]"
    lines = (tmp_path / "run/columns.csv").read_text().split()
    rows = [f"{s},{loss},{lr}" for s, loss, lr in zip(two["step"], two["loss"], two["lr"])]
    assert lines == ["step,loss,lr", *rows], "one rank writes, and a life goes on where it was"


@pytest.mark.slow
def test_wrong_names_and_options_of_these_are_rejected(installed: Path, tmp_path: Path) -> None:
    job, right = job_with_family(tmp_path), job_with_family(tmp_path).read_text()
    for before, after, *words in (
        ("dim = 16", "width = 16", "neighbours(vocab_size=..., **args)"),
        ("largest = 5", "biggest = 5", "sums(config, **options)"),
        ("largest = 5", "largest = 50", "options.largest 50 "),
        ("smoothing = 0.2", "smooth = 0.2", "objective_options.smooth 0.2 ", "'smoothed'"),
        ('"smoothed"', '"smothed"', "train.objective 'smothed'", "'smoothed'"),
        ('"losses"', '"loses"', "callbacks.losses.name 'loses' ", "forge.callbacks"),
        ("file =", "fil =", "callbacks.losses.options.fil 'kept.txt' ", "'file'"),
        ('"csv"', '"cvs"', "metrics.sinks.columns.name 'cvs' ", "forge.sinks", "csv, mlflow,"),
        ("columns = ", "column = ", "metrics.sinks.columns.options", "'columns'", "'csv'"),
        ('"neighbours"', '"neighbors"', "model.name 'neighbors'", "forge.models"),
    ):
        job.write_text(right.replace(before, after))
        done = train(job, installed)
        assert done.returncode in (65, 78), done.stderr
        assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["options", "not installed"])
def test_mismatched_parts_are_rejected_before_a_run_exists(
    installed: Path, tmp_path: Path, case: str
) -> None:
    job = job_with_parts(tmp_path)
    if case == "options":
        text = job.read_text().replace("half_life", "halflife").replace("momentum", "momentm")
        job.write_text(text.replace("every = 2, floor = 0.1", 'floor = "low"'))
        words = [
            *("model.mixer_options.halflife 3.0 ", "'half_life'"),
            *("schedule.options.every ", "schedule.options.floor 'low' "),
            *("optimizer.options.momentm 0.8 ", "'momentum'"),
        ]
    else:
        words = ["mixer 'decay' ", "forge.mixers"]
    done = train(job, installed if case == "options" else None)
    assert done.returncode == 78, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "run").exists()
