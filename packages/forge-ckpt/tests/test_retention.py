"""Which checkpoints are kept, against a slow rule that looks at one step at a time."""

import itertools
import math
import random

import pytest

from forge_ckpt.retention import Keep, outdated
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

POWERS = {0, *(2**n for n in range(20))}


def is_kept(step, steps, metrics, keep):
    """The rule as a sentence for one step; ``milestones`` is None or "powers_of_2" here."""
    if sum(other > step for other in steps) < keep.last:
        return True
    if keep.every and step % keep.every == 0:
        return True
    if keep.milestones and step in POWERS:
        return True
    values = {
        s: metrics[s][keep.best]
        for s in steps
        if s in metrics and keep.best in metrics[s] and math.isfinite(metrics[s][keep.best])
    }
    if step not in values:
        return False
    return all(
        (values[step] < value if keep.mode == "min" else values[step] > value)
        or (values[step] == value and step >= other)
        for other, value in values.items()
    )


KINDS = list(
    itertools.product(
        (1, 2, 5, 100), (0, 1, 7, 10), (None, "loss"), ("min", "max"), (None, "powers_of_2")
    )
)


@pytest.mark.parametrize(("last", "every", "best", "mode", "milestones"), KINDS)
def test_equals_the_rule_of_one_step(last, every, best, mode, milestones):
    keep = Keep(last, every, best, mode, milestones)
    rng = random.Random(str(keep))
    for count in (0, 1, 2, 3, 17):
        steps = rng.sample(range(40), count)
        # few distinct values make ties; some saves have no value, another metric, or none finite
        values = [0.5, 0.5, 1.0, -2.0, math.nan, math.inf, -math.inf]
        metrics = {
            s: {rng.choice(["loss", "loss", "other"]): rng.choice(values)}
            for s in steps
            if rng.random() < 0.8
        }
        found = outdated(steps, metrics, keep)
        assert found == sorted(s for s in steps if not is_kept(s, steps, metrics, keep))
        assert not steps or max(steps) not in found


def test_milestones_of_a_caller():
    assert outdated(range(8), {}, Keep(last=1, milestones=lambda step: step in (3, 5))) == [
        0,
        1,
        2,
        4,
        6,
    ]
    assert outdated(range(4), {}, Keep(last=1, milestones="math:isqrt")) == [0]
    assert outdated(range(10), {}, Keep(last=1, milestones="powers_of_2")) == [3, 5, 6, 7]


def test_a_value_counts_only_with_its_save():
    keep = Keep(last=1, best="loss")
    metrics = {1: {"loss": 3.0}, 2: {"loss": 1.0}, 3: {"loss": math.nan}, 9: {"loss": 0.0}}
    assert outdated([1, 2, 3, 4], metrics, keep) == [1, 3], "step 9 is gone"


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("last", 0, "range"),
        ("last", True, "range"),
        ("every", -1, "range"),
        ("every", 2.0, "range"),
        ("best", "", "type"),
        ("mode", "low", "unknown"),
        ("milestones", "primes", "unknown"),
        ("milestones", 3, "unknown"),
        ("milestones", "no_such_module:f", "not_found"),
        ("milestones", "math:no_such", "not_found"),
        ("milestones", "math:pi", "type"),
    ],
)
def test_a_wrong_rule_is_rejected(key, value, code):
    with rejects(key, value, code):
        Keep(**{key: value})


def test_all_wrong_rules_are_reported_at_once():
    with rejects("last", 0, "range") as caught:
        Keep(last=0, mode="x")
    assert_problem(caught.value, "mode", "x", "unknown")
