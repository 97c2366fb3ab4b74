"""A rank of two is killed at each named point of a save, or its disk fails: a verified checkpoint loads.

Point or fault x rank x {save that is waited for, save in the background}; the cases are in fault_matrix.py.
After each: the newest committed step loads in a new process with its own numbers, everything left verifies,
nothing unfinished is left, the next save works. Survivors of a kill end at once, survivors of a fault go on.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COUNTS = {  # (kind, way, rank): cases
    ("kill", "sync", 0): 18,
    ("kill", "sync", 1): 9,
    ("kill", "async", 0): 20,
    ("kill", "async", 1): 11,
    ("io", "sync", 0): 19,
    ("io", "sync", 1): 10,
    ("io", "async", 0): 19,
    ("io", "async", 1): 10,
}
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """A library whose calls fail when they are told to."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and LD_PRELOAD")
    library = tmp_path_factory.mktemp("shim") / "io_faults.so"
    command = [compiler, "-shared", "-fPIC", "-o", library, HERE / "io_faults.c", "-ldl"]
    subprocess.run(command, check=True)
    return library


def _run(folder, arguments, environment=None):
    """The lines of the cases."""
    command = [sys.executable, "-W", "ignore", HERE / "fault_matrix.py", folder, *arguments]
    run = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    return run.stdout.splitlines()


@pytest.mark.slow
def test_some_points_and_faults(tmp_path, shim):
    """Of the newcomer's lane: one of each phase."""
    some = ["while writing", "after the rename", "while removing", "mkdir ENOSPC", "fsync EIO"]
    assert len(_run(tmp_path, ["some", "async", 0, *some], {"LD_PRELOAD": str(shim)})) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way", "rank"), COUNTS)
def test_F53_a_verified_checkpoint_loads_after_a_fault_at_any_point(
    tmp_path, request, kind, way, rank
):
    preload = {"LD_PRELOAD": str(request.getfixturevalue("shim"))} if kind == "io" else {}
    assert len(_run(tmp_path, [kind, way, rank], preload)) == COUNTS[kind, way, rank]
