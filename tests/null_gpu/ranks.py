"""Commands of forge-train on null GPUs: each rank is a fork of a process that has imported what it needs."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.null_gpu.device import environment

from forge_testing.warm import WarmProcess

ROOT = Path(__file__).parents[2]
#: Ranks whose neighbour has failed are given so long to notice it.
_PATIENCE_SECONDS = 20.0
_IMPORTS = (
    "forge_train.cli",
    "forge_train.loop.trainer",
    "forge_train.report.summary",
    "forge_lab.text",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.pipelining",
    "tests.null_gpu.record",
)


class Ended(NamedTuple):
    """How a command ended: exit code of each rank, None where it had to be killed; what each printed; its record."""

    codes: list[int | None]
    texts: list[str]
    records: list[dict[str, Any]]

    @property
    def good(self) -> bool:
        return all(code == 0 for code in self.codes)


class NullRanks:
    """`NullRanks(folder).run(["run", "job.toml"], ranks=2)` runs `forge-train run job.toml` on two null GPUs.

    folder: caches of compilers that all commands share. A fork costs milliseconds where an interpreter costs seconds.
    """

    def __init__(self, folder: Path) -> None:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        self._own = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **caches}
        self._warm = WarmProcess(*_IMPORTS, environ=self._environment(1))

    def _environment(self, devices: int) -> dict[str, str]:
        found = self._own | environment(devices=devices)
        paths = [found.get("PYTHONPATH", ""), str(ROOT)]
        return found | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}

    def run(
        self,
        argv: list[str],
        *,
        folder: Path,
        ranks: int = 1,
        timeout: float = 600.0,
    ) -> Ended:
        """The command in `folder`, killed after `timeout` seconds."""
        request = {"argv": argv, "ranks": ranks, "timeout": timeout}
        told = self._warm.call(
            "tests.null_gpu.ranks:start",
            request,
            folder=folder,
            environ=self._environment(ranks),
            limited=False,
        )
        if told.code:
            raise RuntimeError(f"{argv} started no ranks: {told}")
        texts, records = [], []
        for rank in range(ranks):
            text, record = (folder / f"rank-{rank}.{end}" for end in ("txt", "json"))
            texts.append(text.read_text(errors="replace"))
            records.append(json.loads(record.read_text()) if record.exists() else {})
        return Ended(json.loads(told.out.splitlines()[-1]), texts, records)

    def close(self) -> None:
        self._warm.close()


def start(request: dict[str, Any]) -> None:
    """Fork the ranks of a request in this folder, wait for them, and print their exit codes as JSON.

    They are killed after the timeout, and with the process that asked for them.
    """
    number = request["ranks"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = {}
    for rank in range(number):
        (Path.cwd() / f"rank-{rank}.json").unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            _be(rank, number, port, request["argv"])
        pids[pid] = rank
    print(json.dumps(_wait(pids, request["timeout"])))


def _wait(pids: dict[int, int], timeout: float) -> list[int | None]:
    codes: list[int | None] = [None] * len(pids)
    deadline, parent = time.monotonic() + timeout, os.getppid()
    left = dict(pids)
    while left and time.monotonic() < deadline and os.getppid() == parent:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            code = codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
            if code:
                deadline = min(deadline, time.monotonic() + _PATIENCE_SECONDS)
        elif not pid:
            time.sleep(0.01)  # polling processes
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def _be(rank: int, number: int, port: int, argv: list[str]) -> None:
    """Be one rank: run the command with its output in a file, and end."""
    code = 1
    atexit._clear()  # of the process that this is a fork of: they would remove its files
    try:
        output = os.open(f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        if number > 1:
            given = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": number,
                "LOCAL_WORLD_SIZE": number,
            }
            given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in given.items()})
        from tests.null_gpu.record import Recorder

        from forge_train.cli import main

        recorder = Recorder(Path.cwd() / f"rank-{rank}.json")
        recorder.install()
        sys.argv[1:] = argv
        try:
            main(argv)
        finally:
            recorder.write()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
