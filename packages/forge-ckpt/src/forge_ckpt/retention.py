"""Which checkpoints are kept: a pure function of steps, their metrics and a rule; and the removal of the others."""

import contextlib
import importlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forge_ckpt import directories, files, manifest
from forge_ckpt._shared.problems import Problem, invalid, problems_of, raise_problems
from forge_ckpt.errors import CorruptCheckpoint
from forge_ckpt.rank_group import RankGroup
from forge_ckpt.read.load import verify_checkpoint

__all__ = ["Keep", "outdated"]

_Milestones = Callable[[int], bool]


@dataclass(frozen=True)
class Keep:
    """A step is kept if any rule keeps it; the newest one always is.

    ``last``: so many of the newest. ``every``: multiples of it (0: none). ``best``: the name of a
    metric; of the steps that were saved with a finite value of it, the one with the lowest (``mode``
    "min") or highest ("max"), and of equal ones the newest. ``milestones``: "powers_of_2" (0, 1, 2,
    4, 8, ...), or a function of the step, itself or as "module:attr".

    Usage::

        Keep(last=2, every=1000, best="val_loss", milestones="powers_of_2")

    Raises ValueError that lists all problems.
    """

    last: int = 3
    every: int = 0
    best: str | None = None
    mode: str = "min"
    milestones: str | _Milestones | None = None
    _is_milestone: _Milestones = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = []
        if type(self.last) is not int or self.last < 1:
            rule = "must be an integer of at least 1"
            problems.append(Problem("last", "range", self.last, rule, "use 3"))
        if type(self.every) is not int or self.every < 0:
            rule = "must be an integer of at least 0"
            problems.append(Problem("every", "range", self.every, rule, "use 0 for none"))
        if self.best is not None and (type(self.best) is not str or not self.best):
            rule = "must be the name of a metric, such as 'val_loss'"
            problems.append(Problem("best", "type", self.best, rule))
        if self.mode not in ("min", "max"):
            problems.append(Problem("mode", "unknown", self.mode, "must be 'min' or 'max'"))

        try:
            object.__setattr__(self, "_is_milestone", _resolve(self.milestones))
        except ValueError as error:
            problems += problems_of(error)
        raise_problems("", problems)

    def described(self) -> str:
        """The rules as text that is equal in other processes, too."""
        milestones = getattr(self.milestones, "__qualname__", self.milestones)
        return f"{replace(self, milestones=None)} {milestones}"

    def is_milestone(self, step: int) -> bool:
        """Whether ``milestones`` keeps ``step``."""
        return bool(self._is_milestone(step))


def outdated(
    steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]], keep: Keep
) -> list[int]:
    """The steps to remove, oldest first; never the newest.

    ``steps`` are the committed steps in any order, ``metrics`` the values of each step that was
    saved with some: ``{step: {name: value}}``.
    """
    ordered = sorted(steps)
    kept = set(ordered[-keep.last :])
    kept |= {s for s in ordered if (keep.every and s % keep.every == 0) or keep.is_milestone(s)}
    if keep.best is not None:
        values = {s: metrics.get(s, {}).get(keep.best, math.nan) for s in ordered}
        sign = 1 if keep.mode == "max" else -1
        finite = [s for s in ordered if math.isfinite(values[s])]
        if finite:
            kept.add(max(finite, key=lambda step: (sign * values[step], step)))
    return [step for step in ordered if step not in kept]


def _resolve(milestones: str | _Milestones | None) -> _Milestones:
    """The function of the step; raises ValueError for a name that has none."""
    if milestones is None:
        return lambda step: False
    if callable(milestones):
        return milestones
    if milestones == "powers_of_2":
        return lambda step: step & (step - 1) == 0  # true of 0 as well, so step 0 is kept
    rule = "must be 'powers_of_2', a function of the step, or its 'module:attr'"
    module, colon, attribute = str(milestones).partition(":")
    if not (module and colon and attribute):
        raise invalid("milestones", "unknown", milestones, rule)

    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        failed = f"cannot be imported ({error})"
        raise invalid("milestones", "not_found", milestones, failed, f"it {rule}") from error
    if not callable(found):
        wrong = f"is a {type(found).__name__}"
        raise invalid("milestones", "type", milestones, wrong, f"it {rule}")
    return found


logger = logging.getLogger("forge_ckpt")
Metrics = dict[str, float]


class Retention:
    """Applies ``keep`` to the steps of ``root``. ``apply`` is collective, on the group that it is given."""

    def __init__(self, root: Path, keep: Keep) -> None:
        self._root, self._keep = root, keep
        # On rank 0 only: kept so that each manifest is read once.
        self._metrics: dict[int, Metrics] = {}

    def apply(
        self, group: RankGroup, step: int, threads: int, quarantine: Callable[[str], bool]
    ) -> None:
        """Remove the steps that ``keep`` drops, if any, now that ``step`` is the newest.

        Before, ``step`` is read back and compared: on a disk that loses writes without an error the old
        ones are the only sound checkpoints. If it is damaged it is quarantined, CorruptCheckpoint is
        raised and nothing is removed. If it cannot be found, OSError is raised.
        """
        try:
            old: list[int] = group.run_on_rank_0(
                lambda: self.outdated_by(step, files.VISIBLE_SECONDS)
            )
            if not old:
                return
            path = directories.step_directory(self._root, step)
            verify_checkpoint(group, path, step, threads, files.VISIBLE_SECONDS)

        except OSError as error:
            rule = f"step {step} was written, and cannot be read back: {error.strerror or error}"
            raise OSError(error.errno, f"{rule}; older checkpoints are kept") from error
        except CorruptCheckpoint as error:
            quarantine(str(error))
            rule = "was written a moment ago: disk or memory fail"
            new = Problem("step", "new", step, rule, "older checkpoints are kept")
            raise CorruptCheckpoint([*error.problems, new], error.where) from error
        group.run_on_rank_0(lambda: self.remove(old))

    def outdated_by(self, step: int, seconds: float = 0.0) -> list[int]:
        """The committed steps to remove when ``step`` is the newest. Its manifest is read, or waited for ``seconds``."""

        def read(step: int, seconds: float = 0.0) -> None:
            path = directories.step_directory(self._root, step)
            self._metrics[step] = manifest.read_from(path, step, seconds).metrics

        read(step, seconds)
        steps = directories.committed_steps(self._root)
        for other in steps if self._keep.best is not None else ():
            if other not in self._metrics:
                self._metrics[other] = {}  # a damaged one competes with no value; a load will tell
                with contextlib.suppress(CorruptCheckpoint):
                    read(other)
        return outdated(steps, self._metrics, self._keep)

    def remove(self, old: list[int]) -> None:
        """Remove the steps; one that cannot be removed is a warning."""
        for step in old:
            try:
                directories.remove_step(directories.step_directory(self._root, step))
            except OSError as error:
                logger.warning("step %d could not be removed: %s", step, error)
