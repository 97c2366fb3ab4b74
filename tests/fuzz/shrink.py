"""From a job that differs to the smallest one that still does: axes at their defaults, fewer ranks and steps, smaller sizes.

Every candidate is run again, so `differs` may be any predicate. The order of candidates is fixed: the same job and the same
predicate give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from tests.fuzz.job import Job, axes
from tests.fuzz.rules import NEEDS, allowed, broken_rule

#: Axes in the order in which they are dropped: what costs most time, or says least, first.
_AREAS = (
    "events", "layout", "computation", "images", "experts", "training", "data", "optimizer", "model",
)  # fmt: skip
#: Values that are tried for a size, the smallest first; only those below its own.
_SIZES: dict[str, tuple[int, ...]] = {
    "steps": (1, 2, 3, 4, 5),
    "rows": (2, 4, 8, 16),
    "global_batch": (1, 2, 3, 4, 6, 8, 12),
    "seq_len": (2, 4, 6, 8, 12, 16, 24),
    "num_layers": (1, 2, 3, 4),
    "num_experts": (2, 3, 4, 6),
    "num_heads": (1, 2, 3, 4),
    "head_dim": (2, 4, 6, 8),
    "dim": (2, 4, 8, 16, 24),
    "hidden_dim": (1, 2, 4, 8, 16),
    "vocab_size": (8, 16, 32, 64),
}


#: Its default makes a full step of AdamW of the rounding noise in a gradient.
_KEPT = ("optimizer.eps",)


def shrink(
    job: Job, differs: Callable[[Job], bool], is_over: Callable[[], bool] = lambda: False
) -> Job:
    """The last job of a chain of smaller ones that all differ, until no candidate does or `is_over()`.

    Cost: for n axes that are not at their defaults about 3 n calls of `differs`, and one for each size that is tried.
    """

    def smaller(job: Job, candidates: Iterable[Job]) -> Job:
        return next((c for c in candidates if c != job and not is_over() and differs(c)), job)

    before = None
    while job != before and not is_over():
        before = job
        part = len(job.choice)
        while part:  # many axes at once, then fewer
            names = _axes_of(job)
            for first in range(0, len(names), part):
                job = smaller(job, _dropped(job, names[first : first + part]))
            part //= 2
        for name, values in _SIZES.items():
            job = smaller(job, (_resized(job, name, v) for v in values if v < job.sizes[name]))
        for name in _keys_of(job):
            job = smaller(job, [replace(job, without=job.without | {name})])
    return job


def _axes_of(job: Job) -> list[str]:
    """Axes that are not at their defaults, in the order in which they are dropped."""
    named = [(name, axis.area) for name, axis in axes().items() if job.has(name)]
    return [name for area in _AREAS for name, own in named if own == area]


def _dropped(job: Job, names: Iterable[str]) -> Iterator[Job]:
    """The job with these axes at their defaults, and with them others that need one of them; nothing if the rules exclude it."""
    names = set(names)
    choice = _legal({name: value for name, value in job.choice.items() if name not in names})
    if choice is None:
        return
    found = replace(job, choice=choice)
    if job.has("sizes") and not found.has("sizes"):
        found = found.with_size("dim", job.sizes["num_heads"] * job.sizes["head_dim"])
    if job.then is not None:
        layout = {name for name, axis in axes().items() if axis.area == "layout"}
        same = {name: value for name, value in choice.items() if name not in layout}
        other = {name: value for name, value in job.then.items() if name not in names}
        then = _legal({**same, **other}) if "after the restart" in choice else None
        found = replace(found, then=then and {n: v for n, v in then.items() if n in layout})
    yield found


def _legal(choice: dict[str, str]) -> dict[str, str] | None:
    """The choice without axes that need a value which is not there; None where that is not the reason."""
    while not allowed(choice):
        dependent = [name for name in broken_rule(choice) or NEEDS if name in choice]
        if not dependent:
            return None
        for name in dependent:
            del choice[name]
    return choice


def _resized(job: Job, name: str, value: int) -> Job:
    found = job.with_size(name, value)
    if name in ("num_heads", "head_dim") and not job.has("sizes"):
        found = found.with_size("dim", found.sizes["num_heads"] * found.sizes["head_dim"])
    if name == "steps":  # what happens in the run stays within it
        for event in ("stop", "bad"):
            found = found.with_size(event, min(job.sizes[event], value))
    return found


def _keys_of(job: Job) -> list[str]:
    """Tables and keys that the axes set, and others that have a default."""
    keys = [key for key, value in job.keys().items() if value is not None]
    keys += ["init.seed", "data.seed", "run.seed", "model.init_std", "train.micro_batch"]
    keys = [key for key in keys if key not in _KEPT]
    tables = {key.rpartition(".")[0] for key in keys if key.count(".") > 1}
    return [key for key in (*sorted(tables), *keys) if not job.is_without(key)]


def cause(job: Job) -> str:
    """One line: the values that are left."""
    left = [f"{name} = {value}" for name, value in job.choice.items()]
    return ", ".join(left) or "every axis at its default"
