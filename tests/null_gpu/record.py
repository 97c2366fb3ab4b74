"""Host waits by phase and the calls of each step, recorded inside a rank on a null GPU.

A wait is a call in which the host waits for the device: an operation of torch of which its synchronization debug mode
warns, or `synchronize` of a device, a stream or an event. It belongs to the innermost function of Forge on the
stack, and to the part of the trainer that called it.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tests.null_gpu.device import counted

#: Functions of the runner that are a phase; the innermost one on the stack counts.
PHASES = {
    "Trainer.train_step": "step",
    "Trainer._send_row": "row",
    "Trainer._check_numerics": "row",
    "MetricRows.begin": "row",
    "Trainer._evaluate": "evaluation",
    "Trainer._save_step": "save",
    "Trainer._write_profile": "profile",
    "HealthPolicy.after_step": "probe",
    "ReplicaPolicy.before_forward": "comparison",
    "ReplicaPolicy.seal": "comparison",
}
_OURS = "/src/forge_"
_THREAD = "Thread._bootstrap"


class Recorder:
    """What happens in one rank from `install` to the end of its process, written as JSON to `path`:
    `waits`, lists of phase, step, function and times; `steps`, what `counted` has more of after each step."""

    def __init__(self, path: Path) -> None:
        self.path, self.step = path, 0
        self.waits: Counter[tuple[str, int, str]] = Counter()
        self.steps: dict[int, Counter[str]] = {}

    def install(self) -> None:
        """Record from now on; the device must not have been used before."""
        self._watch_operations()
        torch.Event = type("Event", (torch.Event,), {})  # a built-in type takes no other method
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream, torch.Event):
            self._watch_call(owner, "synchronize")
        self._count_steps()
        atexit.register(self.write)

    def write(self) -> None:
        waits = [[*key, times] for key, times in sorted(self.waits.items())]
        self.path.write_text(json.dumps({"waits": waits, "steps": self.steps}))

    def _watch_operations(self) -> None:
        for text in ("called a synchronizing CUDA operation", "Synchronization debug mode"):
            warnings.filterwarnings("always", message=f".*{text}")
        show = warnings.showwarning

        def record_or_show(message: Any, *rest: Any, **more: Any) -> None:
            if "called a synchronizing CUDA operation" in str(message):
                self._wait()
            elif "Synchronization debug mode" not in str(message):
                show(message, *rest, **more)

        warnings.showwarning = record_or_show
        torch.cuda.set_sync_debug_mode("warn")
        torch._C._set_warnAlways(True)  # else each place warns once

    def _watch_call(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def recorded(*args: Any, **keywords: Any) -> Any:
            self._wait()
            return call(*args, **keywords)

        setattr(owner, name, recorded)

    def _count_steps(self) -> None:
        from forge_train import Trainer

        train_step = Trainer.train_step

        def counted_step(trainer: Trainer) -> None:
            self.step = trainer.progress.step + 1
            before = counted()
            train_step(trainer)
            self.steps[self.step] = counted() - before

        Trainer.train_step = counted_step  # type: ignore[method-assign]

    def _wait(self) -> None:
        frames = [frame for frame in _stack() if frame.f_code.co_filename != __file__]
        self.waits[_phase(frames), self.step, _function(frames)] += 1


def _stack() -> Iterator[FrameType]:
    """Frames from the inside; behind those of a thread of autograd, those of the thread that waits for it."""
    frame: FrameType | None = sys._getframe()
    names = set()
    while frame is not None:
        yield frame
        names.add(frame.f_code.co_qualname)
        frame = frame.f_back
    main = threading.main_thread()
    if threading.current_thread() is not main and _THREAD not in names:
        frame = sys._current_frames().get(main.ident or 0)
        while frame is not None:
            yield frame
            frame = frame.f_back


def _phase(frames: list[FrameType]) -> str:
    ours = [f.f_code.co_qualname for f in frames if _OURS in f.f_code.co_filename]
    phases = (PHASES[name] for name in ours if name in PHASES)
    in_thread = any(frame.f_code.co_qualname == _THREAD for frame in frames)
    return next(phases, "background" if in_thread else "other")


def _function(frames: list[FrameType]) -> str:
    """`module:function` of the innermost frame of Forge, of torch where there is none."""
    frame = next((f for f in frames if _OURS in f.f_code.co_filename), frames[0])
    return f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_qualname.replace('<locals>.', '')}"
