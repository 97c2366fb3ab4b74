"""The shared topic `parents`, by the copy of one package, with real processes and a real subreaper."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from forge_data._shared.parents import die_with, with_parent
from forge_testing.processes import exit_code, forked

pytestmark = [
    pytest.mark.lane("test"),
    pytest.mark.skipif(sys.platform != "linux", reason="prctl is of Linux"),
]


def adopted(make: Callable[[], object]) -> int:
    """How the child ends that `make` left, in a process that it makes and that is killed then: a wait status."""

    def reaper() -> None:
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        parent = forked(lambda: (make(), os.kill(os.getpid(), signal.SIGKILL)))
        exit_code(parent)
        signal.alarm(20)
        status = exit_code(-1)
        os._exit(-status + 100 if status < 0 else status)

    return exit_code(forked(reaper))


def test_a_child_dies_with_its_parent() -> None:
    def make() -> None:
        ready, told = os.pipe()
        parent = os.getpid()
        forked(lambda: (die_with(parent), os.write(told, b"x"), time.sleep(60)))
        os.read(ready, 1)

    assert adopted(make) == 100 + signal.SIGKILL


def test_F164_a_child_that_a_subreaper_adopted_before_it_asked_ends() -> None:
    def late(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(0.001)
        assert os.getppid() != 1
        die_with(parent)
        os._exit(9)  # it lives on

    def make() -> None:
        parent = os.getpid()
        forked(lambda: late(parent))

    assert adopted(make) == 1


def test_a_command_gets_the_signal_that_was_asked_for() -> None:
    def make() -> None:
        command = ["sh", "-c", "trap 'exit 7' TERM; echo; while :; do sleep 0.01; done"]
        preexec = with_parent(signal.SIGTERM)
        child = subprocess.Popen(command, preexec_fn=preexec, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()

    assert adopted(make) == 7


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    die_with(-1)
    with_parent()()
