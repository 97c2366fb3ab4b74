"""Steps with numbers that are not finite or spike: a verdict on the device, and what to do after several in a row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from forge_resilience._renamed import renamed
from forge_resilience._shared.fields import Checked, field
from forge_resilience._shared.problems import Problem, invalid

__all__ = [
    "NonfiniteConfig", "NumericsPolicy", "RollbackConfig", "SpikeConfig", "StepVerdict", "nonfinite",
]  # fmt: skip

_MAX_STEPS = 10**6
# verdicts, 0 for a good step: numbers, because they stay on the device until they are taken
_NONFINITE, _SPIKE, _UNLABELED = 1, 2, 3
_MOST_PIECES = 1000
_COUNTERS = ("rollbacks", "in_a_row", "bad_since")


@dataclass(frozen=True)
class NonfiniteConfig(Checked):
    """Steps whose loss or gradient norm is nan or inf. They never change a weight."""

    action: Literal["stop", "skip", "rollback"] = "stop"
    """stop: the first such step ends the run with code 76; skip: one more than max_in_a_row does; rollback: one
    more goes back to a checkpoint and leaves their data out"""
    max_in_a_row: int | None = field(None, between=(0, _MAX_STEPS))
    """skip and rollback: steps in a row that are skipped without further consequences (default: 3)"""

    def _problems(self) -> Iterator[Problem]:
        if self.max_in_a_row and self.action == "stop":
            rule = "must go without action 'stop', which is for the first such step"
            fix = "use action 'skip' or 'rollback'"
            yield Problem("max_in_a_row", "action", self.max_in_a_row, rule, fix)

    @property
    def limit(self) -> int:
        """Steps in a row without further consequences."""
        if self.action == "stop":
            return 0
        return 3 if self.max_in_a_row is None else self.max_in_a_row


@dataclass(frozen=True)
class SpikeConfig(Checked):
    """Steps whose loss or gradient norm is far above those before. They change no weight, either."""

    action: Literal["off", "skip", "stop", "rollback"] = "off"
    """skip: such a step changes nothing; stop: it ends the run with code 76; rollback: the run goes back to a
    checkpoint and leaves its data out"""
    sigma: float = field(6.0, between=(0, 1000), positive=True)
    """standard deviations above the mean of the window at which a value is a spike"""
    window: int = field(128, between=(2, _MAX_STEPS))
    """steps of the window; none is judged before it is full"""
    of: Literal["loss", "grad_norm", "both"] = "loss"
    """the number that is judged"""


@dataclass(frozen=True)
class RollbackConfig(Checked):
    """Going back to a checkpoint, for either cause."""

    max_rollbacks: int = field(2, between=(1, _MAX_STEPS))
    """rollbacks of a run; the next one ends it with code 76"""
    batches_before: int = field(0, between=(0, _MAX_STEPS))
    """batches before the bad ones whose data is left out, too (PaLM left out some 200)"""
    lr_factor: float = field(1.0, between=(0, 1), positive=True)
    """the learning rate is multiplied by this at each rollback"""


@dataclass(frozen=True)
class StepVerdict:
    """The action that the verdicts of some steps lead to. Steps are counted from 1, `first` and `last` inclusive."""

    skipped: tuple[int, ...] = ()
    """Steps that changed nothing."""
    spikes: tuple[int, ...] = ()
    """Those of them that were spikes."""
    unlabeled: tuple[int, ...] = ()
    """Those of them that had no label; the others were not finite."""
    in_a_row: int = 0
    """The longest run of steps that were not finite."""
    action: Literal["none", "stop", "rollback"] = "none"
    cause: Literal["", "nonfinite", "spike"] = ""
    """Of the action."""
    first: int = 0
    last: int = 0
    """The bad steps that the action answers."""

    @property
    def bad_steps(self) -> str:
        """The cause of the action and its steps, for a user."""
        what = "a spike" if self.cause == "spike" else "numbers that are not finite"
        if self.first == self.last:
            return f"{what} in step {self.last}"
        return f"{what} in steps {self.first} to {self.last}"

    def events(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Events of a journal, with their fields: `skip` and `spike`."""
        others = [n for n in self.skipped if n not in (*self.spikes, *self.unlabeled)]
        if self.unlabeled:
            yield "skip", {"step": self.unlabeled[-1], "unlabeled": len(self.unlabeled)}
        if others:
            yield "skip", {"step": others[-1], "skipped": len(others), "in_a_row": self.in_a_row}
        if self.spikes:
            yield "spike", {"step": self.spikes[-1], "spikes": len(self.spikes)}


def nonfinite(*values: Any) -> Any:
    """Return 1.0 if any of the 0-dim tensors is nan or inf, else 0.0; a 0-dim fp32 tensor on their device.

    Made from values that are equal on all ranks (the global loss and gradient norm), so the verdict
    is too. Handed to an optimizer that masks its update by it, a bad step changes nothing on any
    rank; no host sync. Usage: `optimizer.step(skip=nonfinite(loss, norm))`.
    """
    import torch

    return 1.0 - torch.isfinite(torch.stack([v.float() for v in values])).all().float()


class NumericsPolicy:
    """Judge the numbers of each step on the device; the host reads the verdicts later and decides on an action.

        policy = NumericsPolicy(NonfiniteConfig("skip"), SpikeConfig("rollback"))
        bad = policy.judge(loss, grad_norm)           # each step: 0-dim, no host sync
        optimizer.step(skip=bad)                      # an update that bad masks
        outcome = policy.decide(policy.take().tolist(), step)     # now and then: one host sync
        if outcome.action == "rollback": ...

    `loss` and `grad_norm` must be equal on all ranks (those of the global batch), so all ranks judge and decide
    alike. A step that is not finite, a spike unless `spike.action` is "off", and a step without labels mask their update; the
    last has no value for the window, ends a run of bad steps, and has no other consequence. A spike
    enters the window with the value at which it became one, so that a lasting rise of the loss is soon no
    spike any more. `state_dict` belongs into the checkpoint; decide before. Cost of a step: a dozen small
    device operations with a spike rule, three without.

    Source of the rule: OLMo's optimizers that skip a step by the deviation of its loss; of going back and leaving
    batches out: PaLM (Chowdhery et al., 2022, section 5.1).
    """

    def __init__(
        self,
        nonfinite: NonfiniteConfig | None = None,
        spike: SpikeConfig | None = None,
        rollback: RollbackConfig | None = None,
    ) -> None:
        self.nonfinite, self.spike = nonfinite or NonfiniteConfig(), spike or SpikeConfig()
        self.rollback = rollback or RollbackConfig()
        self.rollbacks = 0
        self._window = None if self.spike.action == "off" else _Window(self.spike)
        self._verdicts: list[Any] = []
        # steps in a row that were not finite, up to the last one that was decided: `nonfinite.limit` bounds them
        self._in_a_row = 0
        # first step of the bad ones up to there, of either kind; 0 after a good one
        self._bad_since = 0

    @property
    def can_roll_back(self) -> bool:
        """Whether an action is a rollback."""
        return "rollback" in (self.nonfinite.action, self.spike.action)

    @property
    def lr_factor(self) -> float:
        """Factor on the learning rate of the schedule after the rollbacks so far."""
        return float(self.rollback.lr_factor**self.rollbacks)

    def judge(self, loss: Any, grad_norm: Any, *, labeled: bool = True) -> Any:
        """Judge a step: 1.0 if its update is to be masked, else 0.0; 0-dim fp32 on the device of `loss`, no sync.

        `labeled`: whether its batch had a label, without which it has no loss.
        """
        bad = nonfinite(loss, grad_norm)
        verdict = bad * _NONFINITE if labeled else bad.new_full((), _UNLABELED)
        if self._window is not None and labeled:
            verdict = verdict + _SPIKE * self._window.judge(loss, grad_norm, bad)
        self._verdicts.append(verdict[None])
        if len(self._verdicts) > _MOST_PIECES:  # a tensor of one number holds 512 bytes of a GPU
            self._verdicts = [self.take()]
        return verdict.clamp(max=1.0)

    def take(self) -> Any:
        """Return the verdicts of the steps since the last call, in order: fp32 (steps,) on the device, no sync."""
        import torch

        taken, self._verdicts = self._verdicts, []
        return torch.cat(taken) if taken else torch.zeros(0)

    def decide(self, verdicts: Sequence[float], step: int) -> StepVerdict:
        """Return the action that `verdicts` of `take` lead to; the last of them is that of `step`.

        Hand on each verdict once, in order. After a rollback load the state and go on from its step.
        """
        skipped, unlabeled, spikes, longest, answer = [], [], [], 0, StepVerdict()
        for number, verdict in enumerate(verdicts, step - len(verdicts) + 1):
            if verdict:
                skipped.append(number)
            if verdict == _UNLABELED:
                unlabeled.append(number)
            if verdict in (0, _UNLABELED):
                self._in_a_row = self._bad_since = 0
                continue

            if verdict == _SPIKE:
                spikes.append(number)
            self._in_a_row = self._in_a_row + 1 if verdict == _NONFINITE else 0
            self._bad_since = self._bad_since or number
            longest = max(longest, self._in_a_row)
            if answer.action == "none":
                answer = self._answer(int(verdict), number)
            elif answer.last == number - 1:
                # the same run of bad steps, so one answer covers all of them
                answer = replace(answer, last=number)

        steps = {"skipped": skipped, "spikes": spikes, "unlabeled": unlabeled}
        found: dict[str, Any] = {name: tuple(numbers) for name, numbers in steps.items()}
        return replace(answer, **found, in_a_row=longest)

    def _answer(self, verdict: int, step: int) -> StepVerdict:
        """The action after a bad step, which the counters contain already."""
        answer = StepVerdict(first=self._bad_since, last=step)
        if verdict == _NONFINITE and self._in_a_row > self.nonfinite.limit:
            back = self.nonfinite.action == "rollback"
            return replace(answer, action="rollback" if back else "stop", cause="nonfinite")
        if verdict == _SPIKE and self.spike.action in ("stop", "rollback"):
            return replace(answer, action=self.spike.action, cause="spike")
        return StepVerdict()

    def stop_rule(self, cause: str) -> str:
        """The setting by which a cause ends the run, for a user."""
        spike, action = self.spike, self.nonfinite.action
        if cause == "spike":
            of = "loss or grad_norm" if spike.of == "both" else spike.of
            rule = f"{of} was more than {spike.sigma:g} standard deviations above the mean of {spike.window} steps"
            return f"spike.action {spike.action!r}: {rule}"
        if self.nonfinite.limit:
            return f"nonfinite.max_in_a_row allows {self.nonfinite.limit} of them in a row"
        return f"nonfinite.action {action!r} allows no such step"

    def state_dict(self) -> dict[str, Any]:
        """Counters and the window, as JSON; equal on all ranks. One host sync with a spike rule."""
        counts = (self.rollbacks, self._in_a_row, self._bad_since)
        window = {} if self._window is None else {"window": self._window.values()}
        return dict(zip(_COUNTERS, counts)) | window

    def forget_bad_steps(self) -> None:
        """Count steps in a row from the next one on."""
        self._in_a_row = self._bad_since = 0

    def load_checks(self, state: Any) -> None:
        """Raise ValueError for a state that no policy saved."""
        counters = [state.get(name) for name in _COUNTERS] if isinstance(state, Mapping) else []
        if not counters or not all(type(n) is int and n >= 0 for n in counters):
            rule = f"must hold {', '.join(_COUNTERS)} of at least 0"
            raise invalid("policy", "damaged", state, rule)
        rows = state.get("window", [[], []])
        flat = [x for row in rows for x in row] if _is_two_lists(rows) else [math.nan]
        if not all(isinstance(x, float | int) and math.isfinite(x) for x in flat):
            raise invalid("policy.window", "damaged", rows, "must be two lists of finite numbers")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; verdicts not yet taken are dropped. A window of another size keeps its
        newest steps, and without a saved one it begins empty."""
        self.rollbacks = state["rollbacks"]
        self._in_a_row, self._bad_since = state["in_a_row"], state["bad_since"]
        self._verdicts = []
        if self._window is not None:
            self._window.fill(state.get("window", [[], []]))


class _Window:
    """Loss and gradient norm of the last good steps, oldest first, on their device."""

    def __init__(self, config: SpikeConfig) -> None:
        self._size, self._sigma = config.window, config.sigma
        self._judged = slice(config.of == "grad_norm", 1 + (config.of != "loss"))
        self._saved: list[list[float]] = [[], []]
        self._values: Any = None  # (2, window) fp32
        # of values in it, 0-dim int64: on the device, so that `judge` needs no sync
        self._count: Any = None

    def judge(self, loss: Any, grad_norm: Any, bad: Any) -> Any:
        """1.0 for a spike that is not `bad`; unless `bad`, the values enter the window, those of a spike clamped to its limit."""
        import torch

        new = torch.stack([loss.detach().float(), grad_norm.detach().float()])  # (2,)
        if self._values is None:
            self._place(new.device)
        full = self._count >= self._size
        deviation = self._values.std(1)  # (2,)
        limit = self._values.mean(1) + self._sigma * deviation
        # equal values have no scale: above them everything would be a spike, and clamped to the limit for ever
        above = full & (deviation > 0) & (new > limit)
        new = torch.where(above, limit, new)
        entered = torch.cat([self._values[:, 1:], new[:, None]], dim=1)
        self._values = torch.where(bad > 0, self._values, entered)
        self._count = torch.where(bad > 0, self._count, self._count + 1)
        return (above[self._judged].any() & (bad == 0)).float()

    def values(self) -> list[list[float]]:
        """Losses and gradient norms in the window."""
        if self._values is None:
            return self._saved
        count = min(int(self._count), self._size)
        rows: list[list[float]] = self._values[:, self._size - count :].tolist()
        return rows

    def fill(self, rows: Sequence[Sequence[float]]) -> None:
        """Put the newest of `rows` into the window in place of what it holds."""
        self._saved = [list(row[-self._size :]) for row in rows]
        self._values = None  # placed by the next `judge`, as the device is not known before

    def _place(self, device: Any) -> None:
        import torch

        rows = torch.tensor(self._saved, dtype=torch.float32)  # (2, count)
        empty = torch.zeros(2, self._size - rows.shape[1])
        self._values = torch.cat([empty, rows], dim=1).to(device)
        self._count = torch.full((), rows.shape[1], device=device)


def _is_two_lists(rows: Any) -> bool:
    is_list = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    return is_list and len(rows) == 2 and len(rows[0]) == len(rows[1])


__getattr__ = renamed(__name__)
