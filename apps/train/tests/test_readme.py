"""The example of the README runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from forge_train import read_run

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    readme = README.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    code = code.replace("runs/watch", str(tmp_path / "watch"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=README.parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "watch").metrics["step"] == [10, 20, 30]
