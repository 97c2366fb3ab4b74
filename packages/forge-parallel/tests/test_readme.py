"""The examples of the README run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


def examples() -> list[str]:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```", readme, re.DOTALL)


@pytest.mark.slow  # CI runs it from the wheel, in scripts/smoke_wheels.py
def test_the_example_of_the_readme_runs() -> None:
    exec(compile(examples()[0], "README.md", "exec"), {})


@pytest.mark.slow
@pytest.mark.distributed
def test_ten_lines_of_the_readme_cut_a_plain_module_over_two_ranks(tmp_path: Path) -> None:
    assert len([line for line in examples()[1].splitlines() if line]) <= 11
    script = tmp_path / "net.py"
    script.write_text(examples()[1])
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    # lines of two processes may run into each other
    assert done.stdout.count("[32, 8]") == 2, done.stderr
    assert "Shard(dim=0)" in done.stdout
