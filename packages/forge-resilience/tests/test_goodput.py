"""The ledger beside a slow count, Daly's interval beside a search, the bounds beside known tables."""

import math
import random

import pytest

from forge_resilience.goodput import (
    CAUSES,
    daly_interval,
    ettr,
    goodput,
    mean_time_bounds,
    process_start_time,
    read_goodput_table,
)
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def event(name, time, **fields):
    return {"event": name, "time": time, **fields}


STORY = [
    event("start", 10.0, began=4.0, step=0, world_size=2),
    event("save_staged", 21.0, step=10, seconds=1.0),
    event("pause", 21.0, cause="save", step=10, seconds=1.0),
    event("save", 23.0, step=10, seconds=3.0),
    event("evaluation", 30.0, step=19, seconds=2.0),
    # killed at 34, noticed and started again
    event("resume", 47.0, began=40.0, step=10, seconds=3.0, world_size=2, reached={"step": 22, "time": 34.0}),
    event("pause", 60.0, cause="save", step=20, seconds=1.5),
    event("save", 60.0, step=20, seconds=1.5),
    event("stop", 60.5, step=20),
    event("resume", 112.0, began=100.0, step=20, seconds=4.0, world_size=4),
    event("hang", 130.0, rank=1, step=25, seconds=8.0),
    event("resume", 140.0, began=131.0, step=20, seconds=2.0, world_size=4),
    event("done", 150.0, step=30),
]  # fmt: skip


def test_a_story_by_hand():
    ledger = read_goodput_table(STORY)
    seconds = {cause: ms / 1000 for cause, ms in ledger.milliseconds().items() if ms}
    assert seconds == {
        "steps": (20 - 10) + (58.5 - 47) + 0.5 + (150 - 140),
        "recompute": (28 - 21) + (34 - 30) + (122 - 112),  # back to step 10, then to step 20
        "start": 6 + 4 + 8 + 7,
        "load": 3 + 4 + 2,
        "save": 1 + 1.5,
        "evaluate": 2,
        "hung": 8,
        "down": (40 - 34) + (131 - 130),
        "queue": 100 - 60.5,
    }
    assert sum(ledger.milliseconds().values()) == ledger.wall_ms == 146_000
    assert (ledger.lives, ledger.losses, ledger.stops, ledger.steps_done) == (4, 2, 1, 30)
    hours = ledger.gpu_hours()
    assert hours["down"] == hours["queue"] == 0
    assert hours["steps"] == pytest.approx((22 * 2 + 10 * 4) / 3600)


def test_a_checkpoint_that_was_damaged_undoes_the_earlier_attempts_too():
    resume = event("resume", 70.0, began=70.0, step=10, world_size=2)
    ledger = read_goodput_table([*STORY[:8], resume, event("done", 71.0, step=11)])
    assert ledger.milliseconds()["steps"] == 10_000 + 1_000
    assert sum(ledger.milliseconds().values()) == ledger.wall_ms


def test_writing_a_profile_is_no_work():
    story = [*STORY[:4], event("profile", 33.0, step=21, rank=0, seconds=4.0), event("done", 40.0)]
    found = read_goodput_table(story).milliseconds()
    assert (found["profile"], found["steps"]) == (4_000, 10_000 + 8_000 + 7_000)


def test_a_rollback_undoes_steps_of_the_same_attempt():
    story = [*STORY[:4], event("rollback", 33.0, step=21, to_step=10), event("done", 40.0, step=30)]
    ledger = read_goodput_table(story)
    assert ledger.milliseconds()["recompute"] == 33_000 - 21_000
    assert (ledger.losses, ledger.steps_done) == (0, 30)


def test_the_save_of_a_stop_was_waited_for():
    story = [*STORY[:4], event("save", 31.0, step=19, seconds=2.0), event("stop", 31.5, step=19)]
    ledger = read_goodput_table(story)
    assert ledger.milliseconds()["save"] == 1_000 + 2_000
    assert ledger.milliseconds()["steps"] == 10_000 + 8_000 + 500
    assert ledger.saves == (1.0, 2.0)


def test_a_run_that_goes_on_ends_at_its_last_sign():
    assert read_goodput_table(STORY[:4], last_sign=29.5).milliseconds()["steps"] == 10_000 + 8_500
    assert read_goodput_table(STORY[:4], last_sign=1.0).wall_ms == 19_000


def test_spans_add_up_to_the_wall_clock_whatever_the_journal_holds():
    """Random events at random times, also of a clock that goes back, and lines of others."""
    names = ["start", "resume", "save", "save_staged", "pause", "evaluation", "profile", "hang", "rollback", "stop", "done"]  # fmt: skip
    for seed in range(300):
        draw = random.Random(seed)
        now, events = 1e9, []
        for _ in range(draw.randrange(1, 40)):
            now += draw.uniform(-5, 30)
            fields = {
                "step": draw.randrange(50),
                "seconds": draw.choice([None, draw.uniform(0, 40)]),
            }
            fields |= {"began": now - draw.uniform(-3, 20), "cause": draw.choice(["save", "other"])}
            fields |= {"reached": draw.choice([None, {}, {"step": 7, "time": now - draw.random()}])}
            events.append(event(draw.choice(names), now, world_size=draw.randrange(1, 5), **fields))
        ledger = read_goodput_table([{"event": "of others"}, *events])
        for before, after in zip(ledger.spans, ledger.spans[1:]):
            assert before.end == after.begin
        assert all(span.begin < span.end for span in ledger.spans)
        assert sum(ledger.milliseconds().values()) == ledger.wall_ms
        assert set(ledger.milliseconds()) == set(CAUSES)
        assert all(isinstance(line, str) for line in goodput(ledger).lines())


@pytest.mark.parametrize(
    "wrong", ["x", None, [1], {"a": 1}, 1.5, math.nan, -(10**30), "9999-99-99"]
)
@pytest.mark.parametrize("name", ["time", "began", "step", "seconds", "world_size", "reached", "to_step", "cause", "event"])  # fmt: skip
def test_fields_of_other_types_are_left_out(name, wrong):
    kinds = ("start", "resume", "pause", "evaluation", "save", "rollback", "hang", "stop", "done")
    for kind in kinds:
        odd = event(kind, 61.0, step=20) | {name: wrong}
        ledger = read_goodput_table(
            [*STORY[:9], odd, *STORY[9:], event("resume", 200.0, reached={name: wrong})]
        )
        assert sum(ledger.milliseconds().values()) == ledger.wall_ms
        assert goodput(ledger).wall_seconds == pytest.approx(ledger.wall_ms / 1000)


def test_an_empty_journal_is_an_empty_table():
    found = goodput(read_goodput_table([]))
    assert (found.wall_seconds, found.ettr, found.best_interval) == (0.0, 0.0, None)


def test_figures_of_the_story():
    found = goodput(read_goodput_table(STORY))
    assert found.ettr == pytest.approx(32 / 146)
    up = 146 - 39.5 - 7
    assert found.mean_time == pytest.approx(up / 2)
    assert found.save_seconds == pytest.approx(1.25)
    assert found.restart_seconds == pytest.approx((25 + 9) / 4 + (8 + 7) / 2)
    assert found.save_interval == pytest.approx((32 + 21) / 2)
    assert found.best_interval == pytest.approx(daly_interval(1.25, up / 2))
    assert (found.losses, found.stops) == (2, 1)


def _best_by_search(delta, restart, mean):
    """Where the ETTR formula is largest: by thirds."""
    low, high = 1e-9, 20 * mean
    for _ in range(300):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        if ettr(a, delta, restart, mean) < ettr(b, delta, restart, mean):
            low = a
        else:
            high = b
    return low


@pytest.mark.parametrize("delta", [0.05, 1.2, 30.0, 300.0])
@pytest.mark.parametrize("mean", [3600.0, 11_124.0, 1e6])
def test_dalys_interval_is_that_of_a_search_over_the_formula(delta, mean):
    best = _best_by_search(delta, 90.0, mean)
    assert daly_interval(delta, mean) == pytest.approx(best, rel=2e-3)
    got, most = (ettr(tau, delta, 90.0, mean) for tau in (daly_interval(delta, mean), best))
    assert got == pytest.approx(most, rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "delta", "restart", "wanted"),
    [(16_384, 300, 1800, 0.668), (100_000, 300, 1800, 0.198), (16_384, 1.2, 90, 0.978), (100_000, 1.2, 90, 0.918)],
)  # fmt: skip
def test_published_rates_give_the_known_shares(ranks, delta, restart, wanted):
    """419 losses in 54 days on 16,384 devices: 1.97e-5 a device-hour."""
    mean = 3600 / (1.97e-5 * ranks)
    assert ettr(daly_interval(delta, mean), delta, restart, mean) == pytest.approx(wanted, abs=1e-3)


def test_corners_of_the_formulas():
    assert daly_interval(0.0, 100.0) == 0.0
    assert daly_interval(200.0, 100.0) == 100.0
    assert ettr(10.0, 1.0, 1e6, 1.0) == 0.0
    with rejects("save", -1.0):
        daly_interval(-1.0, 100.0)
    with rejects("mean_time", 0.0):
        daly_interval(1.0, 0.0)


@pytest.mark.parametrize(
    ("losses", "low", "high"),
    [(1, 0.0253, 5.572), (3, 0.6187, 8.767), (10, 4.795, 18.39)],
)
def test_bounds_are_those_of_the_poisson_tables(losses, low, high):
    """Garwood's 95 % limits of a Poisson mean."""
    least, most = mean_time_bounds(1000.0, losses)
    assert 1000 / least == pytest.approx(high, rel=1e-3)
    assert most is not None
    assert 1000 / most == pytest.approx(low, rel=1e-2)


def test_no_loss_is_the_rule_of_three():
    low, high = mean_time_bounds(3000.0, 0)
    assert low == pytest.approx(3000.0 / -math.log(0.05))
    assert high is None


def test_process_start_time_is_before_now_and_does_not_move():
    first, second = process_start_time(), process_start_time()
    assert abs(first - second) < 0.1


def test_F197_a_stopped_run_that_resumes_at_an_earlier_step_loses_the_steps_between():
    """The save of the stop at step 20 is gone when the job starts again."""
    story = [*STORY[:1], event("save", 23.0, step=10), event("stop", 30.0, step=20)]
    resume = event("resume", 50.0, began=40.0, step=10, seconds=2.0, world_size=2)
    found = read_goodput_table([*story, resume, event("done", 60.0, step=20)]).milliseconds()
    assert (found["steps"], found["recompute"]) == (13_000 + 10_000, 7_000)
