"""The first difference of two runs: the step by their rows and checkpoints, the module by replays of both."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forge_ckpt import SavedTensors
from forge_lab._shared.problems import invalid
from forge_lab._shared.toml_files import read_toml
from forge_lab.study.difference import BOUND, Difference, bound_of, close, first_difference
from forge_lab.study.private_job import read_journal
from forge_lab.study.record import Record
from forge_lab.study.replay import logged_rows
from forge_parallel.metric_rows import finite
from forge_train import RunDirectory
from forge_train.errors import ConfigError, StateError, config_errors
from forge_train.toolkit import store_errors

_LOGGED = ("instances", "loss", "grad_norm", "lr")


@dataclass(frozen=True)
class Interval:
    """The steps that contain the first difference: after `start`, up to `end`; None if no row or checkpoint differs.

    `cause` names the first difference of `end`; `rows` and `checkpoints` count those that were compared.
    `same_start`: both saved `start`, with the same weights. Else it is the initial state, which a replay compares.
    """

    start: int
    end: int | None
    cause: str
    rows: int
    checkpoints: int
    same_start: bool = False


@dataclass(frozen=True)
class Verdict:
    """The result of a bisection: the interval, and the difference of the replays.

    `departs`: for each side the first step whose logged row its own replay does not reproduce, or None.
    """

    interval: Interval
    difference: Difference | None
    departs: tuple[int | None, int | None] = (None, None)
    bound: float = 0.0
    text: str = ""

    @property
    def differs(self) -> bool:
        """Whether the runs differ at all."""
        return self.difference is not None or self.interval.end is not None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        found: dict[str, Any] = {"differs": self.differs, **asdict(self)}
        if self.difference is not None and self.difference.error is not None:
            found["difference"] |= finite({"error": self.difference.error})  # JSON has no inf
        return found


def find_interval(a: Path, b: Path, tolerance: float = 0.0) -> Interval:
    """Compare rows of metrics and common checkpoints of two runs, from the newest checkpoint back to an equal one."""
    ours, theirs = logged_rows(a), logged_rows(b)
    steps = sorted({*ours} & {*theirs} - {0})
    end, cause = None, ""
    for step in steps:
        names = [n for n in _LOGGED if not close(ours[step].get(n), theirs[step].get(n), tolerance)]
        if names:
            end, cause = step, f"{names[0]} of step {step}"
            break

    rows = len(steps) if end is None else steps.index(end) + 1
    common = sorted({*RunDirectory(a).committed()} & {*RunDirectory(b).committed()})
    if not steps and not common:
        rule = f"must have a logged step or a checkpoint in common with {a}"
        raise invalid("run_b", "common", str(b), rule, "name runs that have", kind=StateError)

    count = 0
    for step in reversed([s for s in common if end is None or s < end]):
        count += 1
        name = different_tensor(a, b, step, tolerance)
        if name is None:
            return Interval(step, end, cause, rows, count, same_start=True)
        end, cause = step, f"{name} in the checkpoints of step {step}"
    return Interval(max(read_journal(run).begin for run in (a, b)), end, cause, rows, count)


def different_tensor(a: Path, b: Path, step: int, tolerance: float = 0.0) -> str | None:
    """The name of the first weight that differs in the checkpoints of a step, or None. Memory: one tensor of each."""
    paths = [RunDirectory(run).checkpoint(step) for run in (a, b)]
    with store_errors(paths[0].parent, StateError), ExitStack() as stack:
        one, two = (stack.enter_context(SavedTensors(path)) for path in paths)
        if one.digest == two.digest:
            return None
        for name in one.names(("model.*",)):
            if name not in two.table.tensors or one.meta(name).shape != two.meta(name).shape:
                rule = f"must have {name.removeprefix('model.')} in the shape that it has in {a}"
                fix = "compare runs of one model"
                raise invalid("run_b", "mismatch", str(b), rule, fix, kind=ConfigError)

            x, y = one.read(name), two.read(name)
            scale = float(y.abs().max()) if tolerance and y.numel() else 0.0
            if not torch.equal(x, y) and not bool((x - y).abs().max() <= tolerance * scale):
                return name.removeprefix("model.")
    return None


def bisect_runs(
    a: Path,
    b: Path,
    replay: Callable[[Path, int, int, Path], None],
    tolerance: float | None = None,
    logged_only: bool = False,
) -> Verdict:
    """Find the first difference of two runs. `replay(run, start, end, folder)` records the steps `start + 1 .. end`.

    Costs two replays of the steps between two checkpoints. Raises ConfigError and StateError.
    """

    def layout(run: Path) -> tuple[Any, int | None]:
        paths = RunDirectory(run)
        paths.require_run()
        return read_toml(paths.config).get("parallel"), paths.num_ranks()

    if a.resolve() == b.resolve():
        rule = "must be another run than run_a"
        raise invalid("run_b", "duplicate", str(b), rule, "name two runs", kind=ConfigError)
    if tolerance is None:
        tolerance = 0.0 if layout(a) == layout(b) else BOUND
    interval = find_interval(a, b, tolerance)
    if interval.end is None or logged_only:
        return _with_text(Verdict(interval, None, bound=tolerance), a, b)

    with tempfile.TemporaryDirectory(prefix="forge-bisect-") as folder:
        sides = [Path(folder, name) for name in ("a", "b")]
        for run, side in zip((a, b), sides):
            replay(run, interval.start, interval.end, side)
        return bisect_records(sides[0], sides[1], tolerance, interval, (a, b))


def bisect_records(
    a: Path,
    b: Path,
    tolerance: float | None = None,
    interval: Interval | None = None,
    runs: tuple[Path, Path] | None = None,
) -> Verdict:
    """Compare two records that `forge-train replay --record` wrote, here or on other machines."""
    one, two = Record(a), Record(b)
    with config_errors():
        difference = first_difference(one, two, tolerance)
    if interval is None:
        first = max(one.head.first, two.head.first)
        interval = Interval(first - 1, None, "", 0, 0)
    departs = (None, None) if runs is None else (_departs(runs[0], one), _departs(runs[1], two))
    verdict = Verdict(interval, difference, departs, bound_of(one, two, tolerance))
    names = runs or (Path(one.head.run), Path(two.head.run))
    return _with_text(verdict, *names, callbacks=one.head.callbacks and two.head.callbacks)


def _departs(run: Path, record: Record) -> int | None:
    """The first logged step that the replay does not reproduce bit for bit."""
    logged = logged_rows(run)
    for step in range(record.head.first, record.head.last + 1):
        row = record.row(step)
        if step in logged and any(logged[step].get(n) != row.get(n) for n in _LOGGED):
            return step
    return None


def _with_text(verdict: Verdict, a: Path, b: Path, callbacks: bool = True) -> Verdict:
    return replace(verdict, text=" ".join(_sentences(verdict, a, b, callbacks)))


def _sentences(verdict: Verdict, a: Path, b: Path, callbacks: bool) -> Iterator[str]:
    """One paragraph that can be read without this code."""
    interval, found = verdict.interval, verdict.difference
    how = f"within {verdict.bound:g} (relative)" if verdict.bound else "bit for bit"
    yield f"A is {a}, B is {b}; values are compared {how}."
    if interval.rows or interval.checkpoints:
        yield _of_interval(interval)

    departs = {name: step for name, step in zip("AB", verdict.departs) if step}
    if found is not None:
        yield _of_difference(found, interval)

        if departs:
            names = [f"{name} from step {step} on" for name, step in departs.items()]
            yield f"The replay does not reproduce the logged numbers of {' and '.join(names)}."
    elif departs:
        off = "" if callbacks else ", or a callback: they were off, --callbacks turns them on"
        yield (
            f"The replays of both agree, but the log of {' and of '.join(departs)} departs from the run's own replay at "
            f"{' and '.join(f'step {step}' for step in departs.values())}: the cause is not in configuration, code or data, "
            f"but acted once (a fault of a machine, a change by hand{off})."
        )
    elif interval.end is not None and interval.rows and not verdict.differs:
        yield "The replays agree."
    elif not verdict.differs:
        yield "No difference was found."


def _of_interval(interval: Interval) -> str:
    if interval.end is None:
        saved = f" and the checkpoint of step {interval.start}" if interval.same_start else ""
        return f"{interval.rows} logged steps{saved} are the same."
    if not interval.same_start:  # no checkpoint of the initial state: only the replays compare it
        return f"Of the logged rows and checkpoints, {interval.cause} is the first that differs."
    return (
        f"The runs are the same up to step {interval.start}, and {interval.cause} is the first that was logged or saved "
        "and differs."
    )


def _of_difference(found: Difference, interval: Interval) -> str:
    step, name = found.step, found.name
    more = f" ({len(found.others)} more differ in this step)" if found.others else ""
    error = f", by {found.error:.1e} of its largest value" if found.error else ""
    if found.error == 0:  # only the digests differ
        error = ", in elements that are not among the samples of the record"

    if found.quantity == "weight" and step == interval.start + 1 and not interval.same_start:
        return f"The weights that they begin with differ: {name}{error}{more}."
    if found.quantity == "weight":
        return (
            f"{name} differs before step {step}{error}{more}; loss, gradients, norm and rate of the step before it "
            "are the same, so that the update or something between the steps made the difference."
        )
    if found.quantity == "output":
        on = "" if found.instance is None else f" on instance {found.instance}"
        return (
            f"In step {step} the weights and the data are the same, and the output of {name} is the first of the "
            f"forward that differs{on}{error}{more}."
        )

    if found.quantity == "gradient":
        return (
            f"In step {step} weights, data and outputs are the same, and the gradient of {name} is the first of the "
            f"backward that differs{error}{more}."
        )
    if found.quantity == "data":
        of = "" if found.instance is None else f" of instance {found.instance}"
        return (
            f"In step {step} the weights and the numbers of the instances are the same, and the data of one differs: "
            f"{name}{of}{more}."
        )

    words = {"instances": "the order of the data (the digest of the instances)", "loss": "the loss"}
    values = "" if found.values is None else f" ({found.values[0]} in A, {found.values[1]} in B)"
    quantity = words.get(found.quantity, found.quantity)
    return f"In step {step} all before it is the same, and {quantity} differs{values}."
