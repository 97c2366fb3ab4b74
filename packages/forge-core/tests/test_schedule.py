"""Schedules against their definition."""

import math
import sys
import types

import pytest

from forge_core.optim import ScheduleConfig, build_schedule


def test_F37_learning_rate_of_step_one_is_not_zero():
    for name in ("cosine", "constant"):
        for warmup in (0, 1, 10):
            factor = build_schedule(ScheduleConfig(name, warmup_steps=warmup), 100)
            assert factor(1) > 0
    assert build_schedule(ScheduleConfig(warmup_steps=10), 100)(1) == 0.1


def test_F37_the_last_step_has_the_floor_exactly():
    for total in (1, 2, 7, 1000):
        for floor in (0.0, 0.1, 1 / 3):
            factor = build_schedule(ScheduleConfig(min_lr_ratio=floor), total)
            assert factor(total) == floor
            assert factor(total + 1) == factor(10 * total) == floor


def test_cosine_by_its_definition():
    factor = build_schedule(ScheduleConfig(warmup_steps=5, min_lr_ratio=0.2), 25)
    assert [factor(step) for step in range(1, 6)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert math.isclose(factor(15), 0.6)  # half way: the middle of 1 and the floor
    assert math.isclose(factor(10), 0.2 + 0.8 * (0.5 + 0.5 * math.cos(math.pi / 4)))
    falling = [factor(step) for step in range(5, 26)]
    assert falling == sorted(falling, reverse=True)


def test_constant_stays_at_one_after_warm_up():
    factor = build_schedule(ScheduleConfig("constant", warmup_steps=4), 10)
    assert [factor(step) for step in (1, 2, 3, 4, 5, 10, 99)] == [0.25, 0.5, 0.75, 1, 1, 1, 1]


@pytest.mark.parametrize(("warmup", "total"), [(10, 10), (11, 10), (1, 1)])
def test_a_warm_up_as_long_as_the_run_is_refused(warmup, total):
    with pytest.raises(ValueError, match=rf"warmup_steps {warmup} must be below the {total} steps"):
        build_schedule(ScheduleConfig(warmup_steps=warmup), total)


def test_no_steps_and_step_zero_are_refused():
    with pytest.raises(ValueError, match="total_steps 0"):
        build_schedule(ScheduleConfig(), 0)
    for name in ("cosine", "constant"):
        with pytest.raises(ValueError, match="step 0"):
            build_schedule(ScheduleConfig(name, warmup_steps=3), 10)(0)


def test_all_problems_of_a_config_in_one_error():
    with pytest.raises(ValueError, match="schedule: name") as error:
        ScheduleConfig(name="", warmup_steps=-1, min_lr_ratio=1.5)
    assert len(str(error.value).splitlines()) == 3
    with pytest.raises(ValueError, match="min_lr_ratio nan"):
        ScheduleConfig(min_lr_ratio=math.nan)


def test_an_unknown_name_gets_the_nearest_known_one():
    with pytest.raises(
        ValueError, match=r"schedule.name 'cosin'.*constant, cosine.*did you mean 'cosine'"
    ):
        build_schedule(ScheduleConfig("cosin"), 10)


def test_a_schedule_by_import_path(monkeypatch):
    module = types.ModuleType("somebodys_lab")
    module.half = lambda config, total_steps: lambda step: 0.5
    monkeypatch.setitem(sys.modules, "somebodys_lab", module)
    assert build_schedule(ScheduleConfig("somebodys_lab:half"), 10)(3) == 0.5
    for path in ("somebodys_lab:other", "no_such_module_here:build", "somebodys_lab:"):
        with pytest.raises(ValueError, match="cannot import"):
            build_schedule(ScheduleConfig(path), 10)
