"""`forge-train run` as ranks of a real `srun`, on a Slurm of our own that starts with the first life.

Nothing is left out here: the ranks are children of slurmstepd and import all that they need, so a life costs a start.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.slurm.cluster import Slurm, running_cluster

from forge_resilience.chaos import CommandLife

_RANK = re.compile(rb"\0SLURM_PROCID=(\d+)")
_FIRST = re.compile(r"^srun: error: .*: tasks? [-0-9,]+: Exited with exit code (\d+)$", re.MULTILINE)  # prose: srun's words  # fmt: skip


@cache
def cluster() -> Slurm:
    """The Slurm of this process; it ends with it."""
    stack = contextlib.ExitStack()
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="forge-chaos-slurm-"))
    atexit.register(stack.close)
    return stack.enter_context(running_cluster(Path(folder)))


class SrunLife:
    """A step of one rank on each of `nproc` nodes, in an allocation that ends with its srun."""

    def __init__(
        self, args: Sequence[str | Path], environ: Mapping[str, str], output: Path, nproc: int
    ) -> None:
        self._slurm, self._name = cluster(), secrets.token_hex(8)
        self._output, self._output_from = output, output.stat().st_size if output.exists() else 0
        srun = ["srun", "--input=none", f"--job-name={self._name}", f"--nodes={nproc}", f"--ntasks={nproc}",
                "--ntasks-per-node=1", "--kill-on-bad-exit=1"]  # fmt: skip
        command = [*srun, sys.executable, "-m", "forge_train", *map(str, args)]
        self._life = CommandLife(command, {**self._slurm.environ, **environ}, output)
        self.pid = self._life.pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The code that our batch script makes of srun's: of the rank that left first, not of those killed behind it."""
        if self._code is None and (code := self._life.poll()) is not None:
            if code < 0:  # a batch script ends when its srun was killed, and the job with it
                self._slurm.run("scancel", f"--name={self._name}")
            self._code = code if code < 128 else self._code_of_the_first(code)
        return self._code

    def ranks(self) -> dict[int, int]:
        """Rank -> pid."""
        found: dict[int, int] = {}
        for pid in sorted(self._life.living()):
            with contextlib.suppress(OSError):  # it is gone
                rank = _RANK.search(Path(f"/proc/{pid}/environ").read_bytes())
                if rank is not None:
                    found.setdefault(int(rank[1]), pid)
        return found

    def living(self) -> list[int]:
        """All of the life but srun itself. Not those of its session: ranks are children of slurmstepd."""
        return self._life.living()

    def _code_of_the_first(self, code: int) -> int:
        written = self._output.read_bytes()[self._output_from :].decode(errors="replace")
        found = _FIRST.search(written)
        return int(found[1]) if found else code
