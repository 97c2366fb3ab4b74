"""Loops of other libraries with forge_data, forge_ckpt and forge_resilience: each imports only what it names."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PLAIN = ["0 1", "2 3", "4 5", "6 7", "8 9"]  # ids of steps
pytestmark = [
    pytest.mark.lane("ci"),
    pytest.mark.uses("forge_data", "forge_ckpt", "forge_resilience"),
]


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")


#: Program -> the packages that it may import.
USES = {
    "trainer_loop.py": ("forge_ckpt", "forge_data", "forge_resilience"),
    "torch_workers_loop.py": ("forge_data",),
    "fabric_loop.py": ("forge_data",),
    "supervised_script.py": ("forge_resilience",),
}


def run(program: str, *arguments: object, code: int = 0) -> list[str]:
    start = f"from only import only; only(*{USES[program]}); import runpy; runpy.run_path({program!r}, run_name='__main__')"
    command = [sys.executable, "-W", "ignore", "-c", start, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@needs("transformers", "accelerate")
def test_a_trainer_of_transformers_stops_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def step(folder: str, stop_at: int, code: int = 0) -> str:
        lines = run("trainer_loop.py", tmp_path / folder, stop_at, code=code)
        return next(line for line in lines if line[:1].isdecimal())

    full = step("full", 0)
    assert full.startswith("6 ")
    assert step("stopped", 2, code=75).startswith("2 ")
    assert step("stopped", 0) == full


@pytest.mark.parametrize(
    "program",
    ["torch_workers_loop.py", pytest.param("fabric_loop.py", marks=needs("lightning"))],
)
def test_two_workers_of_a_DataLoader_go_on_with_the_next_batch(
    program: str, tmp_path: Path
) -> None:
    full = run(program, tmp_path / "full", 5)
    assert [" ".join(line.split()[:2]) for line in full] == PLAIN
    assert run(program, tmp_path / "stopped", 3) + run(program, tmp_path / "stopped", 2) == full


@pytest.mark.skipif(sys.platform != "linux", reason="the supervisor reads /proc")
def test_a_script_that_is_killed_is_started_again(tmp_path: Path) -> None:
    assert run("supervised_script.py", tmp_path) == ["0 2 0 1 2 3 "]
