"""What is changed inside a rank before it begins: a point at which it dies, a limit, a data loader that takes time."""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_MATRIX = Path(__file__).parents[2] / "packages/forge-ckpt/tests/fault_matrix.py"
_DATA_SECONDS = 0.003


@cache
def fault_matrix() -> ModuleType:
    """The named points of forge-ckpt's own tests."""
    spec = importlib.util.spec_from_file_location("fault_matrix", _MATRIX)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def slow_data(rank: int) -> None:
    """The phase `data` takes 3 ms, so that it can be met."""
    from forge_data import Loader

    real = Loader.__next__

    def next_batch(self: Any) -> Any:
        time.sleep(_DATA_SECONDS)
        return real(self)

    Loader.__next__ = next_batch  # type: ignore[method-assign]


def dies_at(point: str, victim: int, marker: Path) -> Callable[[int], None]:
    """Rank `victim` kills itself at a point of the matrix (rank 0 where only it comes there), and says so before."""
    matrix = fault_matrix()
    how, owner, name, ranks = matrix.POINTS[point]
    victim = victim % len(ranks)

    def die(*_args: Any, **_kwargs: Any) -> None:
        marker.write_text(f"{victim} {point}")
        os.kill(os.getpid(), signal.SIGKILL)

    def plant(rank: int) -> None:
        slow_data(rank)
        if rank == victim:
            matrix.die = die
            matrix.before.__globals__["die"] = die
            how(owner, name)

    return plant


def exits(victim: int, after: int, marker: Path) -> Callable[[int], None]:
    """`sys.exit(0)` in one rank after so many of its steps, as a stray script would."""

    def plant(rank: int) -> None:
        from forge_train.run.extension import Extensions

        slow_data(rank)
        real, left = Extensions.call, [after]

        def call(self: Any, hook: str, *args: Any) -> None:
            real(self, hook, *args)
            left[0] -= hook == "after_step"
            if left[0] == 0:
                marker.write_text(f"{victim} exit")
                sys.exit(0)

        if rank == victim:
            Extensions.call = call  # type: ignore[method-assign]

    return plant


def limited(size: int, victim: int, marker: Path) -> Callable[[int], None]:
    """Rank `victim` may write no file beyond `size` bytes: a full quota."""

    def plant(rank: int) -> None:
        slow_data(rank)
        if rank == victim:
            marker.write_text(f"{victim} limit")
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return plant


def output(path: str | None) -> Callable[[int], None]:
    """stdout and stderr closed, or onto a file such as /dev/full."""

    def plant(rank: int) -> None:
        slow_data(rank)
        for number, name in ((1, "stdout"), (2, "stderr")):
            if path is None:
                os.close(number)
                setattr(sys, name, None)  # as Python finds it when it starts
                setattr(sys, f"__{name}__", None)
            else:
                os.dup2(os.open(path, os.O_WRONLY), number)

    return plant


POISONED = range(12 * 13, 12 * 15)
"""Instances of two batches that make the loss of one rank nan."""


def poison(rank: int) -> None:
    """Whichever step reads the poisoned instances has a loss that is nan, on the last rank alone."""
    import torch.distributed as dist

    from forge_parallel.compute import Compute

    slow_data(rank)
    real = Compute.gradients

    def gradients(self: Any, batch: Any, normaliser: Any) -> Any:
        share = real(self, batch, normaliser)
        bad = {*batch.instance_ids.tolist()} & {*POISONED}
        victim = rank == dist.get_world_size() - 1
        return share * float("nan") if bad and victim else share

    Compute.gradients = gradients  # type: ignore[method-assign]


# ---- mistakes that a campaign must find; made in this process, so in all lives to come


def _votes_before_it_has_written() -> None:
    """Rank 1 says that its file is on disk 0.2 s before its second half is."""
    import forge_ckpt.write.writer

    writer: Any = forge_ckpt.write.writer.ForgeWriter
    real = writer.write_layout

    def write_layout(self: Any, layout: Any, staged: Any = None) -> Any:
        results = real(self, layout, staged)
        path = Path(self._temporary) / layout.file
        if path.name == "data-1.bin":
            data = path.read_bytes()
            file = os.open(path, os.O_WRONLY)
            os.truncate(path, len(data) // 2)
            half = len(data) // 2
            threading.Timer(0.2, os.pwrite, (file, data[half:], half)).start()
        return results

    writer.write_layout = write_layout


def _resumes_one_step_off() -> None:
    from forge_data import Loader

    real = Loader.load_state_dict

    def load_state_dict(self: Any, state: Any) -> None:
        real(self, state)
        self._at = self._at._replace(cursor=self._at.cursor + self.global_batch)

    Loader.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _forgets_the_skipped_window() -> None:
    from forge_data import Loader

    real = Loader.load_state_dict

    def load_state_dict(self: Any, state: Any) -> None:
        real(self, state)
        self._ledger = type(self._ledger)(())

    Loader.load_state_dict = load_state_dict  # type: ignore[method-assign]


#: Mistake -> the suite that finds it, and how it is made.
MISTAKES: dict[str, tuple[str, Callable[[], None]]] = {
    "a rank votes before it has written": ("async", _votes_before_it_has_written),
    "a resume is one step off": ("wait", _resumes_one_step_off),
    "a resume forgets the skipped window": ("numerics", _forgets_the_skipped_window),
}
