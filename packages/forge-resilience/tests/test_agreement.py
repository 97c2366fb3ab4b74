"""One vote a step, the same answer on every rank."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist

from forge_resilience import Agreement, Decision, Vote
from forge_testing import run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

STRANGE = [Vote(), Vote(stop=15, count=3), Vote(save=True, fault=65, count=4), Vote(digest=9)]


def decide(votes: list[Vote]) -> Decision:
    """On one rank of many; three steps at once, as votes of later steps must not mix."""
    agreement = Agreement(dist.group.WORLD)
    quiet = agreement.start(Vote(count=1))
    pending = agreement.start(votes[dist.get_rank()])
    again = agreement.start(Vote(stop=1))
    assert quiet.wait() == Decision((Vote(count=1),) * len(votes))
    assert again.wait().stop == (0, 1)
    return pending.wait()


def test_one_process_decides_for_itself() -> None:
    decision = Agreement().start(Vote(stop=signal.SIGTERM, count=7)).wait()
    assert (decision.stop, decision.count, decision.save) == ((0, 15), 7, False)
    assert Agreement().exchange({"a": 1}) == [{"a": 1}]


@pytest.mark.distributed
def test_every_rank_gets_the_votes_of_all() -> None:
    decisions = run_on_ranks(4, decide, STRANGE)
    assert len(set(decisions)) == 1
    decision = decisions[0]
    assert decision.votes == tuple(STRANGE)
    assert decision.stop == (1, signal.SIGTERM)
    assert decision.save
    assert decision.faults == {2: 65}
    assert decision.mismatched_ranks == [3]
    assert decision.count == 7


@pytest.mark.distributed
def test_digests_of_64_bits_and_large_counts_arrive_exactly() -> None:
    votes = [Vote(digest=-(2**63), count=2**40 + n, counts=(n, 2**60)) for n in range(2)]
    (decision, _) = run_on_ranks(2, decide, votes)
    assert decision.mismatched_ranks == []
    assert decision.count == 2**41 + 1
    assert decision.counts == (1, 2**61)


def tell() -> list[object]:
    rank = dist.get_rank()
    return Agreement(dist.group.WORLD).exchange(None if rank else {"problem": "ä" * 40})


@pytest.mark.distributed
def test_plain_data_of_unequal_length_is_exchanged() -> None:
    assert run_on_ranks(2, tell) == [[{"problem": "ä" * 40}, None]] * 2


def decide_without_a_group() -> tuple[Decision, Decision, list[int], list[int]]:
    rank = dist.get_rank()
    agreement, alone = Agreement(), Agreement(alone=True)
    vote = Vote(stop=15 * rank, count=3)
    return (
        agreement.start(vote).wait(),
        alone.start(vote).wait(),
        agreement.exchange(rank),
        alone.exchange(rank),
    )


@pytest.mark.distributed
def test_F95_without_a_group_the_default_group_decides_unless_one_process_is_chosen() -> None:
    told = run_on_ranks(2, decide_without_a_group)
    for rank, (decision, own, all_ranks, mine) in enumerate(told):
        assert (decision.stop, decision.count, all_ranks) == ((1, 15), 6, [0, 1])
        assert (own.count, mine) == (3, [rank])
        assert own.stop == (None if rank == 0 else (0, 15))


def test_F95_a_group_and_one_process_contradict_each_other() -> None:
    with rejects("alone", True, "excludes"):
        Agreement(object(), alone=True)


def no_host_group() -> None:
    real, dist.get_backend_config = dist.get_backend_config, lambda group: "cuda:nccl"
    try:
        with rejects("group", "cuda:nccl", "backend"):
            Agreement().start(Vote())
    finally:
        dist.get_backend_config = real


@pytest.mark.distributed
def test_F95_a_default_group_without_cpu_tensors_is_rejected() -> None:
    run_on_ranks(2, no_host_group)


HIGH = "f" + "0" * 15


@pytest.mark.parametrize("digest", [HIGH, int(HIGH, 16), int(HIGH, 16) - 2**64, HIGH.upper()])
def test_F112_a_vote_takes_the_digest_of_a_batch(digest: int | str) -> None:
    assert Vote(digest=digest) == Vote(digest=-(2**60))
    assert Vote(digest=format(7, "016x")) == Vote(digest=7)


@pytest.mark.distributed
def test_F112_digests_with_the_top_bit_travel_between_ranks() -> None:
    (decision, _) = run_on_ranks(2, decide, [Vote(digest=HIGH), Vote(digest=int(HIGH, 16))])
    assert decision.mismatched_ranks == []
    (decision, _) = run_on_ranks(2, decide, [Vote(digest=HIGH), Vote(digest="0" * 16)])
    assert decision.mismatched_ranks == [1]


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("digest", "abc", "format"),
        ("digest", "g" * 16, "format"),
        ("digest", "0x" + "0" * 14, "format"),
        ("digest", 2**64, "range"),
        ("digest", -(2**63) - 1, "range"),
        ("count", 10**4000, "finite"),
        ("count", float("nan"), "finite"),
        ("fault", None, "type"),
        ("stop", "TERM", "type"),
    ],
)
def test_F112_votes_that_no_rank_could_send_are_rejected_when_made(
    key: str, value: object, code: str
) -> None:
    with rejects(key, value, code):
        Vote(**{key: value})  # type: ignore[arg-type]


@pytest.mark.distributed
def test_counts_are_float64_added_in_the_order_of_ranks() -> None:
    """Bit by bit: neither rounded to fewer digits on the way nor added in another order."""
    counts = [1e16, 1.0, -1e16, 0.1]
    decisions = run_on_ranks(4, decide, [Vote(count=count) for count in counts])
    assert {decision.count for decision in decisions} == {((1e16 + 1.0) - 1e16) + 0.1}


def test_F112_a_count_may_be_a_tensor() -> None:
    assert Vote(count=torch.tensor(5)) == Vote(count=5)  # type: ignore[arg-type]


def test_batches_without_labels_are_reported() -> None:
    same = Vote(digest=1, count=2.0)
    assert Decision((same, same)).data_problem == Decision((Vote(),)).data_problem == ""
    assert "[1]" in Decision((same, Vote(digest=2, count=2.0))).data_problem
    for count in (1e-39, -4e38):
        assert Decision((Vote(count=count),)).data_problem
