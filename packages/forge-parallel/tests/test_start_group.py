"""Ranks that meet, and ranks that cannot: real processes on loopback.

Run as a script this file is the rank's side: it imports torch once and forks the ranks of each
scenario that it reads from stdin, so that a scenario costs a tenth of a second and not two a rank.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from forge_parallel._shared.problems import Problem, ProblemError
from forge_testing.problems import assert_problem, rejects
from forge_testing.processes import ALL_REDUCE

TIMEOUT = 1.5  # for starts that must fail by time


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def plain(world_size: int, port: int, **common: str) -> list[dict[str, str]]:
    """Environments of `world_size` ranks started by hand."""
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{"RANK": str(rank), **shared, **common} for rank in range(world_size)]


# --- the side of the ranks ------------------------------------------------------------------------


def rank_main() -> dict[str, object]:
    """What one rank sees of its start, two groups long."""
    import torch
    import torch.distributed as dist

    from forge_parallel.start import (
        StartError,
        end_process_group,
        find_world,
        rendezvous,
        start_process_group,
        store,
    )

    if "NETNS" in os.environ:  # on another host, as far as addresses go
        with open(f"/var/run/netns/{os.environ['NETNS']}") as space:
            assert ctypes.CDLL(None).setns(space.fileno(), 0) == 0
    began = time.monotonic()
    if "MUTE" in os.environ:
        return listen_and_say_nothing(int(os.environ["MASTER_PORT"]))
    time.sleep(float(os.environ.get("LATE", "0")))
    facts = {"config": os.environ.get("CONFIG", "same")}
    timeout = float(os.environ.get("TIMEOUT", "20"))
    torch.__version__ = os.environ.get("TORCH_SAYS", torch.__version__)
    for module in (store, rendezvous):
        module.ANSWER_SECONDS = float(os.environ.get("ANSWER", module.ANSWER_SECONDS))
    sums = []
    try:
        for _ in range(2):
            start_process_group(
                find_world(), "cpu", start_timeout_seconds=timeout, timeout_seconds=20, facts=facts
            )
            total = torch.tensor([dist.get_rank() + 1.0])
            dist.all_reduce(total)
            sums.append(total.item())
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
            end_process_group()
            end_process_group()  # the second has nothing to do
    except StartError as error:
        seconds = time.monotonic() - began
        problems = [asdict(problem) for problem in error.problems]
        return {
            "error": str(error),
            "problems": problems,
            "seconds": seconds,
            "shared": error.shared,
        }
    return {
        "sums": sums,
        "interface": interface,
        "left": "GLOO_SOCKET_IFNAME" in os.environ,
        "running": dist.is_initialized(),
    }


def listen_and_say_nothing(port: int) -> dict[str, object]:
    """Until the other rank has looked once, connected once, and ended."""
    with socket.create_server(("127.0.0.1", port)) as listening:
        for _ in range(2):
            connection, _ = listening.accept()
            while connection.recv(1000):
                pass
    return {}


def serve() -> None:
    """Fork the ranks of each scenario (a JSON list of environments a line) and print their answers."""

    import forge_parallel.start  # noqa: F401

    for line in sys.stdin:
        ranks = []
        for environ in json.loads(line):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.environ.update(environ)
                answer = json.dumps(rank_main(), default=str).encode()
                os.write(write, answer)
                os._exit(0)
            os.close(write)
            ranks.append((pid, read))
        answers = []
        for pid, read in ranks:
            with os.fdopen(read) as file:
                answers.append(json.loads(file.read() or "null"))
            os.waitpid(pid, 0)
        print(json.dumps(answers), flush=True)


# --- the side of the tests ------------------------------------------------------------------------


def assert_start_error(answer: dict, key: str, value: Any, code: str) -> str:
    """Assert the problem of a rank's StartError; returns the text of the error."""
    problems = [Problem(**problem) for problem in answer["problems"]]
    assert_problem(ProblemError(problems), key, value, code)
    return answer["error"]


class Ranks:
    def __init__(self) -> None:
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("GLOO_")
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ | {"OMP_NUM_THREADS": "1"},
        )

    def __call__(self, environs: list[dict[str, str]]) -> list[dict]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(environs) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def start() -> Iterator[Ranks]:
    """`start(environments)`: fork a rank for each and return what each saw."""
    ranks = Ranks()
    yield ranks
    ranks.process.send_signal(signal.SIGKILL)
    ranks.process.communicate()


pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]


@pytest.mark.slow
def test_four_ranks_meet_compute_leave_and_meet_again(start):
    answers = start(plain(4, free_port()))
    expected = {"sums": [10.0, 10.0], "left": False, "running": False}
    for answer in answers:
        interface = answer.pop("interface")
        assert answer == expected
        assert interface in ("lo", "lo0")  # one host: gloo needs no name of it


@pytest.mark.slow
def test_one_rank_needs_no_port(start):
    (answer,) = start([{}])
    assert answer["sums"] == [1.0, 1.0]


@pytest.mark.slow
def test_the_users_gloo_interface_is_kept(start):
    names = {name for _, name in socket.if_nameindex()}
    chosen = "lo" if "lo" in names else "lo0"
    answers = start(plain(2, free_port(), GLOO_SOCKET_IFNAME=chosen))
    assert [answer["left"] for answer in answers] == [True, True]


@pytest.mark.slow
def test_a_rank_that_comes_late_is_waited_for(start):
    environs = plain(2, free_port())
    environs[0]["LATE"] = "0.5"  # also the host of the store may be late
    assert [answer["sums"] for answer in start(environs)] == [[3.0, 3.0]] * 2


@pytest.mark.slow
def test_a_missing_rank_is_named_by_all_that_came(start):
    answers = start(plain(4, free_port(), TIMEOUT=str(TIMEOUT))[:2])
    for rank, answer in enumerate(answers):
        assert answer["error"].startswith(f"rank {rank} of 4 on host {socket.gethostname()}, ")
        assert_start_error(answer, "ranks", [2, 3], "absent")
        assert answer["seconds"] < 10
        assert answer["shared"]  # F105: one of them may print it


@pytest.mark.slow
def test_a_missing_rank_0_is_a_failed_connection_to_its_address(start):
    port = free_port()
    (answer,) = start(plain(2, port, TIMEOUT=str(TIMEOUT))[1:])
    text = assert_start_error(answer, "MASTER_ADDR", f"127.0.0.1:{port}", "unreachable")
    assert os.strerror(errno.ECONNREFUSED) in text
    assert TIMEOUT <= answer["seconds"] < 10


@pytest.mark.slow
def test_an_unknown_host_is_named(start):
    environs = plain(2, free_port(), MASTER_ADDR="nowhere.invalid", TIMEOUT=str(TIMEOUT))
    (answer,) = start(environs[1:])
    port = environs[1]["MASTER_PORT"]
    assert_start_error(answer, "MASTER_ADDR", f"nowhere.invalid:{port}", "unknown")


@pytest.mark.slow
def test_a_taken_port_is_named_at_once(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (answer,) = start(plain(2, port)[:1])
    assert os.strerror(errno.EADDRINUSE) in assert_start_error(answer, "MASTER_PORT", port, "taken")
    assert answer["seconds"] < 5


@pytest.mark.slow
def test_F104_a_port_that_answers_nothing_is_not_rank_0s(start):
    """torch's own client would wait for ever, and start_timeout is for ranks that come late."""
    environs = plain(2, free_port(), ANSWER="0.5", TIMEOUT="60")
    environs[0]["MUTE"] = "yes"
    answer = start(environs)[1]
    assert "0.5 s" in assert_start_error(
        answer, "MASTER_PORT", int(environs[1]["MASTER_PORT"]), "silent"
    )


@pytest.fixture
def strangers_store():
    """A store that no rank opened, as another job's or torchrun's; the ranks come to its port."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_F104_a_store_where_rank_0_does_not_check_in_is_not_its_own(start, strangers_store):
    """Rank 0 is gone: another job's store held its port."""
    port = strangers_store.port
    (answer,) = start(plain(2, port, ANSWER="0.5", TIMEOUT="60")[1:])
    assert "0.5 s" in assert_start_error(answer, "MASTER_PORT", port, "foreign")


TAKEN = {"here/1": "1", "rank/1": "{}", "verdict": '{"error": "", "rank_0": null}'}


@pytest.mark.slow
def test_F104_keys_bear_the_name_of_the_run(start, strangers_store):
    """What others wrote, of another run or by hand, is not read as this one's."""
    for key, value in TAKEN.items():
        for run in ("", "/", "/other"):
            strangers_store.set(f"forge{run}/0/1/{key}", value)
    common = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "FORGE_RUN_NAME": "description",
        "TIMEOUT": "5",
    }
    answers = start(plain(2, strangers_store.port, **common))
    assert [answer.get("sums", answer) for answer in answers] == [[3.0, 3.0]] * 2


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_F104_two_silent_ranks_of_one_number_end_the_start_for_all(start, strangers_store):
    for key, value in TAKEN.items():
        if key != "rank/1":
            strangers_store.set(
                f"forge//0/1/{key}", value
            )  # of ranks by hand: a run without a name
    environs = plain(2, strangers_store.port, ANSWER="0.5", TIMEOUT="60")
    for answer in start([e | {"TORCHELASTIC_USE_AGENT_STORE": "True"} for e in environs]):
        assert_start_error(answer, "rank", 1, "undescribed")


def test_F104_what_no_rank_wrote_is_not_read(start, strangers_store):
    """In place of a rank's words and of the verdict; the ranks write over it."""
    for key in ("rank/1", "verdict"):
        strangers_store.set(f"forge//0/1/{key}", TAKEN[key])
    environs = plain(2, strangers_store.port, TIMEOUT="60")
    answers = start([e | {"TORCHELASTIC_USE_AGENT_STORE": "True"} for e in environs])
    assert [answer.get("sums", answer) for answer in answers] == [[3.0, 3.0]] * 2


@pytest.mark.slow
def test_a_master_address_of_another_host_is_found_by_rank_0(start):
    environs = plain(2, free_port(), TIMEOUT=str(TIMEOUT), MASTER_ADDR="0.0.0.1")
    (answer,) = start(environs[:1])
    port = environs[0]["MASTER_PORT"]
    assert_start_error(answer, "MASTER_ADDR", f"0.0.0.1:{port}", "unreachable")


@pytest.mark.parametrize(
    ("name", "key", "value"), [("CONFIG", "config", "other"), ("TORCH_SAYS", "torch", "2.11.0")]
)
def test_facts_that_differ_are_named_on_every_rank(start, name, key, value):
    environs = plain(3, free_port())
    environs[2][name] = value
    for answer in start(environs):
        assert socket.gethostname() in assert_start_error(answer, key, value, "differs")


def test_a_rank_of_a_larger_world_raises(start):
    environs = plain(2, free_port())
    environs.append({**environs[1], "RANK": "2", "WORLD_SIZE": "3"})
    *fine, stranger = start(environs)
    assert_start_error(stranger, "WORLD_SIZE", 3, "mismatch")
    assert [answer["sums"] for answer in fine] == [[3.0, 3.0]] * 2


def test_two_processes_with_one_rank_raise(start):
    environs = plain(2, free_port(), TIMEOUT=str(TIMEOUT))
    environs.append(dict(environs[1]))
    raised = [answer for answer in start(environs) if answer.get("problems")]
    second = next(a for a in raised if [p["code"] for p in a["problems"]] == ["duplicate"])
    assert_start_error(second, "rank", 1, "duplicate")


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Names of two network namespaces joined by a cable: 10.99.0.1 and 10.99.0.2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two network namespaces need root and iproute2")
    names = [f"forge{os.getpid()}{end}" for end in "ab"]
    cables = [f"fg{os.getpid()}{end}" for end in "ab"]

    def ip(*descriptions: str) -> None:
        done = subprocess.run(["ip", *descriptions], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"network namespaces are not allowed here: {done.stderr.strip()}")

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (name, cable) in enumerate(zip(names, cables), 1):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.lane("quick")
def test_two_hosts_whose_names_mean_nothing_to_each_other_meet(start, two_hosts):
    """gloo would send the others this host's name's address: 127.0.0.1 or one of another network."""
    environs = plain(4, 29500, MASTER_ADDR="10.99.0.1", LOCAL_WORLD_SIZE="2")
    for rank, environ in enumerate(environs):
        environ |= {"NETNS": two_hosts[rank // 2], "LOCAL_RANK": str(rank % 2)}
    answers = start(environs)
    assert [answer.get("sums", answer) for answer in answers] == [[10.0, 10.0]] * 4


def test_a_group_that_runs_already_is_rejected():
    import torch.distributed as dist

    from forge_parallel.start import StartError, World, end_process_group, start_process_group

    assert not dist.is_initialized()
    start_process_group(World(), "cpu")
    try:
        with rejects("process group", ..., "running", StartError):
            start_process_group(World(), "cpu")
    finally:
        end_process_group()
    assert not dist.is_initialized()


def test_a_group_of_another_owner_is_not_ended():
    import torch.distributed as dist

    from forge_parallel.start import end_process_group

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        end_process_group()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_torchrun_workers_form_a_group(tmp_path: Path) -> None:
    torchrun = shutil.which("torchrun", path=Path(sys.executable).parent)
    if torchrun is None:
        pytest.skip("torchrun is not next to this Python")
    script = tmp_path / "script.py"
    script.write_text(ALL_REDUCE)
    done = subprocess.run(
        [torchrun, "--nproc-per-node=2", script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["torchrun 0/2 3.0", "torchrun 1/2 3.0"]


if __name__ == "__main__":
    serve()


@pytest.mark.slow
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
