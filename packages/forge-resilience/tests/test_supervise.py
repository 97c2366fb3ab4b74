"""Supervised ranks as real processes: each kind of hang is named, all are started again, nobody is left behind."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import pytest

from forge_resilience import ExitCode, local_workers, read_events, run_local_workers
from forge_resilience.heartbeat import Heartbeat, read_heartbeats
from forge_resilience.supervise import FINAL_CODES, Late, Result, WatchConfig, supervise, supervisor
from forge_resilience.supervise.__main__ import _parser
from forge_resilience.supervise.hang import collect_stacks, describe_hang
from forge_testing.problems import rejects

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.lane("test"),
]
LIMIT = 2.0
_FLAGS = ("--start_seconds=60", "--grace_seconds=5")
SOON = ("--step_seconds=2", "--first_step_seconds=60")

# A rank without torch: ten steps, of which `body` may spoil one, and a sum at the end.
_RANK = """
import os, signal, sys, time
from pathlib import Path
from forge_resilience.heartbeat import Heartbeat
here, rank = Path(sys.argv[1]), int(os.environ.get("RANK", 0))
life = int(os.environ["FORGE_LIFE"])
heartbeat = Heartbeat.from_environ()
world = int(os.environ.get("WORLD_SIZE", 1))
def wait(step):  # as a collective does: nobody goes on before all are there
    (here / f"met-{life}-{step}-{rank}").touch()
    while len(list(here.glob(f"met-{life}-{step}-*"))) < world:
        time.sleep(0.002)
def step(number):
    heartbeat.enter("data", number)
    data(number)
    heartbeat.enter("step")
    compute(number)
    wait(number)
def data(number): pass
def compute(number): pass
BODY
done = [here / f"done{number}" for number in range(world)]  # what a checkpoint would hold: steps of all
first = min(path.stat().st_size if path.exists() else 0 for path in done) + 1
if done[rank % world].exists():
    os.truncate(done[rank % world], first - 1)
for number in range(first, 11):
    step(number)
    with done[rank % world].open("a") as file:
        file.write("x")
heartbeat.enter("exit")
"""


class Ran(NamedTuple):
    code: int
    said: str
    events: list[dict]


def command(folder: Path, body: str) -> list[str]:
    return [sys.executable, "-c", _RANK.replace("BODY", body), str(folder)]


def start(folder: Path, body: str, *flags: str, nproc: int | None = 2) -> subprocess.Popen[str]:
    own = [] if nproc is None else [f"--nproc={nproc}"]
    return subprocess.Popen(
        [sys.executable, "-m", "forge_resilience.supervise", *own, *_FLAGS, f"--journal={folder}/events.jsonl",
         f"--heartbeats={folder}/beats", *flags, "--", *command(folder, body)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(folder: Path, body: str, *flags: str, nproc: int | None = 2) -> Ran:
    return end(start(folder, body, *flags, nproc=nproc), folder)


def end(process: subprocess.Popen[str], folder: Path) -> Ran:
    try:
        said = process.communicate(timeout=90)[1]
    finally:
        process.kill()  # its ranks end with it
    return Ran(process.returncode, said, list(read_events(folder / "events.jsonl")))


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)
    return path.read_text()


def gone(pid: int) -> bool:
    """True once nothing of the process is left; one that stays is killed."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True  # its parent is what the test killed
        except OSError:
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return False


HANGS = {
    # in its step, before the others' "collective"
    "a stopped process": (
        "def compute(number):\n    if (life, number, rank) == (0, 5, 1): os.kill(os.getpid(), signal.SIGSTOP)",
        ("step", 5), r"rank 1 is late: phase step, step 5, .* \(SIGSTOP",
    ),
    # a C call that holds the GIL: no Python code of the rank runs, no handler of Python either
    "a held GIL": (
        "def compute(number):\n    if (life, number, rank) == (0, 5, 1): hold_the_gil()\n"
        "def hold_the_gil():\n    import ctypes, fcntl\n    lock, again = open(here / 'lock', 'w'), open(here / 'lock', 'w')\n"
        "    fcntl.flock(lock, 2)\n    ctypes.PyDLL(None).flock(again.fileno(), 2)  # no signal wakes it\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)",
        ("step", 5), r"rank 1 \(pid \d+\), phase step, step 5, .* in hold_the_gil ",
    ),
    "a data loader that blocks": (
        "import queue\n"
        "def data(number):\n    if (life, number, rank) == (0, 5, 1): read_a_dead_disk()\n"
        "def read_a_dead_disk():\n    queue.Queue().get()",
        ("data", 5), r"rank 1 is late: phase data, step 5, 1 entry .*, in read_a_dead_disk ",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", HANGS)
def test_F66_a_hang_is_named_within_its_limit_and_the_run_goes_on(tmp_path, kind):
    body, (phase, step), said = HANGS[kind]
    ran = run(tmp_path, body, *SOON, nproc=3)
    assert ran.code == 0, ran.said
    hang, restart = ran.events
    assert (hang["event"], restart["event"]) == ("hang", "restart")
    assert (hang["rank"], hang["phase"], hang["step"]) == (1, phase, step)
    assert (restart["rank"], restart["step"], restart["life"]) == (1, step, 1)
    assert LIMIT < hang["seconds"] <= LIMIT + 5  # by the supervisor's clock
    assert restart["seconds_lost"] >= hang["seconds_lost"] >= hang["seconds"]
    assert re.search(said, ran.said), ran.said
    assert len(re.findall(r"^  rank \d \(pid", ran.said, re.MULTILINE)) == 3
    assert [wait_for(tmp_path / f"done{rank}") for rank in range(3)] == ["x" * 10] * 3
    (message,) = tmp_path.glob("hang-*.txt")
    assert "--- rank 0" in message.read_text()  # stacks of all threads of all that answer
    assert "restart 1 of 10" in ran.said


@pytest.mark.slow
def test_a_late_rank_is_reported_and_not_killed(tmp_path):
    body = "def compute(number):\n    if (number, rank) == (5, 1): time.sleep(4)"
    ran = run(tmp_path, body, *SOON, "--action=report")
    assert ran.code == 0, ran.said
    assert [(e["event"], e["rank"], e["step"]) for e in ran.events] == [("stall", 1, 5)] * len(
        ran.events
    )
    assert 1 <= len(ran.events) <= 2  # one a rank at most, and nobody twice
    assert "restart" not in ran.said


@pytest.mark.slow
def test_a_program_without_heartbeats_has_no_limit(tmp_path):
    body = "import subprocess\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(2)'])\nsys.exit(0)"
    quiet = body.replace(
        "import subprocess", "(here / 'beats/rank-00000').unlink(); import subprocess"
    )
    ran = run(tmp_path, quiet, "--start_seconds=1", nproc=1)
    assert (ran.code, ran.events) == (0, []), ran.said


@pytest.mark.slow
def test_stacks_of_a_program_that_registers_nothing(tmp_path):
    script = "import time\ndef sleeps(): time.sleep(600)\nsleeps()"
    process = subprocess.run(
        [sys.executable, "-m", "forge_resilience.supervise", "--nproc=1", "--start_seconds=1", "--max_restarts=0",
         "--expect_heartbeats", "--", sys.executable, "-c", script],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert process.returncode == 1
    assert "rank 0 is late: phase start," in process.stderr
    assert re.search(r'File "<string>", line 2 in sleeps', process.stderr)  # by its end, SIGABRT


@pytest.mark.slow
def test_a_rank_that_ended_well_is_named_with_those_that_wait_for_it(tmp_path):
    body = "def compute(number):\n    if (life, number, rank) == (0, 5, 1): sys.exit(0)"
    ran = run(tmp_path, body, *SOON)
    assert ran.code == 0, ran.said
    assert re.search(r"rank 1 .* code 0", ran.said)
    assert [e["event"] for e in ran.events] == ["hang", "restart"]


@pytest.mark.slow
def test_the_flight_recorder_is_asked_and_its_files_are_named(tmp_path):
    """torch opens a pipe for each rank, and dumps what it recorded when something is written into it."""
    pipe = tmp_path / "pipe_0.pipe"
    os.mkfifo(pipe)
    listener = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    environ = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "/scratch/fr_"}
    late = Late(0, "step", 3, 9.0, 8.0)
    try:
        for more, said in (
            ({}, "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"),
            (
                {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_"},
                "/scratch/fr_RANK; torchfrtrace /scratch --prefix fr_",
            ),
        ):
            hang = describe_hang(tmp_path, late, {0: os.getpid()}, {}, {0: 9.0}, environ | more)
            assert said in hang.message
        assert os.read(listener, 10) == b"1\n"
        assert "flight" not in describe_hang(tmp_path, late, {0: os.getpid()}, {}, {}, {}).message
    finally:
        os.close(listener)


# ---- crashes, and when a job is not started again


@pytest.mark.slow
def test_a_crash_starts_all_ranks_again(tmp_path):
    body = (
        "def compute(number):\n"
        "    if (life, number, rank) == (0, 3, 0): sys.exit(1)\n"
        "    if (life, number, rank) == (1, 6, 1): os.kill(os.getpid(), 9)\n"
        "    if (life, number, rank) == (2, 9, 1): os.abort()"
    )
    ran = run(tmp_path, body)
    assert ran.code == 0, ran.said
    assert [(e["event"], e["life"]) for e in ran.events] == [("restart", n) for n in (1, 2, 3)]
    causes = (r"rank 0 .* 1", r"rank 1 .* SIGKILL\b.*", r"rank 1 .* SIGABRT")
    for event, cause in zip(ran.events, causes):
        assert re.fullmatch(cause, event["cause"])
    assert [(e["phase"], e["step"]) for e in ran.events] == [("step", 3), ("step", 6), ("step", 9)]
    assert [wait_for(tmp_path / f"done{rank}") for rank in range(2)] == ["x" * 10] * 2


@pytest.mark.lane("quick")
@pytest.mark.parametrize("code", [0, 65, 75])
def test_codes_that_are_final(tmp_path, code):
    assert set(ExitCode) - {1} == FINAL_CODES
    ran = run(tmp_path, f"sys.exit({int(code)})", nproc=1)
    assert (ran.code, ran.events) == (code, [])
    pid = read_heartbeats(tmp_path / "beats")[0].pid
    said = "" if code in (0, 75) else rf"rank 0 \(pid {pid}\) .* {int(code)}\n"
    assert re.fullmatch(said, ran.said)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_change_the_code(closed):
    line = f"{sys.executable} -m forge_resilience.supervise -- sh -c 'exit 75' {closed}"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (75, "")


@pytest.mark.slow
def test_two_attempts_without_progress_end_the_job(tmp_path):
    body = "def compute(number):\n    if number == 4: sys.exit(1)"
    ran = run(tmp_path, body, nproc=1)
    assert ran.code == 70
    # life 0 came to step 4, and two more did not get beyond it
    assert [(e["event"], e["step"]) for e in ran.events] == [("restart", 4)] * 2 + [
        ("no_progress", 4)
    ]
    assert re.search(r"2 attempts .* step 4: .* 70", ran.said)


@pytest.mark.slow
def test_heartbeats_that_another_run_left_are_no_progress(tmp_path):
    (tmp_path / "beats").mkdir()
    Heartbeat(tmp_path / "beats", 5).enter("step", 5000)
    body = "def compute(number):\n    if number == 3 * (life + 1): sys.exit(1)"
    ran = run(tmp_path, body, nproc=1)
    assert ran.code == 0, ran.said
    assert [(e["event"], e["step"]) for e in ran.events] == [("restart", n) for n in (3, 6, 9)]


@pytest.mark.slow
def test_restarts_are_counted(tmp_path):
    ran = run(tmp_path, "def compute(number):\n    sys.exit(3)", "--max_restarts=1", nproc=1)
    assert (ran.code, [e["event"] for e in ran.events]) == (3, ["restart"])
    assert re.search(r"\b1 restarts .* code 3", ran.said)


@pytest.mark.slow
def test_a_newer_save_is_progress(tmp_path):
    """A run whose steps begin anew at each start, but which saves."""
    body = (
        "from forge_resilience import Journal\n"
        "Journal(here / 'events.jsonl').record('save', step=life + 1)\n"
        "if life < 4: heartbeat.enter('step', 1); sys.exit(1)"
    )
    ran = run(tmp_path, body, nproc=1)
    assert ran.code == 0, ran.said
    assert [e["event"] for e in ran.events].count("restart") == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "environ",
    [{"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"},
     {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}],
)  # fmt: skip
def test_a_single_rank_of_another_launcher_is_not_restarted(tmp_path, monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    body = "world = 1\ndef compute(number):\n    if number == 5: time.sleep(600)"
    ran = run(tmp_path, body, *SOON, nproc=None)
    assert ran.code == 1
    assert [(e["event"], e["rank"], e["step"]) for e in ran.events] == [("hang", 3, 5)]


# ---- stop signals


@pytest.mark.slow
def test_a_stop_is_handed_on_and_never_leads_to_a_restart(tmp_path):
    """Nor does a rank that fails after it."""
    body = (
        "asked = []\nsignal.signal(signal.SIGUSR1, lambda *_: asked.append(1))\n"
        "def compute(number):\n    (here / f'up{rank}').write_text('1')\n"
        "    while not asked: time.sleep(0.01); heartbeat.enter('step')\n"
        "    sys.exit(75 if (here / 'good').exists() else 1)"
    )
    for good, code in ((True, 75), (False, 1)):
        if good:
            (tmp_path / "good").touch()
        process = start(tmp_path, body)
        for rank in range(2):
            wait_for(tmp_path / f"up{rank}")
        process.send_signal(signal.SIGUSR1)
        ran = end(process, tmp_path)
        assert (ran.code, ran.events) == (code, []), ran.said
        for path in tmp_path.glob("*[0-9]"):
            path.unlink()
        (tmp_path / "good").unlink(missing_ok=True)


@pytest.mark.slow
def test_a_hang_after_a_stop_ends_with_75(tmp_path):
    body = "signal.signal(signal.SIGTERM, lambda *_: None)\n(here / 'up0').write_text('1')\nheartbeat.enter('save', 4)\ntime.sleep(600)"
    process = start(tmp_path, body, "--limits=save=1", nproc=1)
    wait_for(tmp_path / "up0")
    process.terminate()
    ran = end(process, tmp_path)
    assert (ran.code, [e["event"] for e in ran.events]) == (75, ["hang"]), ran.said


@pytest.mark.slow
def test_a_stop_between_two_attempts(tmp_path):
    """Ranks have crashed, and what they left takes its time to end."""
    body = (
        "def compute(number):\n    if number == 3:\n        pid = os.fork()\n        if pid == 0:\n"
        "            signal.signal(signal.SIGTERM, lambda *_: (here / 'told').write_text('1'))\n"
        "            (here / 'child').write_text(str(os.getpid()))\n"
        "            while True: time.sleep(0.1)\n"
        "        while not (here / 'child').exists(): time.sleep(0.01)\n"
        "        sys.exit(1)"
    )
    process = start(tmp_path, body, "--grace_seconds=3", nproc=1)
    wait_for(tmp_path / "told")
    process.send_signal(signal.SIGUSR1)
    ran = end(process, tmp_path)
    assert (ran.code, ran.events) == (75, []), ran.said
    assert gone(int(wait_for(tmp_path / "child")))


def test_F185_a_stop_after_the_last_rank_has_crashed_is_not_lost(tmp_path, monkeypatch):
    ended = local_workers._Job._handle_end

    def then_stop(job, rank, code):
        ended(job, rank, code)
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(local_workers._Job, "_handle_end", then_stop)
    result = supervise(["false"], 1, journal=tmp_path / "events.jsonl")
    assert (result.code, result.attempts) == (1, 1)
    assert list(read_events(tmp_path / "events.jsonl")) == []  # it was not started again


# ---- what is odd around the program


@pytest.mark.parametrize("make", ["mkdir", "mkfifo", "ln -s /dev/zero"])
def test_F187_a_journal_that_becomes_unreadable_changes_no_code(tmp_path, make):
    journal = tmp_path / "events.jsonl"
    assert supervise(["sh", "-c", f"{make} {journal}; exit 65"], 1, journal=journal).code == 65


def test_F187_a_heartbeat_or_stacks_that_are_a_fifo_are_none(tmp_path):
    for name in ("rank-00001", "rank-00000.stacks"):
        os.mkfifo(tmp_path / name)
    Heartbeat(tmp_path, 0).enter("step", 3)
    (found,) = read_heartbeats(tmp_path)
    assert collect_stacks(tmp_path, [found]) == {}


def test_F194_a_program_is_watched_elsewhere_where_memory_has_no_inode(tmp_path):
    line = (
        "mount -t tmpfs -o nr_inodes=1 none /dev/shm || exit 99; "
        f"exec {sys.executable} -m forge_resilience.supervise -- sh -c 'test -d $FORGE_HEARTBEAT_DIR && exit 65'"
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", line], capture_output=True, text=True, timeout=60
    )
    if done.returncode in (1, 99, 127):
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 65, done.stderr
    assert re.fullmatch(r"supervise: .*No space.*\nrank 0 .* code 65\n", done.stderr)


def test_F194_a_program_runs_unwatched_where_no_folder_can_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_MEMORY", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert supervise(command(tmp_path, "sys.exit(65)"), 1).code == 65


def test_F194_folders_of_killed_supervisors_are_removed(tmp_path, monkeypatch):
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom forge_resilience.supervise import supervisor\n"
        "supervisor._MEMORY = Path(sys.argv[1])\nwith supervisor._heartbeat_folder(None):\n    os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60)
    (stale,) = tmp_path.iterdir()
    (tmp_path / "forge-heartbeats-being-made").mkdir()
    monkeypatch.setattr(supervisor, "_MEMORY", tmp_path)
    with supervisor._heartbeat_folder(None) as first, supervisor._heartbeat_folder(None) as second:
        assert first.is_dir()
        assert second.is_dir()
        assert not stale.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["forge-heartbeats-being-made"]


# ---- nobody is left behind

_FAMILY = """
def child(name, deaf):
    pid = os.fork()
    if pid == 0:
        if deaf: signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (here / f"{name}{rank}.tmp").write_text(str(os.getpid()))
        (here / f"{name}{rank}.tmp").rename(here / f"{name}{rank}")
        if name == "child" and os.fork() == 0:
            os.setsid(); os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            (here / f"daemon{rank}").write_text(str(os.getpid()))
            time.sleep(600)
        time.sleep(600)
    return pid
def compute(number):
    if number == 1:
        child("child", False); child("deaf", True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (here / f"rank{rank}").write_text(str(os.getpid()))
    if number == 5: LAST
"""


def family(folder: Path) -> list[int]:
    names = [f"{name}{rank}" for name in ("rank", "child", "deaf", "daemon") for rank in range(2)]
    return [int(wait_for(folder / name)) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["guard", "supervisor"])
def test_a_killed_supervisor_leaves_no_process(tmp_path, victim):
    last = "heartbeat.enter('mine'); time.sleep(600)"
    process = start(tmp_path, _FAMILY.replace("LAST", last), "--grace_seconds=1")
    pids = family(tmp_path)
    status = Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()
    supervisor = int(status[1])
    assert supervisor != process.pid
    os.kill(process.pid if victim == "guard" else supervisor, signal.SIGKILL)
    process.wait(timeout=60)
    assert all([gone(pid) for pid in [*pids, supervisor]])
    process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("last", ["os._exit(0)", "os.kill(os.getpid(), 9)", "time.sleep(600)"])
def test_what_ranks_leave_running_is_ended(tmp_path, last):
    flags = (*SOON, "--max_restarts=0", "--grace_seconds=0.5")
    process = start(tmp_path, _FAMILY.replace("LAST", last), *flags)
    pids = family(tmp_path)
    ran = end(process, tmp_path)
    done = "exit" in last
    assert ran.code == (0 if done else 1), ran.said
    # After a clean end what took a session of its own goes on: somebody detached it on purpose.
    kept = [pid for pid in pids if done and Path(f"/proc/{pid}").exists()]
    for pid in kept:
        os.kill(pid, signal.SIGKILL)
    assert kept == (pids[-2:] if done else [])
    assert all([gone(pid) for pid in pids])


@pytest.mark.slow
def test_orphans_are_collected_while_ranks_run(tmp_path):
    body = (
        "def compute(number):\n    if number == 1:\n        if os.fork() == 0:\n"
        "            orphan = os.fork()\n            if orphan == 0: time.sleep(0.1); os._exit(0)\n"
        "            (here / 'orphan').write_text(str(orphan)); os._exit(0)\n"
        "        os.wait()\n"
        "    if number == 2:\n        pid = (here / 'orphan').read_text()\n"
        "        while Path('/proc', pid).exists(): time.sleep(0.01); heartbeat.enter('step')"
    )
    ran = run(tmp_path, body, nproc=1)
    assert ran.code == 0, ran.said


# ---- the function, and what is refused


@pytest.mark.slow
def test_the_function(tmp_path):
    config = WatchConfig("restart", step_seconds=LIMIT, first_step_seconds=60)
    body = "def compute(number):\n    if (life, number) == (0, 5): time.sleep(600)"
    before = signal.getsignal(signal.SIGTERM)
    other = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    )  # the caller's own
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    journal = tmp_path / "events.jsonl"
    result = supervise(command(tmp_path, body), 2, config=config, journal=journal)
    assert (result.code, result.attempts, result.reason) == (0, 2, "")
    assert [e["event"] for e in read_events(tmp_path / "events.jsonl")] == ["hang", "restart"]
    assert signal.getsignal(signal.SIGTERM) is before
    other.communicate(b"\n", timeout=60)
    assert (other.returncode, ended.wait(timeout=60)) == (0, 3)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--nproc", "0", "--", "true"], "nproc 0 "),
        (["--nproc", "2"], "--help"),
        (["--step_seconds", "-1", "--", "true"], "step_seconds -1.0 "),
        (["--limits", "save", "--", "true"], "'save' "),
        (["--limits", "=5", "--", "true"], "limits [''] "),
        (["--limits", "a=1,a=2", "--", "true"], "'a=1,a=2' "),
        (["--grace_seconds", "nan", "--", "true"], "grace_seconds nan "),
        (["--", "no-such-program"], "No such file or directory: 'no-such-program'"),
    ],
)
def test_invalid_arguments_are_rejected(args, said):
    done = subprocess.run(
        [sys.executable, "-m", "forge_resilience.supervise", *args], capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert done.returncode == 78, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_that_is_one_text_is_rejected():
    for start in (supervise, run_local_workers):
        with rejects("command", "true", "type"):
            start("true", 1)


@pytest.mark.parametrize("script", ["sys.exit(3)", "open('missing')"])
def test_a_program_that_fails_at_once_and_has_no_heartbeat_makes_no_progress(script):
    result = supervise([sys.executable, "-c", f"import sys; {script}"], 1)
    assert (result.code, result.attempts) == (70, 2)


def test_a_program_that_runs_for_a_while_without_heartbeats_is_restarted(monkeypatch):
    monkeypatch.setattr(supervisor, "_SHORT_SECONDS", 0.0)
    result = supervise(["sh", "-c", "exit 3"], 1, config=WatchConfig("restart", max_restarts=3))
    assert (result.code, result.attempts) == (3, 4)


def test_an_error_that_may_pass_is_not_the_end_of_a_job():
    code = (
        "import errno, sys\nfrom forge_resilience.supervise import __main__ as own\n"
        "def fails(*_, **__): raise OSError(errno.EAGAIN, 'no process')\n"
        "own.supervise = fails\nsys.exit(own.main(['--', 'true']))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 1


def test_no_torch_is_imported():
    code = "import sys, forge_resilience.supervise.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_config_makes_the_command_that_reads_it() -> None:
    config = WatchConfig("restart", step_seconds=5, limits={"save": 9.0}, max_restarts=2)
    words = config.command("/r/events.jsonl", "python")
    assert words[:3] == ("python", "-m", "forge_resilience.supervise")
    read = _parser().parse_args(words[3:])
    assert {f.name: getattr(read, f.name) for f in fields(WatchConfig)} == asdict(config)
    assert (read.journal, read.expect_heartbeats) == ("/r/events.jsonl", True)


def test_the_result_has_code_attempts_and_reason(tmp_path, capfd):
    config = WatchConfig("restart", max_restarts=0)
    result = supervise([sys.executable, "-c", "raise SystemExit(3)"], 1, config=config)
    assert (result.code, result.attempts) == (3, 1)
    assert "rank 0" in result.reason
    assert "restarts" in capfd.readouterr().err
    left = supervise(["sh", "-c", "exit 3"], 1, config=WatchConfig("report"))
    assert (left.code, left.attempts) == (3, 1)
    assert "'report'" in capfd.readouterr().err
    assert "'report'" in left.reason
    stopped = supervise(["sh", "-c", "kill -USR1 $PPID; exec sleep 60"], 1)
    assert (stopped.code, stopped.attempts) == (75, 1)
    assert stopped.reason


def test_the_result_is_the_number_of_old_for_one_version():
    result = Result(75, 2, "a signal")
    with pytest.warns(DeprecationWarning, match="code"):
        assert result == 75
    with pytest.warns(DeprecationWarning, match="code"):
        assert result != 0
    with pytest.warns(DeprecationWarning, match="code"):
        assert result
    assert int(result) == 75
    assert json.dumps({"code": result}) == '{"code": 75}'
    assert result == Result(75, 2, "a signal")
    assert result != Result(75, 1, "a signal")
    assert pickle.loads(pickle.dumps(result)).reason == "a signal"
    script = "import sys; from forge_resilience import Result; sys.exit(Result(75))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 75
