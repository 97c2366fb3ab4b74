"""Ranks of torchrun form a group, and a rank's end keeps its code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

_GLOO = """
import sys
import torch
import torch.distributed as dist
from forge_parallel.start import end_process_group, find_world, leave, start_process_group
world = find_world()
start_process_group(world, "cpu", start_timeout_seconds=60)
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
sys.stdout.write(f"{world.launcher} {world.rank}/{world.world_size} {total.item()}\\n")
end_process_group()
leave(0)
"""


def test_torchrun_workers_form_a_group(tmp_path):
    torchrun = shutil.which("torchrun", path=Path(sys.executable).parent)
    if torchrun is None:
        pytest.skip("torchrun is not beside this Python")
    script = tmp_path / "script.py"
    script.write_text(_GLOO)
    done = subprocess.run(
        [torchrun, "--nproc-per-node=2", script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["torchrun 0/2 3.0", "torchrun 1/2 3.0"]


def test_leave_runs_what_was_registered_and_keeps_the_code(tmp_path):
    body = """
import atexit, sys, threading
from forge_parallel.start import leave
atexit.register(lambda: sys.stdout.write("registered"))
atexit.register(lambda: 1 / 0)
threading.Thread(target=threading.Event().wait).start()  # would keep the interpreter for ever
sys.stdout.write("said, ")
leave(66)
"""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (66, "said, registered")
