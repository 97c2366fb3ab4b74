"""A distribution of somebody else adds a mixer, a schedule and an optimizer: installed, not patched in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forge_testing import write_job
from forge_train import read_run

LAB = Path(__file__).parent / "somebodys_lab"
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
    assert list(target.glob("somebodys_lab-1.0.dist-info/entry_points.txt"))
    return target


def job_with_parts(folder: Path) -> Path:
    job = write_job(folder)
    text = job.read_text().replace("[model]", '[model]\nmixer = "decay"')
    job.write_text(text.replace("[optimizer]\nlr = 1e-2\n", PARTS.lstrip()))
    return job


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
    assert {"mixer.py", "schedule.py", "optimizer.py"} <= lines.keys()
    assert max(lines.values()) < 60
    assert "forge" not in "".join(p.read_text() for p in LAB.glob("*/*.py"))


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


@pytest.mark.parametrize("case", ["options", "not installed"])
def test_what_does_not_fit_is_refused_before_a_run_exists(
    installed: Path, tmp_path: Path, case: str
) -> None:
    job = job_with_parts(tmp_path)
    if case == "options":
        text = job.read_text().replace("half_life", "halflife").replace("momentum", "momentm")
        job.write_text(text.replace("every = 2, floor = 0.1", 'floor = "low"'))
        words = [
            "model.mixer_options.halflife 3.0 is no option of 'decay'; did you mean 'half_life'?",
            "schedule.options lacks 'every', which 'halving' has no default for; give it in",
            "schedule.options.floor 'low' must be of type float, as 'halving' says; correct it",
            "optimizer.options.momentm 0.8 is no option of 'sign'; did you mean 'momentum'?",
        ]
    else:
        words = ["model: mixer 'decay' is unknown; use 'attention', an entry point of forge.mixers"]
    done = train(job, installed if case == "options" else None)
    assert done.returncode == 78, done.stderr
    for sentence in words:
        assert sentence in " ".join(done.stderr.split()), done.stderr
    assert not (tmp_path / "run").exists()
