"""A run in any layout equals the run of one process, for every feature of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import FEATURES, LAYOUTS, JobCell, allowed, covering

from forge_testing.runs import (
    Fitted,
    assert_close,
    assert_same_rows,
    columns,
    fit_on_ranks,
    fit_reference,
    together,
)
from forge_testing.schedules import marks
from forge_train import read_run

pytestmark = pytest.mark.lane("test")


def reference(folder: Path, cell: JobCell) -> tuple[Path, Fitted]:
    """The job of one process and its result; trained once in a session for all layouts of equal shape."""
    feature, layout = FEATURES[cell.feature], LAYOUTS[cell.layout]
    flags = {k: v for k, v in layout.flags.items() if not k.startswith("parallel.")}
    rows = flags.pop("train.micro_batch", None) if feature.same_partition else feature.micro_batch
    flags.pop("train.micro_batch", None)
    if rows is not None:
        flags["train.micro_batch"] = rows
    job = feature.job(folder)
    return job, fit_reference(job, **feature.merged(flags))


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
    """Weights, moments, losses of the global batch, norms, digests of the batches, and the columns of the feature."""
    feature, layout = FEATURES[cell.feature], LAYOUTS[cell.layout]
    alone, wanted = reference(tmp_path / "alone", cell)
    many = feature.job(tmp_path / "many")
    ran = fit_on_ranks(layout.world, many, feature.callback, **feature.merged(layout.flags))
    assert {(one.code, one.step) for one in ran} == {(wanted.code, wanted.step)}, ran[0].problems
    assert_close(together(ran), wanted.weights, feature.bound, floor=1e-11)
    assert_same_rows(columns(many), columns(alone))
    got, expected = (read_run(job.parent / "run").metrics for job in (many, alone))
    for names, bound in ((feature.columns, 1e-5), (feature.rough_columns, 1e-3)):
        for name in names:
            near = [
                v if v is None else pytest.approx(v, rel=bound, abs=1e-6) for v in expected[name]
            ]
            assert got[name] == near, name


def test_every_feature_meets_every_axis_that_it_supports() -> None:
    met = {part for cell in covering() for part in cell.parts}
    for name in FEATURES:
        axes = {a for n, layout in LAYOUTS.items() if allowed(name, n) for a in layout.axes}
        assert axes, name
        assert {(name, part) for part in axes | FEATURES[name].also} <= met, name
    assert {layout for layout in LAYOUTS if any(allowed(f, layout) for f in FEATURES)} <= met
