"""A signal while one process imports what it needs: it ends at once, with the code that says "come again"."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

_RUN = """
import os, signal, sys
from forge_train.cli import main

class Signal:  # sends itself one when `name` is looked up: an import is the worst of moments
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(sys.argv[2]))

sys.meta_path.insert(0, Signal())
main(["run", sys.argv[3]])
"""


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("numpy", signal.SIGTERM),  # an exception there left torch waiting for a lock of its own
        ("numpy._core", signal.SIGUSR1),  # C code drops an exception there
        ("numpy._core", signal.SIGINT),
        ("forge_train.trainer.trainer", signal.SIGTERM),
    ],
)
def test_F99_a_signal_during_imports_ends_one_process_at_once(
    tmp_path: Path, module: str, number: int
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[train]\nsteps = 1\n'
        '[parallel]\ndevice = "cpu"\n[data.sources.text]\nname = "builtin"\n'
    )
    command = [sys.executable, "-c", _RUN, module, str(int(number)), str(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 75, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
