"""[profile]: windows of torch.profiler, written between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from forge_parallel.profile import ProfileWindow
from forge_train._shared.problems import Problem
from forge_train.config.schema import JobConfig
from forge_train.run.extension import Extension
from forge_train.run.run import Run


class Profile(Extension):
    """Profiles the steps of each window, and writes it after the window's last step."""

    @classmethod
    def of(cls, config: JobConfig, model: nn.Module) -> Profile | None:
        return cls() if config.profile.num_steps else None

    def problems(self, config: JobConfig, world_size: int, total_steps: int) -> Iterable[Problem]:
        found = config.profile.run_problems(world_size, total_steps)
        return (problem.under("profile") for problem in found)

    @contextlib.contextmanager
    def around_run(self, run: Run) -> Iterator[None]:
        config, rank = run.job.config.profile, run.meshes.rank
        self._run = run
        self._window = ProfileWindow(
            run.folder.profile,
            start_step=config.start_step,
            num_steps=config.num_steps if rank in config.ranks else 0,
            every_steps=config.every_steps,
            rank=rank,
            device=run.device,
            memory=config.memory,
        )
        try:
            yield
        finally:
            self._window.close()

    @contextlib.contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        with self._window.step(step):
            yield
        if self._window.is_full:
            self._write(step)

    def after_update(self, step: int, bad: Tensor) -> None:
        self._window.measure(self._run.model, self._run.optimizer)

    def _write(self, step: int) -> None:
        """Write the window that ended with this step. A disk that refuses costs the profile, not the run."""
        with self._run.phase("profile") as pause:
            try:
                self._window.write()
                outcome = {}
            except OSError as error:
                outcome = {"error": str(error)}
        seconds, rank = pause.seconds, self._run.meshes.rank
        self._run.recorder.record("profile", step=step, rank=rank, seconds=seconds, **outcome)
