"""Host waits by phase and the calls of each step, recorded inside a rank on a null GPU.

A wait is a call in which the host waits for the device (shim/null_gpu_waits.py). It belongs to the innermost function
of Forge on the stack, and to the part of the trainer that called it.
"""

from __future__ import annotations

import atexit
import json
from collections import Counter
from pathlib import Path
from types import FrameType

import null_gpu_waits
from tests.null_gpu.device import counted

#: Functions of the runner that are a phase; the innermost one on the stack counts.
PHASES = {
    "Trainer.train_step": "step",
    "Run.send_row": "row",
    "Guard.check": "row",
    "Trainer._begin_row": "row",
    "Evaluator.__call__": "evaluation",
    "Trainer._save": "save",
    "Profile._write": "profile",
    "Health.after_step": "probe",
    "Replicas.before_forward": "comparison",
    "Replicas.after_step": "comparison",
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
        null_gpu_waits.on_wait(self._wait)
        self._count_steps()
        atexit.register(self.write)

    def write(self) -> None:
        waits = [[*key, times] for key, times in sorted(self.waits.items())]
        self.path.write_text(json.dumps({"waits": waits, "steps": self.steps}))

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
        frames = [frame for frame in null_gpu_waits.stack() if frame.f_code.co_filename != __file__]
        self.waits[_phase(frames), self.step, _function(frames)] += 1


def _phase(frames: list[FrameType]) -> str:
    ours = [f.f_code.co_qualname for f in frames if _OURS in f.f_code.co_filename]
    phases = (PHASES[name] for name in ours if name in PHASES)
    in_thread = any(frame.f_code.co_qualname == _THREAD for frame in frames)
    return next(phases, "background" if in_thread else "other")


def _function(frames: list[FrameType]) -> str:
    """`module:function` of the innermost frame of Forge, of torch where there is none."""
    frame = next((f for f in frames if _OURS in f.f_code.co_filename), frames[0])
    return f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_qualname.replace('<locals>.', '')}"
