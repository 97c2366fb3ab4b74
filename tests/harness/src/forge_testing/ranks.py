"""Call a function in every rank of a real process group, in processes that are reused.

The first call of a session starts one fresh interpreter, the zygote, which imports torch once and
then forks the ranks of each world size that is asked for (about 0.1 s). A pool whose call went well
serves the next call of its size; after a failure, and when the groups that calls left behind have become
many, it is killed and the next call forks another.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import multiprocessing.connection
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forge_testing.devices import NotOnThisDevice, chosen
from forge_testing.rank_process import RAISED, RETURNED, STACK_SIGNAL, Task
from forge_testing.references import SESSION

_START_SECONDS = 60.0
# Ranks that stand in a collective with one that failed would wait for ever: they get this long.
_GRACE_SECONDS = 1.0
# Each gloo group that a rank holds wakes a thread 100 times a second, used or not: groups of 50 layouts
# in 12 ranks took a third of two cores.
_MOST_THREADS = 500
_SIDE_BY_SIDE = 4
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_", "GROUP_")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# What ranks may be forked with where the caller has imported it: slow to import, and the same for all tests.
_SHARED = re.compile(r"(torch|transformers|forge_\w+)(\.|$)")

_lock = threading.Lock()
_zygote: _Zygote | None = None
_pools: dict[tuple[str, int], _Pool] = {}
_folder = ""  # of the tests that the pools serve


class RankError(RuntimeError):
    """A call did not return on every rank. `reports` holds a text per rank: its traceback, how it
    died, where it stood when the time was up, or that it returned."""

    def __init__(self, headline: str, reports: Mapping[int, str]) -> None:
        self.reports = dict(reports)
        parts = [f"--- rank {rank}: {text}" for rank, text in sorted(self.reports.items())]
        super().__init__("\n".join([headline, *parts]))


def run_on_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 240.0
) -> list[Any]:
    """`function(*args)` in each of `world` processes; their results, by rank.

        def total() -> float:
            tensor = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(tensor)
            return tensor.item()

        assert run_on_ranks(4, total) == [6.0] * 4

    Inside, torch.distributed's default group is that world (gloo, loopback, FileStore; after `choose("cuda")` NCCL,
    too, rank r on cuda:r, see `device`), torch has one thread, and seeds are 0 on every rank. `function` is a module-level function of a module with a
    file; a rank imports it from that file under its own module name, with the caller's `sys.path`.
    `args` and results are pickled; tensors of CUDA devices arrive on the CPU. What a function leaves behind in its process (patches, handlers,
    limits, groups) stays there for the next calls, until the ranks hold too many groups. stdout and stderr of a rank are shown only if the
    call fails.

    Raises RankError if a rank raises, dies, or has not returned `timeout` seconds after the call was sent;
    ValueError for a function that no other process can import; NotOnThisDevice, which skips a test, for more ranks
    than CUDA devices were chosen, and for a function that made nothing there.
    """
    if world < 1:
        raise ValueError(f"world {world} is below 1 rank; use 1, 2, 3 or 4")
    task = pickle.dumps(_describe(function, args))
    device, nproc = chosen()
    if nproc is not None and world > nproc:
        raise NotOnThisDevice(f"needs {world} GPUs, nproc is {nproc}")
    with _lock, _room_for(world):
        _end_pools_of_other_folders()
        _end_crowded_pools()
        pool = _pools.get((device, world)) or _fork(device, world)
        try:
            answers = pool.call(task, timeout)
        except BaseException:
            _pools.pop((device, world)).end()
            raise
    results, used = zip(*map(pickle.loads, answers), strict=True)
    if not any(used):
        raise NotOnThisDevice(f"{function.__qualname__} made nothing on device {device}")
    return list(results)


@contextlib.contextmanager
def _room_for(world: int) -> Iterator[None]:
    """Calls of few ranks run side by side in the workers of a test session, a call of many ranks by itself."""
    session = os.environ.get(SESSION)
    if session is None:
        yield
        return
    with open(os.path.join(session, "ranks.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if world <= _SIDE_BY_SIDE else fcntl.LOCK_EX)
        yield


def _end_pools_of_other_folders() -> None:
    """Ranks serve one folder of tests: groups that another left behind on some ranks alone would give
    new ones different names on different ranks, which then wait for each other."""
    global _folder
    folder = os.path.dirname(os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0])
    if folder != _folder:
        for key in list(_pools):
            _pools.pop(key).end()
        _folder = folder


def _end_crowded_pools() -> None:
    """On Linux; elsewhere nobody counts."""
    pids = [pid for pool in _pools.values() for pid in pool.pids]
    if sum(len(list(Path(f"/proc/{pid}/task").glob("*"))) for pid in pids) > _MOST_THREADS:
        for key in list(_pools):
            _pools.pop(key).end()


def _describe(function: Callable[..., Any], args: tuple[Any, ...]) -> Task:
    name = getattr(function, "__qualname__", repr(function))
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    if module is None or file is None or getattr(module, name, None) is not function:
        raise ValueError(
            f"{name} must be a function that other processes can import; use a `def` at module level"
        )
    if module.__name__ == "__main__":
        raise ValueError(
            f"{name} must not live in __main__, which a rank cannot import; move it to a module"
        )
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    return Task(
        list(sys.path), module.__name__, os.path.abspath(file), name, pickle.dumps(args), test
    )


class _Zygote:
    """The caller's end of the process that forks ranks. When the socket closes, however the caller
    ended, the zygote kills its ranks, removes its folder and leaves."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="forge-ranks-"))
        self._socket, theirs = socket.socketpair()
        environ = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
        with theirs, (self.folder / "zygote.log").open("wb") as log:
            self._process = subprocess.Popen(
                # -P: the current directory is not searched for modules
                [sys.executable, "-P", "-m", "forge_testing.zygote", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal is for the caller
                env={**environ, **_ONE_THREAD},
                cwd=self.folder,
            )
        atexit.register(self.close)

    def fork(self, device: str, world: int) -> tuple[Path, list[Connection], list[int]]:
        """New ranks: their folder, a link to each, their pids."""
        folder = Path(tempfile.mkdtemp(prefix=f"world-{world}-", dir=self.folder))
        pairs = [socket.socketpair() for _ in range(world)]
        shared = [name for name in list(sys.modules) if _SHARED.match(name)]
        request = {"do": "fork", "folder": str(folder), "path": sys.path, "modules": shared}
        request["device"] = device
        pids = self._ask(request, [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        return folder, [Connection(ours.detach()) for ours, _ in pairs], pids

    def end(self, pids: list[int], dead: list[int]) -> list[int | None]:
        """Kill ranks and collect them: the exit code of each (minus the signal), None if killed here.
        Of those in `dead` the end is awaited instead."""
        return self._ask({"do": "end", "pids": pids, "dead": dead})

    def _ask(self, request: dict[str, Any], descriptors: list[int] | None = None) -> list[Any]:
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], descriptors or [])
            answer = b""
            while not answer.endswith(b"\n"):
                answer += (part := self._socket.recv(65536))
                if not part:
                    raise EOFError
        except (OSError, EOFError):
            log = _tail(self.folder / "zygote.log")
            raise RankError(f"the fork of ranks ended:\n{log}", {}) from None
        found: list[Any] = json.loads(answer)
        return found

    def close(self) -> None:
        # seen by the zygote though a fork of this process may hold the socket
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._process.wait(timeout=60)


class _Pool:
    """The ranks of one world size on one kind of device."""

    def __init__(self, zygote: _Zygote, device: str, world: int) -> None:
        self._zygote = zygote
        self.folder, self.links, self.pids = zygote.fork(device, world)
        try:
            self._gather(_START_SECONDS, "start")
        except BaseException:
            self.end()
            raise

    def call(self, task: bytes, timeout: float) -> list[bytes]:
        for link in self.links:
            try:
                link.send_bytes(task)
            except OSError:  # it died since the last call: reading from it says so
                continue
        return self._gather(timeout, "return")

    def _gather(self, timeout: float, verb: str) -> list[bytes]:
        """One message of every rank. The first failure leaves the others a short grace."""
        deadline = time.monotonic() + timeout
        answers: dict[int, bytes] = {}
        waiting = dict(enumerate(self.links))
        failed: list[int] = []
        first = 0.0
        while waiting:
            ready = multiprocessing.connection.wait(
                list(waiting.values()), max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for rank in [rank for rank, link in waiting.items() if link in ready]:
                answers[rank] = _receive(waiting.pop(rank))
                if answers[rank][:1] != RETURNED:
                    failed.append(rank)
            if failed:  # the others get this long after the first, however many failed at once
                first = first or time.monotonic()
                deadline = min(deadline, first + _GRACE_SECONDS)
        if failed or waiting:
            in_time = "" if failed else f" within {timeout:g} s"
            culprits = failed or sorted(waiting)
            headline = f"{_ranks(culprits)} of {len(self.links)} did not {verb}{in_time}"
            raise RankError(headline, self._reports(answers, sorted(waiting)))
        return [answers[rank][1:] for rank in range(len(self.links))]

    def _reports(self, answers: Mapping[int, bytes], waiting: list[int]) -> dict[int, str]:
        self._dump_stacks(waiting)
        dead = [rank for rank, answer in answers.items() if not answer]
        codes = self._zygote.end(self.pids, [self.pids[rank] for rank in dead])
        reports = {}
        for rank in range(len(self.links)):
            answer = answers.get(rank, b"")
            if rank in waiting and codes[rank] is None:
                stack = (self.folder / f"rank-{rank}.stack").read_text(errors="replace")
                reports[rank] = f"still running, at\n{stack}{self._log(rank)}"
            elif not answer:
                reports[rank] = f"{_death(codes[rank])}{self._log(rank)}"
            elif answer[:1] == RAISED:
                reports[rank] = f"raised\n{answer[1:].decode()}{self._log(rank)}"
            else:
                reports[rank] = "returned"
        return reports

    def _dump_stacks(self, ranks: list[int]) -> None:
        """Have faulthandler write where each rank stands; done once no file grows any more."""
        for rank in ranks:
            os.kill(self.pids[rank], STACK_SIGNAL)
        files = [self.folder / f"rank-{rank}.stack" for rank in ranks]
        deadline, sizes = time.monotonic() + 3.0, [-1]
        while time.monotonic() < deadline:
            before, sizes = sizes, [file.stat().st_size for file in files]
            if sizes == before and all(sizes):
                break
            time.sleep(0.05)  # polling files

    def _log(self, rank: int) -> str:
        log = _tail(self.folder / f"rank-{rank}.log")
        return f"\noutput of rank {rank}:\n{log}" if log else ""

    def end(self) -> None:
        """Kill what is left; harmless a second time."""
        for link in self.links:
            link.close()
        self._zygote.end(self.pids, [])


def _fork(device: str, world: int) -> _Pool:
    global _zygote
    if _zygote is None:
        _zygote = _Zygote()
    _pools[device, world] = _Pool(_zygote, device, world)
    return _pools[device, world]


def _receive(link: Connection) -> bytes:
    """The message of a rank; empty if it is gone."""
    try:
        return link.recv_bytes()
    except (EOFError, OSError):
        return b""


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _death(code: int | None) -> str:
    if code is None:
        return "closed its link"
    return f"died by {signal.Signals(-code).name}" if code < 0 else f"left by exit code {code}"


def _tail(path: Path, size: int = 4000) -> str:
    try:
        return path.read_text(errors="replace")[-size:].strip()
    except OSError:
        return ""
