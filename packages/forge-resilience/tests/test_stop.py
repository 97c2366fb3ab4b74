"""Signals become a flag, whatever the state of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from forge_resilience import StopSignal

# A loop that reports what it saw on a pipe of its own, because its stdout and stderr may be gone.
LOOP = """
import os, sys
from forge_resilience import StopSignal
out = int(sys.argv[1])
with StopSignal() as stop:
    os.write(out, b"ready\\n")
    while not stop.requested: pass
    os.write(out, (stop.signal_name + "\\n").encode())
    sys.stdin.read()  # the save: it lasts until the test closes the pipe
    os.write(out, b"saved\\n")
sys.stdout = None
os._exit(75)
"""


def start(**streams: int) -> tuple[subprocess.Popen[bytes], int]:
    """The loop in a process, and the reading end of its pipe."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", LOOP, str(writing)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writing], **streams)
    os.close(writing)
    assert os.read(reading, 6) == b"ready\n"
    return process, reading


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_each_signal_is_a_request_to_stop(sent: signal.Signals) -> None:
    process, reading = start(stderr=subprocess.PIPE)
    process.send_signal(sent)
    _, err = process.communicate(timeout=20)
    assert os.read(reading, 100).decode().split() == [sent.name, "saved"]
    assert process.returncode == 75
    assert err.decode() == f"{sent.name}: saving after this step, then leaving\n"


def test_a_thousand_mixed_signals_during_a_save_are_one_request() -> None:
    process, reading = start(stderr=subprocess.PIPE)
    process.send_signal(signal.SIGUSR1)
    assert os.read(reading, 8) == b"SIGUSR1\n"
    mixed = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    for i in range(1000):
        process.send_signal(mixed[i % 3])
    assert process.poll() is None
    _, err = process.communicate(timeout=20)
    assert process.returncode == 75
    assert err.count(b"\n") == 1


def test_a_closed_stderr_and_a_broken_pipe_do_not_matter() -> None:
    reading_end, broken = os.pipe()
    os.close(reading_end)
    process, reading = start(stderr=broken, stdout=broken)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 75
    assert os.read(reading, 100) == b"SIGTERM\nsaved\n"
    os.close(broken)


def test_handlers_come_back_and_the_first_signal_is_named() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert not stop.requested
        assert stop.signal_name is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert stop.signal_name == "SIGUSR1"
        assert stop.count == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_off_the_main_thread_it_is_refused() -> None:
    seen: list[str] = []

    def enter() -> None:
        try:
            with StopSignal():
                pass
        except RuntimeError as error:
            seen.append(str(error))

    thread = threading.Thread(target=enter, name="worker-7")
    thread.start()
    thread.join()
    assert "'worker-7'" in seen[0]
    assert "main thread" in seen[0]
