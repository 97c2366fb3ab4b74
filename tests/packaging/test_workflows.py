"""The hosted workflows and the steps of .ci/run that they call.

Hatch is a script here that writes down its arguments: the steps themselves take half an hour, and each run of .ci/run has them.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
STEPS = ["main", "check", "wheels", "bench", "tests"]

_PYTHON = """#!/bin/sh
# stands for python3 (makes the environment) and for its python (installs hatch)
if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$(dirname "$0")/hatch" "$3/bin/hatch"; fi
"""
_HATCH = """#!/bin/sh
echo "$@" >> "$COMMANDS"
case "$*" in $FAILS) exit 3 ;; esac
"""


def _load(file: Path) -> Any:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    content["on"] = content.pop(True)  # YAML 1.1 reads the key `on` as true
    return content


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda f: f.stem)
def test_workflows_only_read_and_pin_what_they_use(file: Path) -> None:
    workflow = _load(file)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{0:040}"))


def test_the_workflow_runs_each_step_once() -> None:
    job = _load(ROOT / ".github/workflows/ci.yml")["jobs"]["ci"]
    assert job["strategy"]["matrix"]["step"] == STEPS
    assert [s["run"] for s in job["steps"] if "run" in s] == ["bash .ci/run ${{ matrix.step }}"]


class Gate:
    """A copy of .ci/run with the scripts above in place of python3 and hatch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".ci").mkdir()
        (folder / "runs").mkdir()
        shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
        for name, text in (("python3", _PYTHON), ("hatch", _HATCH)):
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(text)
            program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def run(self, *args: str, fails: str = "nothing") -> tuple[int, set[str]]:
        """(exit code, arguments of hatch); calls of hatch that match the pattern `fails` exit with 3."""
        log = self.folder / "commands"
        log.write_text("")
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, "COMMANDS": str(log), "FAILS": fails}
        done = subprocess.run(
            ["bash", ".ci/run", *args], cwd=self.folder, env=environ, capture_output=True
        )
        return done.returncode, set(log.read_text().splitlines())


def test_steps_do_together_what_the_gate_does(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    code, commands = gate.run()
    assert code == 0
    by_step = [gate.run(step) for step in STEPS]
    assert [code for code, _ in by_step] == [0] * len(STEPS)
    assert set.union(*(commands for _, commands in by_step)) == commands
    assert gate.run("lint")[0] == 2


@pytest.mark.parametrize(
    "fails",
    ["run?train", "*check_main_job*", "run?check", "build*", "*smoke*", "*bench*", "run?ci"],
)
def test_a_step_that_fails_fails_the_gate(tmp_path: Path, fails: str) -> None:
    gate = Gate(tmp_path)
    assert gate.run(fails=fails)[0] == 3
    assert sorted(gate.run(step, fails=fails)[0] for step in STEPS) == [0, 0, 0, 0, 3]
