"""What `forge-train doctor` finds and advises."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from forge_resilience.health import Finding
from forge_testing import forge_train
from forge_testing.problems import rejects
from forge_train import ConfigError, JobError, doctor
from forge_train.doctor import required_findings, write_site

pytestmark = pytest.mark.lane("test")


def test_F119_the_table_shows_an_extra_in_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (module, (use, fix)) = next(iter(doctor._OPTIONAL.items()))
    missing = doctor.Finding(module, doctor.MISSING, f"{use} [red]", fix=fix)
    monkeypatch.setattr(doctor, "_findings", lambda: iter([missing]))
    assert doctor.examine() == 1
    out = capsys.readouterr().out
    assert fix in out
    assert "[red]" in out


def test_F119_every_package_that_forge_train_needs_is_looked_at() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    names = {n.split(">=")[0].split("[")[0] for n in project["project"]["dependencies"]}
    needed = {n.replace("-train-", "-").replace("-", "_") for n in names if n.startswith("forge-")}
    assert set(doctor._PACKAGES) == needed


@pytest.mark.slow
def test_a_machine_without_slurm_lacks_it(tmp_path: Path) -> None:
    done = forge_train(
        "doctor",
        "--json",
        "--requires",
        "slurm,gpu",
        PATH="/nowhere",
        HOME=str(tmp_path),
        CUDA_VISIBLE_DEVICES="",
    )
    states = {finding["what"]: finding["state"] for finding in json.loads(done.out)["findings"]}
    assert (done.code, states["slurm"], states["gpu"]) == (1, "missing", "missing")


@pytest.mark.parametrize(
    ("states", "required", "code"),
    [
        (("ok", "missing"), (), 1),
        (("ok", "missing"), ("ok",), 0),
        (("ok", "missing"), ("missing",), 1),
        (("broken", "ok"), ("ok",), 2),
    ],
)
def test_the_code_is_that_of_what_is_required(
    monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...], required: tuple[str, ...], code: int
) -> None:
    monkeypatch.setattr(doctor, "_findings", lambda: [Finding("x", s, "") for s in states])
    assert doctor.examine(required=[Finding("y", state, "") for state in required]) == code


def test_what_a_doctor_cannot_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    site = tmp_path / ".config/forge/site.toml"
    with rejects("--requires", "slrum", "unknown", ConfigError):
        required_findings("slurm,slrum", None, None)
    with rejects("config", "job.toml", "requires", ConfigError):
        required_findings("slurm", "job.toml", None)
    with pytest.raises(JobError, match=r"site\.toml"):
        write_site(None)
    site.parent.mkdir(parents=True)
    site.touch()
    with rejects("--site", str(site), "exists", ConfigError):
        write_site(None)
