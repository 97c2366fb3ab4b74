"""Harm is exactly what its name says, and the same for the same seed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge_testing import flip_bit, rank_pids, signal_at_random, signal_rank, truncate

pytestmark = pytest.mark.lane("test")

DATA = bytes(range(256)) * 4

# A launcher of two ranks; each has a child of its own, which inherits RANK.
LAUNCHER = """
import os, subprocess, sys
rank = "import subprocess, sys; print('up', flush=True); subprocess.run(['sleep', '600'])"
ranks = [subprocess.Popen([sys.executable, "-c", rank], env={**os.environ, "RANK": str(r)}) for r in (0, 1)]
print(*[p.pid for p in ranks], flush=True)
print(*[p.wait() for p in ranks], flush=True)
"""


def test_one_bit_is_flipped_and_flipping_it_again_restores_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    bit = flip_bit(path, seed=3)
    wrong = [(old ^ new) for old, new in zip(DATA, path.read_bytes(), strict=True)]
    assert wrong[bit // 8] == 1 << bit % 8
    assert sum(map(bool, wrong)) == 1
    assert flip_bit(path, seed=3) == bit
    assert path.read_bytes() == DATA


def test_a_truncated_file_is_a_beginning_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "file"
    sizes = set()
    for seed in range(4):
        path.write_bytes(DATA)
        sizes.add(truncate(path, seed))
        assert path.read_bytes() == DATA[: path.stat().st_size] != DATA
    assert len(sizes) == 4


@pytest.mark.parametrize("harm", [flip_bit, truncate])
def test_an_empty_file_cannot_be_hurt(tmp_path: Path, harm: object) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file has 0 bytes"):
        harm(tmp_path / "file")  # type: ignore[operator]


def test_a_process_is_killed_within_the_time_and_a_dead_one_is_ignored() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        waited = signal_at_random(process.pid, seed=1, within_seconds=0.2)
    assert waited is not None
    assert 0 <= waited <= 0.2
    assert process.returncode == -signal.SIGKILL
    with subprocess.Popen(["true"], stdin=subprocess.DEVNULL) as process:
        assert signal_at_random(process.pid, seed=1, within_seconds=30.0) is None


def test_a_signal_reaches_the_rank_and_not_its_child_or_the_launcher() -> None:
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline().split() for _ in range(3)]  # both up, and the pids
            pids = next([int(pid) for pid in line] for line in lines if line != ["up"])
            assert rank_pids(process.pid) == dict(enumerate(pids))
            assert signal_rank(process.pid, 1, signal.SIGTERM) == pids[1]
            assert signal_rank(process.pid, 0) == pids[0]
            last = process.stdout.readline().split()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert last == [str(-signal.SIGKILL), str(-signal.SIGTERM)]
