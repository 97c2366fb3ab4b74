"""A run in any layout equals the run of one process, for every feature of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import FEATURES, LAYOUTS, JobCell, allowed, covering

from forge_testing import runs
from forge_testing.schedules import marks
from forge_train import read_run

pytestmark = pytest.mark.lane("test")

#: Columns of metrics that differ from run to run.
OF_THE_MACHINE = frozenset(
    {"tokens_per_second", "mfu", "data_wait_seconds", "memory_bytes", "seconds", "device_hours", "seconds_left", "recompiled"}
)  # fmt: skip


def reference(folder: Path, cell: JobCell) -> tuple[Path, runs.Fitted]:
    """The job of one process and its result; trained once in a session for all layouts of equal shape."""
    feature, layout = FEATURES[cell.feature], LAYOUTS[cell.layout]
    flags = {k: v for k, v in layout.flags.items() if not k.startswith("parallel.")}
    rows = flags.pop("train.micro_batch", None) if feature.same_partition else feature.micro_batch
    flags.pop("train.micro_batch", None)
    if rows is not None:
        flags["train.micro_batch"] = rows
    job = feature.job(folder)
    return job, runs.fit_reference(job, **feature.merged(flags))


def numbers(job: Path) -> dict[str, list[Any]]:
    """Columns of metrics but those of times and memory; of a column of lists one for each place."""
    found: dict[str, list[Any]] = {}
    metrics = read_run(job.parent / "run").metrics
    for name in (name for name in metrics if name not in OF_THE_MACHINE):
        lists = any(isinstance(value, list) for value in metrics[name])
        for place, values in enumerate(zip(*metrics[name]) if lists else [metrics[name]]):
            found[f"{name}[{place}]" if lists else name] = list(values)
    return found


def cells() -> list[Any]:
    """The cells of `covering()`; in the lane `ci`, each feature with a pipeline and with another axis."""
    every = covering()
    in_ci = covering(every, lambda cell: cell.rough_parts)
    ci = [pytest.mark.lane("ci")]
    return [
        pytest.param(c, marks=marks(LAYOUTS[c.layout].flags) + ci * (c in in_ci), id=c.name)
        for c in every
    ]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("cell", cells())
def test_F38_a_run_equals_one_process(tmp_path: Path, cell: JobCell) -> None:
    """Weights, moments, losses of the global batch, norms, digests of the batches, and all columns of metrics."""
    feature, layout = FEATURES[cell.feature], LAYOUTS[cell.layout]
    alone, wanted = reference(tmp_path / "alone", cell)
    many = feature.job(tmp_path / "many")
    ran = runs.fit_on_ranks(layout.world, many, feature.callback, **feature.merged(layout.flags))
    assert {(one.code, one.step) for one in ran} == {(wanted.code, wanted.step)}, ran[0].problems
    runs.assert_close(runs.together(ran), wanted.weights, feature.bound, floor=1e-11)
    runs.assert_same_rows(runs.columns(many), runs.columns(alone))
    got, expected = (numbers(job) for job in (many, alone))
    assert got.keys() == expected.keys()
    assert {*feature.columns, *feature.rough_columns} <= {name.partition("[")[0] for name in got}
    off = {}
    for name, values in expected.items():
        bound = 1e-3 if name in feature.rough_columns else 1e-5
        near = [
            pytest.approx(v, rel=bound, abs=1e-6) if isinstance(v, float) else v for v in values
        ]
        if got[name] != near:
            off[name] = (got[name], values)
    assert not off, off


def test_every_feature_meets_every_axis_that_it_supports() -> None:
    met = {part for cell in covering() for part in cell.parts}
    for name in FEATURES:
        axes = {a for n, layout in LAYOUTS.items() if allowed(name, n) for a in layout.axes}
        assert axes, name
        assert {(name, part) for part in axes | FEATURES[name].also} <= met, name
    assert {layout for layout in LAYOUTS if any(allowed(f, layout) for f in FEATURES)} <= met
