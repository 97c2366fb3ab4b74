"""Schedules against their definition."""

import math
import random
import sys
import types

import pytest

from forge_core.optim import ScheduleConfig, WSDConfig, build_schedule
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

FALLING = ("cosine", "linear", "wsd", "rex")
NAMES = (*FALLING, "inverse_sqrt", "constant")


def test_F37_learning_rate_of_step_one_is_not_zero():
    for name in NAMES:
        for warmup in (0, 1, 10):
            factor = build_schedule(ScheduleConfig(name, warmup_steps=warmup), 100)
            assert factor(1) > 0
            assert [factor(s) for s in range(1, warmup + 1)] == [
                s / warmup for s in range(1, warmup + 1)
            ]
    assert build_schedule(ScheduleConfig(warmup_steps=10), 100)(1) == 0.1


def test_F37_the_last_step_has_the_floor_exactly():
    for name in FALLING:
        for total in (1, 2, 7, 1000):
            for floor in (0.0, 0.1, 1 / 3, 1.0):
                factor = build_schedule(ScheduleConfig(name, min_lr_ratio=floor), total)
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


def stated(config, total, step):
    """The factor as the papers state it, one step at a time; n counts the updates of the decay."""
    warmup, floor = config.warmup_steps, config.min_lr_ratio
    if step < warmup:
        return step / warmup
    if config.name == "inverse_sqrt":  # Vaswani et al. 2017, peak 1: min(n^-.5, n * w^-1.5) * w^.5
        return min(step**-0.5, step * max(warmup, 1) ** -1.5) * max(warmup, 1) ** 0.5
    begin, shape = warmup, config.name
    if shape == "wsd":
        shape, length = config.wsd.decay, config.wsd.decay_steps
        begin = total - (length or max(1, round(config.wsd.decay_fraction * total)))
    n, N = step - begin, total - begin
    if shape == "constant" or n <= 0:
        return 1.0
    if shape == "rex":  # Chen et al. 2021, eq. 1 with t = n and T = N: 2 (T - t) / (2 T - t)
        unit = 2 * (N - n) / (2 * N - n)
    else:
        unit = {
            "linear": (N - n) / N,
            "cosine": math.cos(math.pi * n / N / 2) ** 2,
            "sqrt": 1 - (n / N) ** 0.5,
        }[shape]
    return unit + floor * (1 - unit)


def test_each_schedule_is_its_statement_at_every_step():
    draw = random.Random(0)
    for _ in range(200):
        total = draw.randint(2, 60)
        name = draw.choice(NAMES)
        own = {"warmup_steps": draw.choice((0, draw.randint(0, total - 1)))}
        if name in FALLING:
            own["min_lr_ratio"] = draw.choice((0.0, 0.1, draw.random()))
        if name == "wsd":
            longest = total - own["warmup_steps"]
            length = {"decay_steps": draw.randint(1, longest)}
            if draw.random() < 0.5:
                length = {"decay_fraction": draw.uniform(0.01, 1.0) * (longest - 0.5) / total}
            own["wsd"] = WSDConfig(**length, decay=draw.choice(("cosine", "linear", "sqrt")))
        config = ScheduleConfig(name, **own)
        factor = build_schedule(config, total)
        steps = list(range(1, total + 1))
        draw.shuffle(steps)  # a function of the step alone
        for step in steps:
            assert factor(step) == pytest.approx(stated(config, total, step), rel=1e-12, abs=1e-15)
        after = [factor(step) for step in range(max(1, config.warmup_steps), total + 2)]
        assert after == sorted(after, reverse=True)
        assert all(config.min_lr_ratio * (name in FALLING) <= value <= 1 for value in after)


def test_wsd_is_at_the_peak_until_its_last_steps():
    config = ScheduleConfig("wsd", warmup_steps=2, min_lr_ratio=0.0, wsd=WSDConfig(4))
    factor = build_schedule(config, 10)
    assert [factor(step) for step in (1, 2, 3, 6)] == [0.5, 1, 1, 1]
    assert [factor(step) for step in (7, 8, 9, 10)] == [
        0.5,
        1 - math.sqrt(0.5),
        1 - math.sqrt(0.75),
        0,
    ]
    longer = build_schedule(config, 20)
    assert [longer(step) for step in range(1, 17)] == [0.5] + [1.0] * 15


def test_rex_by_numbers_of_the_paper():
    factor = build_schedule(ScheduleConfig("rex", min_lr_ratio=0.0), 4)
    assert [factor(step) for step in (1, 2, 3, 4)] == pytest.approx([6 / 7, 2 / 3, 2 / 5, 0])


def test_none_is_one_and_takes_no_warm_up():
    factor = build_schedule(ScheduleConfig("none"), 1)
    assert [factor(step) for step in (1, 2, 1000)] == [1, 1, 1]
    with rejects("warmup_steps", 3, "foreign"):
        ScheduleConfig("none", warmup_steps=3)


def test_keys_of_another_name_are_rejected():
    for name in ("constant", "inverse_sqrt", "none"):
        with rejects("min_lr_ratio", 0.2, "foreign", where=f"'{name}'"):
            ScheduleConfig(name, min_lr_ratio=0.2)
    for name in (*NAMES, "none", "my_lab:schedule"):
        if name == "wsd":
            continue
        for key, value in (("decay", "linear"), ("decay_steps", 3), ("decay_fraction", 0.5)):
            with rejects(f"wsd.{key}", value, "foreign", where=f"'{name}'"):
                ScheduleConfig(name, wsd=WSDConfig(**{key: value}))
        ScheduleConfig(name, wsd=WSDConfig())  # as a written configuration has it


@pytest.mark.parametrize(
    ("key", "value", "code", "others"),
    [
        ("decay_steps", 0, "range", {}),
        ("decay_fraction", 0.0, "range", {}),
        ("decay_fraction", 1.5, "range", {}),
        ("decay_fraction", math.nan, "range", {}),
        ("decay_steps", 3, "excludes", {"decay_fraction": 0.3}),
        ("decay", "exp", "unknown", {}),
    ],
)
def test_a_decay_that_cannot_be_is_rejected(key, value, code, others):
    with rejects(key, value, code, where="wsd: "):
        WSDConfig(**{key: value}, **others)


def test_a_warm_up_and_a_decay_that_overlap_are_rejected():
    config = ScheduleConfig("wsd", warmup_steps=7, wsd=WSDConfig(4))
    with rejects("warmup_steps", 7, "overlap", where="schedule: "):
        build_schedule(config, 10)
    assert build_schedule(config, 11)(7) == 1.0


@pytest.mark.parametrize(("warmup", "total"), [(10, 10), (11, 10), (1, 1)])
def test_a_warm_up_as_long_as_the_run_is_rejected(warmup, total):
    with rejects("warmup_steps", warmup, "above_steps", where="schedule: "):
        build_schedule(ScheduleConfig(warmup_steps=warmup), total)


def test_no_steps_and_step_zero_are_rejected():
    with rejects("total_steps", 0):
        build_schedule(ScheduleConfig(), 0)
    for name in (*NAMES, "none"):
        with rejects("step", 0):
            build_schedule(ScheduleConfig(name, warmup_steps=3 * (name != "none")), 10)(0)


def test_all_problems_of_a_config_in_one_error():
    with rejects("name", "", "missing") as error:
        ScheduleConfig(name="", warmup_steps=-1, min_lr_ratio=1.5)
    assert len(error.value.problems) == 3
    assert_problem(error.value, "warmup_steps", -1, "range")
    with rejects("min_lr_ratio", math.nan, "range"):
        ScheduleConfig(min_lr_ratio=math.nan)


def test_an_unknown_name_gets_the_nearest_known_one():
    with rejects("schedule.name", "cosin", "unknown", where="'cosine'"):
        build_schedule(ScheduleConfig("cosin"), 10)


def test_a_schedule_by_import_path(monkeypatch):
    module = types.ModuleType("example_lab")
    module.half = lambda config, total_steps: lambda step: 0.5
    monkeypatch.setitem(sys.modules, "example_lab", module)
    assert build_schedule(ScheduleConfig("example_lab:half"), 10)(3) == 0.5
    for path in ("example_lab:other", "no_such_module_here:build", "example_lab:"):
        with rejects("schedule.name", path, "import"):
            build_schedule(ScheduleConfig(path), 10)
