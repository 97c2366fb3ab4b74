"""One vote a step, the same answer on every rank."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

from forge_resilience import Agreement, Decision, Vote
from forge_testing import run_on_ranks

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


def test_one_process_decides_alone() -> None:
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
    assert decision.strangers == [3]
    assert decision.count == 7


@pytest.mark.distributed
def test_digests_of_64_bits_and_large_counts_arrive_whole() -> None:
    votes = [Vote(digest=-(2**63), count=2**40), Vote(digest=-(2**63), count=2**40 + 1)]
    (decision, _) = run_on_ranks(2, decide, votes)
    assert decision.strangers == []
    assert decision.count == 2**41 + 1


def tell() -> list[object]:
    rank = dist.get_rank()
    return Agreement(dist.group.WORLD).exchange(None if rank else {"problem": "ä" * 40})


@pytest.mark.distributed
def test_plain_data_of_unequal_length_is_exchanged() -> None:
    assert run_on_ranks(2, tell) == [[{"problem": "ä" * 40}, None]] * 2
