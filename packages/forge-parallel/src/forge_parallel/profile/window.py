"""Windows of torch.profiler by step, and the files that they write."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forge_parallel._shared.problems import Problem, raise_problems
from forge_parallel._torch_compat import start_memory_history, stop_memory_history
from forge_parallel.profile.breakdown import breakdown, markdown, read_trace
from forge_parallel.profile.memory import gradient_addresses, memory_by_category, peak_of_trace

_WARM_UP = 1  # the first profiled step bears the start of the profiler, so it is not counted


class ProfileWindow:
    """Profile `num_steps` steps from `start_step` on, and again every `every_steps` steps.

        window = ProfileWindow("runs/a/profile", start_step=10, num_steps=3, memory=True)
        for step in range(1, 101):
            with window.step(step):
                loss(model(next(batches))).backward()
                optimizer.step()
                window.measure(model, optimizer)
                optimizer.zero_grad()
            window.write()

    folder        gets `step-N/rank-R.trace.json.gz` (a Chrome trace), `rank-R.json` (see `breakdown`) and `rank-R.md`,
                  N the window's first step; with `memory` on CUDA `rank-R.memory.pickle`, for pytorch.org/memory_viz
    num_steps     0: never
    every_steps   from the first step of a window to that of the next; 0: one window
    memory        also record allocations, and what `measure` finds, in the last step of a window

    The profiler starts one step before the window; that step is not counted. A window is left out if its warm-up step
    was not run here, after a resume in it, or if one of its steps raises. No communication between ranks. The device is
    synchronized twice per window, and never outside.

    Raises ValueError for numbers without meaning; `write` raises OSError.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        start_step: int,
        num_steps: int,
        every_steps: int = 0,
        rank: int = 0,
        device: torch.device | str = "cpu",
        memory: bool = False,
    ) -> None:
        raise_problems("", window_problems(start_step, num_steps, every_steps))
        self._folder, self._rank, self._memory = Path(folder), rank, memory
        self._start, self._num, self._every = start_step, num_steps, every_steps
        self._device = torch.device(device)
        self._history = memory and self._device.type == "cuda"
        self._first = self._number = 0
        self._profiler: Any = None
        self._full = False
        self._measured: dict[str, int] = {}
        self._gradients: set[int] = set()

    @property
    def is_full(self) -> bool:
        """Whether a window is complete and not yet written by `write`."""
        return self._full

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run the code inside the `with` block as step `number`."""
        if self._profiler is None:
            self._begin(number)
        if self._profiler is None or self._full:
            yield
            return
        self._number = number
        try:
            yield
            self._end(number)
        except BaseException:
            self.close()
            raise

    def measure(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Count bytes by category in the last step of a window with `memory`; do nothing elsewhere."""
        if self._memory and self._profiler is not None and self._is_last(self._number):
            self._measured = memory_by_category(model, optimizer, self._device.type)
            self._gradients = gradient_addresses(model)

    def write(self) -> dict[str, Any] | None:
        """Write the files of a complete window and return its `breakdown`; return None without one.

        Costs seconds of the host for a large trace. Overwrites the files of an earlier window at the same step.
        """
        if not self._full:
            return None
        profiler, self._profiler, self._full = self._profiler, None, False
        folder = self._folder / f"step-{self._first}"
        name = folder / f"rank-{self._rank}"
        trace = Path(f"{name}.trace.json.gz")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            try:
                events = read_trace(trace)
            except ValueError as error:
                # torch writes it to a temporary file first, and ignores a full disk
                message = f"{trace} is incomplete; make room in the folder for temporary files"
                raise OSError(message) from error

            found = {"step": self._first, "rank": self._rank, **breakdown(events)}
            if self._memory:
                peak = peak_of_trace(events, self._device.type, self._gradients)
                found["memory"] = {**self._measured, **peak}
            Path(f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
            title = f"# Step {self._first}, rank {self._rank}\n\n"
            Path(f"{name}.md").write_text(title + markdown(found))
            if self._history:
                stop_memory_history(f"{name}.memory.pickle")
        finally:
            self.close()
        return found

    def close(self) -> None:
        """Stop a running profiler without writing files."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None and not self._full:
            profiler.stop()
        if self._history and self._first:
            stop_memory_history(None)
        self._first, self._full = 0, False

    def _is_last(self, number: int) -> bool:
        return number == self._first + self._num - 1

    def _begin(self, number: int) -> None:
        """Start the profiler if `number` is the warm-up step before a window."""
        first = number + _WARM_UP
        passed = first - self._start
        if not self._num or passed < 0 or (passed % self._every if self._every else passed):
            return
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)

        self._measured, self._gradients = {}, set()
        self._first = first
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=_WARM_UP, active=self._num, repeat=1),
            profile_memory=self._memory,
        )
        if self._history:
            start_memory_history()
        self._profiler.start()

    def _end(self, number: int) -> None:
        """Synchronize where a window begins or ends, and advance or stop the profiler."""
        last = self._is_last(number)
        # kernels of a step must end in it
        if self._device.type == "cuda" and (last or number == self._first - 1):
            torch.cuda.synchronize(self._device)
        if last:
            self._profiler.stop()
            self._full = True
        else:
            self._profiler.step()


def window_problems(start_step: int, num_steps: int, every_steps: int) -> list[Problem]:
    """Problems of the numbers of a `ProfileWindow`."""
    problems = []
    if start_step <= _WARM_UP:
        rule = f"must be {_WARM_UP + 1} or more, as the profiler warms up in the step before"
        problems.append(Problem("start_step", "range", start_step, rule, "use 10"))
    if num_steps < 0:
        rule = "must be 0 (never) or more"
        problems.append(Problem("num_steps", "range", num_steps, rule, "use 3"))
    if every_steps < 0 or 0 < every_steps <= num_steps:
        rule = f"must be 0 (one window) or above num_steps {num_steps}, as each window has a step of warm-up before it"
        fix = f"use {max(num_steps, 0) + 1} or more"
        problems.append(Problem("every_steps", "range", every_steps, rule, fix))
    return problems
