"""A fresh interpreter, torch imported and nothing run, that forks ranks on request.

Forking is safe here only: no thread of torch or OpenMP has started. Started as
`python -m forge_testing.zygote FD`; serves its end of a socket and ends when the other end closes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forge_testing.rank_process import serve

_MAX_RANKS = 64


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    _import_torch()
    children: set[int] = set()
    while (request := _receive(control)) is not None:
        message, descriptors = request
        if message["do"] == "fork":
            _import(message["path"], message["modules"])
            answer: list[Any] = _fork(control, message, descriptors)
            children |= set(answer)
        else:
            answer = _end(message["pids"], message["dead"], children)
        control.sendall(json.dumps(answer).encode() + b"\n")
    _end(list(children), [], children)
    shutil.rmtree(Path.cwd(), ignore_errors=True)
    os._exit(0)


def _import_torch() -> None:
    if sys.platform == "linux":  # gloo asks for the address of the host's name otherwise
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch._dynamo  # every optimizer imports it: a second in each rank
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor

    torch.set_num_threads(1)
    _keep()


def _import(path: list[str], modules: list[str]) -> None:
    """What the caller has imported, so that not every rank of every world does: seconds each."""
    sys.path[:] = path
    missing = [name for name in modules if name not in sys.modules]
    for name in missing:
        with contextlib.suppress(Exception):  # a rank that needs it raises where it does
            importlib.import_module(name)
    if missing:
        _keep()


def _keep() -> None:
    """What is here stays: ranks share these pages, and their collections are short."""
    gc.collect()
    gc.freeze()


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """A request and its descriptors; None once the caller is gone."""
    text, descriptors = b"", []
    while not text.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(control, 65536, _MAX_RANKS)
        if not part:
            return None
        text += part
        descriptors += more
    return json.loads(text), descriptors


def _fork(control: socket.socket, message: dict[str, Any], descriptors: list[int]) -> list[int]:
    parent, pids = os.getpid(), []
    for rank, descriptor in enumerate(descriptors):
        pid = os.fork()
        if pid == 0:
            control.close()
            for other in descriptors:  # a copy would hide the death of its rank from the caller
                if other != descriptor:
                    os.close(other)
            folder, device = Path(message["folder"]), message["device"]
            serve(Connection(descriptor), rank, len(descriptors), folder, parent, device)
        pids.append(pid)
    for descriptor in descriptors:
        os.close(descriptor)
    return pids


def _end(pids: list[int], dead: list[int], children: set[int]) -> list[int | None]:
    """Kill and collect. Ranks in `dead` have closed their link and are given a second to be gone."""
    codes: list[int | None] = []
    deadline = time.monotonic() + 1.0
    for pid in pids:
        if pid not in children:  # collected before
            codes.append(None)
            continue
        status = _poll(pid, deadline if pid in dead else 0.0)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        codes.append(None if status is None else os.waitstatus_to_exitcode(status))
        children.discard(pid)
    return codes


def _poll(pid: int, deadline: float) -> int | None:
    """The status of an ended child; None if it is running at the deadline."""
    while True:
        with contextlib.suppress(InterruptedError):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return status
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)  # polling a process


if __name__ == "__main__":
    main()
