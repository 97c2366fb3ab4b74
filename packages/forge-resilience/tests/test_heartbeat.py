"""Heartbeats: what a watcher in another process reads, whatever happens to the writer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forge_resilience import Heartbeat
from forge_resilience.heartbeat import process_start, read_heartbeats
from forge_testing.problems import rejects

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs fork"),
    pytest.mark.lane("test"),
]

# A rank that takes its heartbeat from the environment, says "up", and does what it is told.
_RANK = """
import os, sys, time
from forge_resilience import Heartbeat
heartbeat = Heartbeat.from_environ()
assert Heartbeat.from_environ() is heartbeat
"""


def rank(folder: Path, body: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _RANK + body],
        env={**os.environ, "FORGE_HEARTBEAT_DIR": str(folder), **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_what_a_rank_enters_is_what_a_watcher_reads(tmp_path):
    assert read_heartbeats(tmp_path) == []
    assert read_heartbeats(tmp_path / "nothing") == []
    heartbeat = Heartbeat(tmp_path, 3)
    (beat,) = read_heartbeats(tmp_path)
    assert (beat.rank, beat.pid, beat.phase, beat.step) == (3, os.getpid(), "start", None)
    assert (beat.entries, beat.background) == (1, "")
    assert beat.process_start == process_start(os.getpid())

    heartbeat.enter("data", 7)
    heartbeat.enter("step")  # still step 7
    heartbeat.background("save")
    (beat,) = read_heartbeats(tmp_path)
    assert (beat.phase, beat.step, beat.entries, beat.background) == ("step", 7, 3, "save")
    assert beat.seconds >= beat.background_seconds >= 0
    assert (beat.steps, beat.background_entries) == (1, 2)
    heartbeat.background("")
    heartbeat.enter("naïve phase", 0)
    (beat,) = read_heartbeats(tmp_path)
    assert (beat.phase, beat.step, beat.background) == ("naïve phase", 0, "")
    with rejects("phase", "x" * 40, "length"):
        heartbeat.enter("x" * 40)


def test_ranks_are_read_by_number_and_other_files_are_ignored(tmp_path):
    for number in (10, 2):
        Heartbeat(tmp_path, number)
    (tmp_path / "rank-00004.stacks").write_bytes(b"")
    (tmp_path / "rank-00005").write_bytes(b"short")
    (tmp_path / "rank-00006").write_bytes(bytes(512))
    assert [beat.rank for beat in read_heartbeats(tmp_path)] == [2, 10]


def test_the_last_entry_outlives_a_killed_rank(tmp_path):
    killed = rank(tmp_path, 'heartbeat.enter("save", 41)\nos.kill(os.getpid(), 9)', RANK="2")
    assert killed.wait(timeout=60) == -signal.SIGKILL
    (beat,) = read_heartbeats(tmp_path)
    assert (beat.rank, beat.pid, beat.phase, beat.step) == (2, killed.pid, "save", 41)
    assert process_start(beat.pid) != beat.process_start  # gone, or another process by now


def test_an_entry_that_a_kill_tore_is_not_seen(tmp_path):
    heartbeat = Heartbeat(tmp_path)
    for step in range(5):
        heartbeat.enter("step", step)
    path = tmp_path / "rank-00000"
    whole = path.read_bytes()
    newest = whole.index((6).to_bytes(8, "little"), 32)  # after the header: a pid may hold them
    for cut in range(1, 60):  # the first bytes of the next entry over the slot that it goes to
        torn = bytearray(whole)
        torn[newest : newest + cut] = bytes(b ^ 0xFF for b in torn[newest : newest + cut])
        path.write_bytes(torn)
        (beat,) = read_heartbeats(tmp_path)
        assert (beat.step, beat.entries) == (3, 5)
    assert len(whole) == 512


@pytest.mark.slow
def test_a_torn_read_is_not_seen(tmp_path):
    """A writer as fast as it can, a reader in another process: step, phase and count always agree."""
    writer = rank(
        tmp_path,
        "print('up', flush=True)\nn = 0\n"
        "while True:\n    n += 1\n    heartbeat.enter(f'phase {n % 977}', n)",
    )
    try:
        assert writer.stdout.readline() == "up\n"
        seen = set()
        while len(seen) < 2000:
            (beat,) = read_heartbeats(tmp_path)
            if beat.step is not None:
                assert beat.phase == f"phase {beat.step % 977}"
                assert beat.entries == beat.step + 1  # "start" came before
                seen.add(beat.step)
    finally:
        writer.kill()
        writer.communicate()


def test_an_entry_costs_a_handful_of_operations_and_no_system_call(tmp_path):
    heartbeat = Heartbeat(tmp_path)
    heartbeat.enter("step", 1)
    calls: list[str] = []

    def count(frame, event, arg):
        if event == "c_call":
            calls.append(arg.__name__)
        elif event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    heartbeat.enter("step", 2)
    sys.setprofile(None)
    calls.remove("setprofile")
    assert sorted(calls) == ["crc32", "enter", "monotonic", "pack", "to_bytes"]  # _encode is cached


@pytest.mark.lane("quick")
def test_children_of_a_rank_do_not_write_its_entries(tmp_path):
    """A forked data worker, and a spawned one that runs the script's head again."""
    body = """
heartbeat.enter("step", 5)
if os.fork() == 0:
    heartbeat.enter("forked", 6); heartbeat.background("forked")
    Heartbeat.from_environ().enter("forked", 6)
    os._exit(0)
assert os.wait()[1] == 0
import subprocess
head = "from forge_resilience.heartbeat import Heartbeat; Heartbeat.from_environ().enter('spawned', 6)"
subprocess.run([sys.executable, "-c", head], check=True)
"""
    parent = rank(tmp_path, body)
    assert parent.wait(timeout=60) == 0, parent.stderr.read()
    (beat,) = read_heartbeats(tmp_path)
    assert (beat.pid, beat.phase, beat.step, beat.background) == (parent.pid, "step", 5, "")


def test_a_later_attempt_replaces_the_file(tmp_path):
    earlier = Heartbeat(tmp_path, 1)
    earlier.enter("step", 90)
    later = Heartbeat(tmp_path, 1)
    earlier.enter("step", 91)  # a process that has not ended yet writes where nobody reads
    later.enter("load")
    (beat,) = read_heartbeats(tmp_path)
    assert (beat.phase, beat.step, beat.entries) == ("load", None, 2)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("environ", "number"), [({}, 0), ({"SLURM_PROCID": "4"}, 4), ({"RANK": "1", "SLURM_PROCID": "4"}, 1)]
)  # fmt: skip
def test_the_rank_is_that_of_the_launcher(tmp_path, monkeypatch, environ, number):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert rank(tmp_path, "", **environ).wait(timeout=60) == 0
    assert [beat.rank for beat in read_heartbeats(tmp_path)] == [number]


@pytest.mark.lane("quick")
def test_without_a_folder_or_space_for_it_the_run_goes_on(tmp_path):
    alone = rank(tmp_path, "heartbeat.enter('step', 1)", FORGE_HEARTBEAT_DIR="")
    assert alone.communicate(timeout=60) == ("", "")
    (tmp_path / "file").touch()
    refused = rank(tmp_path / "file", "heartbeat.enter('step', 1)")
    errors = refused.communicate(timeout=60)[1]
    assert refused.returncode == 0
    assert errors.startswith("rank 0 ")
    assert len(errors.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_USR2_writes_all_stacks_while_a_C_call_holds_the_GIL(tmp_path):
    body = """
import ctypes
def holds_the_gil():
    ctypes.PyDLL(None).sleep(600)
heartbeat.enter("step", 1)
print("up", flush=True)
holds_the_gil()
"""
    held = rank(tmp_path, body)
    try:
        assert held.stdout.readline() == "up\n"
        stacks = tmp_path / "rank-00000.stacks"
        deadline = time.monotonic() + 60
        while "holds_the_gil" not in (text := stacks.read_text()):
            assert time.monotonic() < deadline, text
            held.send_signal(signal.SIGUSR2)
            time.sleep(0.01)  # polling a file
        assert re.search(r'File "<string>", line \d+ in holds_the_gil', text)
    finally:
        held.kill()
        held.communicate()


def test_a_handler_of_the_program_stays(tmp_path):
    handled = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, signal\n"
            "signal.signal(signal.SIGUSR2, lambda *_: print('mine'))\n"
            "from forge_resilience.heartbeat import Heartbeat\n"
            "Heartbeat.from_environ(); os.kill(os.getpid(), signal.SIGUSR2)",
        ],
        env={**os.environ, "FORGE_HEARTBEAT_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (handled.returncode, handled.stdout) == (0, "mine\n")


def test_the_main_loop_and_the_writer_have_slots_of_their_own(tmp_path):
    heartbeat = Heartbeat(tmp_path)
    done = threading.Event()

    def write():
        for _ in range(2000):
            heartbeat.background("save")
            heartbeat.background("")
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    step = 0
    while not done.is_set():
        step += 1
        heartbeat.enter("step", step)
        (beat,) = read_heartbeats(tmp_path)
        assert (beat.phase, beat.step) == ("step", step)
        assert beat.background in ("", "save")
    thread.join()


def test_F149_a_pipe_in_the_folder_of_heartbeats_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rank-00000")
    (tmp_path / "rank-00001").symlink_to("/dev/zero")
    assert read_heartbeats(tmp_path) == []
