"""Verdicts and what follows, beside a slow list of numbers."""

from __future__ import annotations

import json
import math
import random
import statistics
from typing import Any

import pytest
import torch

from forge_resilience.policy import (
    NonfiniteConfig,
    NumericsPolicy,
    RollbackConfig,
    SpikeConfig,
    StepVerdict,
)
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

NAN = math.nan


def judge(policy: NumericsPolicy, losses: list[float], norms: list[float] | None = None) -> Any:
    norms = norms or [1.0] * len(losses)
    return [float(policy.judge(torch.tensor(a), torch.tensor(b))) for a, b in zip(losses, norms)]


def run(
    policy: NumericsPolicy, losses: list[float], every: int, start: int = 0
) -> list[StepVerdict]:
    """The outcomes of steps that are read `every` so many steps."""
    found = []
    for step, loss in enumerate(losses, start + 1):
        policy.judge(torch.tensor(loss), torch.tensor(1.0))
        if step % every == 0:
            found.append(policy.decide(policy.take().tolist(), step))
    return found


def noise(count: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [2.0 + 0.1 * rng.gauss(0, 1) for _ in range(count)]


# ---- not finite


def test_F34_a_bad_gradient_with_a_finite_loss_masks_the_update() -> None:
    policy = NumericsPolicy()
    assert judge(policy, [2.0, 2.0, NAN, 2.0], [1.0, math.inf, 1.0, 1.0]) == [0, 1, 1, 0]
    assert policy.take().tolist() == [0, 1, 1, 0]
    assert policy.take().tolist() == []


@pytest.mark.parametrize("every", [1, 2, 3, 12])
def test_more_in_a_row_than_allowed_have_the_same_consequence_however_often_the_host_looks(
    every: int,
) -> None:
    losses = [1, NAN, 1, NAN, NAN, 1, 1, NAN, NAN, NAN, NAN, 1]
    found = run(NumericsPolicy(NonfiniteConfig("skip", 2)), losses, every)
    assert [step for o in found for step in o.skipped] == [2, 4, 5, 8, 9, 10, 11]
    assert max(o.in_a_row for o in found) == 4
    stops = [o for o in found if o.action == "stop"]
    assert (stops[0].cause, stops[0].first) == ("nonfinite", 8)
    assert stops[0].last in (10, 11)  # the first look behind the third


def test_F36_a_single_bad_step_ends_a_run_that_skips_none() -> None:
    (outcome,) = run(NumericsPolicy(NonfiniteConfig("stop")), [1, 1, NAN], 3)
    assert (outcome.action, outcome.first, outcome.last) == ("stop", 3, 3)


def test_going_back_answers_all_consecutive_bad_steps() -> None:
    policy = NumericsPolicy(NonfiniteConfig("rollback", 1))
    (outcome,) = run(policy, [1, 1, NAN, NAN, NAN, 1, 1, NAN], 8)
    assert (outcome.action, outcome.first, outcome.last) == ("rollback", 3, 5)
    assert outcome.skipped == (3, 4, 5, 8)


@pytest.mark.lane("quick")
def test_verdicts_of_many_steps_wait_in_few_tensors() -> None:
    policy = NumericsPolicy(NonfiniteConfig("skip", 1))
    losses = [NAN if step in (3, 1500, 1501) else 1.0 for step in range(1, 2501)]
    (outcome,) = run(policy, losses, 2500)
    assert outcome.skipped == (3, 1500, 1501)
    assert (outcome.action, outcome.first, outcome.last) == ("stop", 1500, 1501)
    judge(policy, [1.0] * 2500)
    assert len(policy._verdicts) <= 1001


# ---- spikes


@pytest.mark.parametrize("of", ["loss", "grad_norm", "both"])
def test_spikes_are_those_of_a_list_of_the_last_good_steps(of: Any) -> None:
    policy = NumericsPolicy(NonfiniteConfig("skip", 9), SpikeConfig("skip", 3.0, 16, of))
    rng = random.Random(1)
    pairs = [(2 + 0.1 * rng.gauss(0, 1), 1 + 0.1 * rng.gauss(0, 1)) for _ in range(200)]
    for step in (5, 40, 41, 42, 90):
        pairs[step] = pairs[step][0] + 2, pairs[step][1]
    for step in (60, 90, 120):
        pairs[step] = pairs[step][0], NAN if step == 90 else 7.0
    kept: list[list[float]] = [[], []]
    wanted = []
    for pair in pairs:
        if not all(map(math.isfinite, pair)):
            wanted.append(1)
            continue
        above = [False, False]
        for i, value in enumerate(pair):
            row = kept[i][-16:]
            if len(row) == 16:
                limit = statistics.fmean(row) + 3.0 * statistics.stdev(row)
                above[i] = value > limit
                value = min(value, limit)
            kept[i].append(value)
        judged = {"loss": above[:1], "grad_norm": above[1:], "both": above}[of]
        wanted.append(2 if any(judged) else 0)
    masks = judge(policy, *(list(column) for column in zip(*pairs)))
    assert policy.take().tolist() == wanted
    assert masks == [float(code > 0) for code in wanted]
    assert wanted.count(2) >= 2


def test_no_verdict_before_the_window_is_full_and_a_lasting_rise_is_no_spike_for_long() -> None:
    policy = NumericsPolicy(spike=SpikeConfig("skip", 6.0, 32))
    found = judge(policy, [*noise(31)[:30], 50.0, *noise(32), *[x + 5 for x in noise(60, 1)]])
    assert sum(found[:63]) == 0
    assert found[63] == 1
    assert sum(found[63:]) < 12
    assert found[-1] == 0


@pytest.mark.lane("quick")
@pytest.mark.parametrize("value", [0.0, 0.1, 1.0])
def test_after_equal_values_a_rise_is_no_spike_for_ever(value: float) -> None:
    policy = NumericsPolicy(spike=SpikeConfig("skip", 6.0, 32))
    assert not any(judge(policy, [value] * 32 + [value + 1] * 400)[-200:])


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_a_spike_has_its_action_at_once(action: Any) -> None:
    policy = NumericsPolicy(NonfiniteConfig("skip", 3), SpikeConfig(action, 6.0, 16))
    losses = [*noise(20), 9.0, NAN, *noise(3)]
    (outcome,) = run(policy, losses, len(losses))
    assert (outcome.action, outcome.cause) == (action, "spike")
    assert (outcome.first, outcome.last, outcome.spikes) == (21, 22, (21,))
    assert policy.can_roll_back == (action == "rollback")


# ---- state


@pytest.mark.parametrize("cut", [10, 25, 40, 41, 42])
def test_a_resumed_policy_decides_as_one_that_never_stopped(cut: int) -> None:
    def make() -> NumericsPolicy:
        return NumericsPolicy(NonfiniteConfig("rollback", 2), SpikeConfig("skip", 4.0, 24))

    losses = noise(80)
    losses[39:43] = [NAN, NAN, NAN, NAN]
    losses[60] = 4.0
    whole, before, after = make(), make(), make()
    wanted = run(whole, losses, 1)
    first = run(before, losses[:cut], 1)
    state = json.loads(json.dumps(before.state_dict()))
    after.load_checks(state)
    after.load_state_dict(state)
    assert after.state_dict() == state, "no step is judged yet"
    assert state["window"][0] == pytest.approx([x for x in losses[:cut] if x == x][-24:])
    assert first + run(after, losses[cut:], 1, start=cut) == wanted
    assert after.state_dict() == whole.state_dict()


def test_a_window_of_another_size_keeps_its_newest_steps() -> None:
    long, short = (NumericsPolicy(spike=SpikeConfig("skip", window=n)) for n in (20, 5))
    judge(long, [float(i) for i in range(30)])
    short.load_state_dict(long.state_dict())
    assert short.state_dict()["window"][0] == [25.0, 26.0, 27.0, 28.0, 29.0]
    long.load_state_dict(short.state_dict())
    assert len(long.state_dict()["window"][0]) == 5
    assert not any(judge(long, [1e9])), "not full"


def test_each_rollback_lowers_the_rate() -> None:
    policy = NumericsPolicy(rollback=RollbackConfig(lr_factor=0.5))
    assert policy.lr_factor == 1.0
    policy.rollbacks = 2
    assert policy.lr_factor == 0.25
    other = NumericsPolicy(rollback=RollbackConfig(lr_factor=0.5))
    other.load_state_dict(policy.state_dict())
    assert other.lr_factor == 0.25


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        {"rollbacks": -1, "in_a_row": 0, "bad_since": 0},
        {"rollbacks": 0, "in_a_row": True, "bad_since": 0},
        {"rollbacks": 0, "in_a_row": 0, "bad_since": 0, "window": [[1.0], []]},
        {"rollbacks": 0, "in_a_row": 0, "bad_since": 0, "window": [["a"], [1.0]]},
        {"rollbacks": 0, "in_a_row": 0, "bad_since": 0, "window": [[NAN], [1.0]]},
    ],
)
def test_a_state_that_no_policy_saved_is_rejected(wrong: Any) -> None:
    windows = isinstance(wrong, dict) and "window" in wrong
    problem = ("policy.window", wrong["window"]) if windows else ("policy", wrong)
    with rejects(*problem, "damaged"):
        NumericsPolicy().load_checks(wrong)


@pytest.mark.parametrize(
    ("kind", "key", "value", "code"),
    [
        (NonfiniteConfig, "action", "sotp", "unknown"),
        (NonfiniteConfig, "max_in_a_row", -1, "range"),
        (NonfiniteConfig, "max_in_a_row", 2, "action"),
        (SpikeConfig, "sigma", 0, "range"),
        (SpikeConfig, "sigma", NAN, "range"),
        (SpikeConfig, "window", 1, "range"),
        (SpikeConfig, "of", "losses", "unknown"),
        (RollbackConfig, "max_rollbacks", 0, "range"),
        (RollbackConfig, "batches_before", -1, "range"),
        (RollbackConfig, "lr_factor", 2.0, "range"),
    ],
)
def test_values_out_of_range_are_rejected(kind: Any, key: str, value: Any, code: str) -> None:
    with rejects(key, value, code):
        kind(**{key: value})


# ---- no labels


def test_F205_a_step_without_labels_is_masked_and_no_value_of_the_window() -> None:
    policy = NumericsPolicy(NonfiniteConfig("stop"), SpikeConfig("stop", 3.0, 4))
    other = NumericsPolicy(NonfiniteConfig("stop"), SpikeConfig("stop", 3.0, 4))
    losses = noise(8)
    judge(other, losses)
    for number, loss in enumerate(losses):
        if number in (2, 7):
            assert float(policy.judge(torch.tensor(0.0), torch.tensor(0.0), labeled=False)) == 1.0
        judge(policy, [loss])
    assert policy.state_dict()["window"] == other.state_dict()["window"]
    outcome = policy.decide(policy.take().tolist(), 10)
    assert (outcome.skipped, outcome.unlabeled, outcome.spikes) == ((3, 9), (3, 9), ())
    assert (outcome.action, outcome.in_a_row) == ("none", 0)


def test_F205_a_step_without_labels_ends_a_run_of_bad_steps() -> None:
    policy = NumericsPolicy(NonfiniteConfig("rollback", 1))
    for number, loss in enumerate([NAN, 1.0, NAN, NAN, 1.0]):
        policy.judge(torch.tensor(loss), torch.tensor(1.0), labeled=number != 1)
    outcome = policy.decide(policy.take().tolist(), 5)
    assert (outcome.action, outcome.first, outcome.last) == ("rollback", 3, 4)
    assert (outcome.skipped, outcome.unlabeled) == ((1, 2, 3, 4), (2,))


def test_an_outcome_has_its_events_and_the_setting_that_ends_a_run() -> None:
    policy = NumericsPolicy(NonfiniteConfig("skip", max_in_a_row=1), SpikeConfig("stop", window=2))
    found = StepVerdict((3, 4, 5, 6), (6,), (3,), 2, "stop", "nonfinite", 4, 5)
    assert found.bad_steps.endswith("steps 4 to 5")
    skips = ("skip", {"step": 5, "skipped": 2, "in_a_row": 2})
    assert list(found.events()) == [
        ("skip", {"step": 3, "unlabeled": 1}),
        skips,
        ("spike", {"step": 6, "spikes": 1}),
    ]
    assert policy.stop_rule("nonfinite").startswith("nonfinite.max_in_a_row")
    assert policy.stop_rule("spike").startswith("spike.action 'stop'")
    assert NumericsPolicy().stop_rule("nonfinite").startswith("nonfinite.action 'stop'")
