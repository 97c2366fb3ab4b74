"""Signals become a flag, whatever the state of the process."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forge_resilience import StopSignal

pytestmark = pytest.mark.lane("test")

# A loop that reports what it saw on a pipe of its own, because its stdout and stderr may be gone.
LOOP = """
import os, sys
from forge_resilience import StopSignal
out = int(sys.argv[1])
with StopSignal() as stop:
    # extra
    os.write(out, b"ready\\n")
    while not stop.requested: pass
    os.write(out, (stop.signal_name + "\\n").encode())
    sys.stdin.read()  # the save, which the test ends
    os.write(out, b"saved\\n")
sys.stdout = None
os._exit(75)
"""


def start(extra: str = "", **streams: int) -> tuple[subprocess.Popen[bytes], int]:
    """The loop in a process, and the reading end of its pipe."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", LOOP.replace("# extra", extra), str(writing)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writing], **streams)
    os.close(writing)
    assert os.read(reading, 6) == b"ready\n"
    return process, reading


@pytest.mark.lane("quick")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_each_signal_is_a_request_to_stop(sent: signal.Signals) -> None:
    process, reading = start(stderr=subprocess.PIPE)
    process.send_signal(sent)
    _, err = process.communicate(timeout=20)
    assert os.read(reading, 100).decode().split() == [sent.name, "saved"]
    assert process.returncode == 75
    assert re.fullmatch(rf"{sent.name}: .+\n", err.decode())


@pytest.mark.slow
def test_a_thousand_mixed_signals_during_a_save_are_one_request() -> None:
    process, reading = start(stderr=subprocess.PIPE)
    process.send_signal(signal.SIGUSR1)
    assert os.read(reading, 8) == b"SIGUSR1\n"
    mixed, random_signal = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), random.Random(0)
    end = time.monotonic() + 2.0
    for sent in range(1000):
        process.send_signal(random_signal.choice(mixed))
        time.sleep(max(0.0, (end - time.monotonic()) / (1000 - sent)))  # spread over two seconds
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


def test_a_full_pipe_without_a_reader_does_not_block_the_stop() -> None:
    reader, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, bytes(65536))
    os.set_blocking(full, True)
    process, reading = start(stderr=full)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 75
    assert os.read(reading, 100) == b"SIGTERM\nsaved\n"
    os.close(reader)
    os.close(full)


@pytest.mark.lane("quick")
@pytest.mark.parametrize("closed_first", [True, False])
def test_a_data_file_that_took_descriptor_2_stays_clean(tmp_path: Path, closed_first: bool) -> None:
    data = tmp_path / "weights"
    take = f"data = open({str(data)!r}, 'w'); assert data.fileno() == 2"
    if closed_first:  # taken before the context opens, in a Python that never had a stderr
        code, shell = (
            LOOP.replace("out = int", f"{take}\nout = int"),
            ["sh", "-c", 'exec "$@" 2>&-', "sh"],
        )
    else:
        code, shell = LOOP.replace("# extra", f"os.close(2); {take}"), []
    reading, writing = os.pipe()
    command = [*shell, sys.executable, "-c", code, str(writing)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writing])
    os.close(writing)
    assert os.read(reading, 6) == b"ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 75
    assert data.read_bytes() == b""


def test_a_forked_child_goes_on_in_silence() -> None:
    process, reading = start("child = os.fork()", stderr=subprocess.PIPE, start_new_session=True)
    assert os.read(reading, 6) == b"ready\n"  # from the second of the two
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=20)  # ends when both have closed stderr
    assert process.returncode == 75
    assert err == b"SIGTERM: saving after this step, then leaving\n"
    with os.fdopen(reading, "rb") as pipe:
        assert sorted(pipe.read().split()) == [b"SIGTERM", b"SIGTERM", b"saved", b"saved"]


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


def test_off_the_main_thread_it_is_rejected() -> None:
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


def test_a_signal_that_cannot_be_caught_leaves_nothing_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopSignal((signal.SIGTERM, signal.SIGKILL))
    with pytest.raises(OSError, match=str(errno.EINVAL)):
        stop.__enter__()
    assert signal.getsignal(signal.SIGTERM) is before


def test_entering_it_while_open_is_rejected() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop, pytest.raises(RuntimeError, match=r"^StopSignal\b"):
        stop.__enter__()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_callers_own_handler_works_again_afterwards() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with StopSignal():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_F108_a_terminal_that_goes_is_a_request_to_stop_and_under_nohup_it_is_not() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal_name == "SIGHUP"
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_F108_a_terminal_that_is_gone_does_not_break_the_stop() -> None:
    terminal, line = os.openpty()
    process, reading = start(stderr=line, stdout=line)
    os.close(line)
    os.close(terminal)  # writes to the other end raise EIO from now on
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=20)
    assert process.returncode == 75
    assert os.read(reading, 100) == b"SIGHUP\nsaved\n"
