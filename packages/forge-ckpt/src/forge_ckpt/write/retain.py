"""What a committed save makes outdated is removed, after the new checkpoint was read back."""

import logging
from collections.abc import Callable
from pathlib import Path

from forge_ckpt import directories, manifest
from forge_ckpt._shared.problems import Problem
from forge_ckpt.errors import CorruptCheckpoint
from forge_ckpt.files import Directory
from forge_ckpt.rank_group import RankGroup
from forge_ckpt.read.load import verify_checkpoint
from forge_ckpt.retention import Keep, outdated

logger = logging.getLogger("forge_ckpt")
Metrics = dict[str, float]
VISIBLE_SECONDS = 10.0  # that the names of a new step may take to be seen, on network file systems


class Retention:
    """Applies ``keep`` to the steps of ``root``. ``apply`` is collective, on the group that it is given."""

    def __init__(self, root: Path, keep: Keep) -> None:
        self._root, self._keep = root, keep
        self._metrics: dict[int, Metrics] = {}  # rank 0: of steps whose manifest was read

    def apply(
        self, group: RankGroup, step: int, threads: int, quarantine: Callable[[str], bool]
    ) -> None:
        """Remove the steps that ``keep`` drops, if any, now that ``step`` is the newest.

        Before, ``step`` is read back and compared: on a disk that loses writes without an error the old
        ones are the only sound checkpoints. If it is damaged it is quarantined, CorruptCheckpoint is
        raised and nothing is removed. If it cannot be found, OSError is raised.
        """
        try:
            old: list[int] = group.run_on_rank_0(lambda: self.outdated_by(step))
            if not old:
                return
            path = directories.step_directory(self._root, step)
            verify_checkpoint(group, path, step, threads, VISIBLE_SECONDS)
        except OSError as error:
            rule = f"step {step} was written, and cannot be read back: {error.strerror or error}"
            raise OSError(error.errno, f"{rule}; older checkpoints are kept") from error
        except CorruptCheckpoint as error:
            quarantine(str(error))
            rule = "was written a moment ago: disk or memory fail"
            new = Problem("step", "new", step, rule, "older checkpoints are kept")
            raise CorruptCheckpoint([*error.problems, new], error.where) from error
        group.run_on_rank_0(lambda: self.remove(old))

    def outdated_by(self, step: int) -> list[int]:
        """The committed steps to remove when ``step`` is the newest; its manifest is read."""
        # reads the new manifest from disk in any case
        self._metrics[step] = self._read_metrics(step, VISIBLE_SECONDS)
        steps = directories.committed_steps(self._root)
        if self._keep.best is not None:
            for other in steps:
                if other not in self._metrics:
                    try:
                        self._metrics[other] = self._read_metrics(other)
                    except CorruptCheckpoint:  # a load will tell; it competes with no value
                        self._metrics[other] = {}
        return outdated(steps, self._metrics, self._keep)

    def _read_metrics(self, step: int, seconds: float = 0.0) -> Metrics:
        with Directory(directories.step_directory(self._root, step), seconds) as directory:
            return manifest.read(directory, step).metrics

    def remove(self, old: list[int]) -> None:
        """Remove the steps; one that cannot be removed is a warning."""
        for step in old:
            try:
                directories.remove_step(directories.step_directory(self._root, step))
            except OSError as error:
                logger.warning("step %d could not be removed: %s", step, error)
