"""A process that has imported what a command line needs, and forks a child for each command.

A command then costs milliseconds where a new interpreter costs seconds, and runs under limits of its
own: memory, processor seconds, open files. The server runs nothing of torch before it forks.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_MORE_BYTES = 2 * 2**30
_CPU_SECONDS = 20


class Called(NamedTuple):
    """`code` is that of the process, negative for a signal; `opened` counts files opened by Python."""

    code: int
    out: str
    err: str
    opened: int


class WarmProcess:
    """`WarmProcess("forge_train.cli").call("forge_train.cli:main", ["--help"], folder=tmp_path)`.

    `modules` are imported first; of one that is `module:function`, the function is called, too. `environ` is added to
    the environment of that process.
    """

    def __init__(self, *modules: str, environ: Mapping[str, str] | None = None) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "forge_testing.warm", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path),
                **dict.fromkeys(("OMP_NUM_THREADS", "NO_COLOR"), "1"),
                "COLUMNS": "200",
                **(environ or {}),
            },
        )
        atexit.register(self.close)

    def call(
        self,
        function: str,
        *args: Any,
        folder: Path,
        environ: Mapping[str, str] | None = None,
        limited: bool = True,
    ) -> Called:
        """`module:function(*args)` in a child with `folder` as its working directory; `args` are JSON.

        `environ` replaces the environment; `limited` bounds its memory and processor seconds.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        request = {
            "function": function,
            "args": args,
            "folder": str(folder),
            "environ": environ and dict(environ),
            "limited": limited,
            "test": os.environ.get("PYTEST_CURRENT_TEST", ""),
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return Called(*json.loads(self._server.stdout.readline()))

    def close(self) -> None:
        # a process that a test forked and left may hold the pipe: the server would never see its end
        self._server.kill()
        self._server.wait()


def main(modules: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in modules:
        module, _, attr = name.partition(":")
        found = importlib.import_module(module)
        if attr:
            getattr(found, attr)()
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_call(request)) + "\n")
        answers.flush()


def _call(request: dict[str, Any]) -> tuple[int, str, str, int]:
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder) / name for name in ("stdout", "stderr", "opened")]
        pid = os.fork()
        if pid == 0:
            _child(request, names)
        _, status = os.waitpid(pid, 0)
        texts = [name.read_text(errors="replace") if name.exists() else "" for name in names]
    return os.waitstatus_to_exitcode(status), texts[0], texts[1], int(texts[2] or 0)


def end_of(work: Callable[[], object]) -> int:
    """Call `work`, and return the code with which a process of it would end; its traceback is printed."""
    try:
        work()
        return 0
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()


def _child(request: dict[str, Any], names: list[Path]) -> None:
    opened = 0

    def work() -> None:
        for number, name in zip((1, 2), names, strict=False):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        os.chdir(request["folder"])
        if request["environ"] is not None:
            os.environ.clear()
            os.environ.update(request["environ"])
        os.environ["PYTEST_CURRENT_TEST"] = request["test"]
        if request["args"] and isinstance(request["args"][0], list):  # a command line
            sys.argv[1:] = request["args"][0]
        if request["limited"]:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + _MORE_BYTES, used + _MORE_BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))

        def count(event: str, _: Any) -> None:
            nonlocal opened
            opened += event == "open"

        module, _, attr = request["function"].partition(":")
        function = getattr(importlib.import_module(module), attr)
        sys.addaudithook(count)
        function(*request["args"])

    code = end_of(work)
    names[2].write_text(str(opened))
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
