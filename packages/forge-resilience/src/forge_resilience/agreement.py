"""Decisions that all ranks take in the same step, by one exchange of small numbers between hosts."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import re
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge_resilience._shared.problems import invalid

_INT64 = range(-(2**63), 2**63)
# normal numbers of fp32, because fp32 gradients are divided by the count
_TINY, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True)
class Vote:
    """One rank's vote in a step. Integers of 64 bits and a finite float64, else ValueError.

    Usage: `Vote(stop=stop.number, digest=batch.digest, count=batch.label_weight)`.
    """

    stop: int = 0
    """Number of the stop signal that this rank received, 0 for none."""
    save: bool = False
    """Save after this step."""
    fault: int = 0
    """Exit code of an error with which this rank cannot go on (its data, say), 0 for none."""
    digest: int | str = 0
    """A value that must be equal on all ranks, such as `Batch.digest`: 16 hex digits or an
    integer. Stored as the signed integer of the same 64 bits."""
    count: float = 0.0
    """Added up over the ranks: the valid labels of this rank's part of the batch, or the sum of their weights."""
    saved: int = -1
    """The newest step that this rank knows to be saved, -1 for none: of a save in the background, each rank learns
    it in a step of its own."""
    counts: tuple[int, ...] = ()
    """Further numbers that are added up over the ranks, equally many on each: tokens of the batch by kind, say."""

    def __post_init__(self) -> None:
        values = {"stop": self.stop, "fault": self.fault, "saved": self.saved}
        values["digest"] = _digest_bits(self.digest)
        for name, value in values.items():
            object.__setattr__(self, name, _int64(name, value))
        object.__setattr__(self, "save", bool(self.save))
        object.__setattr__(self, "count", _finite("count", self.count))
        object.__setattr__(self, "counts", tuple(_int64("counts", n) for n in self.counts))


@dataclass(frozen=True)
class Decision:
    """The votes of all ranks, in the order of ranks; the same on each of them."""

    votes: tuple[Vote, ...]

    @property
    def stop(self) -> tuple[int, int] | None:
        """(rank, signal number) of the first rank that received a stop signal; None without one."""
        return next(((rank, v.stop) for rank, v in enumerate(self.votes) if v.stop), None)

    @property
    def save(self) -> bool:
        """True if any rank asks for a save."""
        return any(vote.save for vote in self.votes)

    @property
    def saved(self) -> int:
        """The newest step that any rank knows to be saved; -1 for none."""
        return max(vote.saved for vote in self.votes)

    @property
    def faults(self) -> dict[int, int]:
        """Rank -> exit code of the ranks that cannot go on."""
        return {rank: vote.fault for rank, vote in enumerate(self.votes) if vote.fault}

    @property
    def mismatched_ranks(self) -> list[int]:
        """Ranks whose digest differs from that of rank 0: they are at another position of the data."""
        return [r for r, vote in enumerate(self.votes) if vote.digest != self.votes[0].digest]

    @property
    def count(self) -> float:
        """Sum of the counts in float64, added in the order of ranks: the same bits on each of them."""
        total = 0.0
        for vote in self.votes:  # not sum(), which rounds otherwise from Python 3.12 on
            total += vote.count
        return total

    @property
    def data_problem(self) -> str:
        """Why the global batch cannot be trained on, for a user; "" if it can."""
        if self.mismatched_ranks:
            rule = f"ranks {self.mismatched_ranks} are at another position of the data than rank 0"
            return (
                f"{rule}; configuration and checkpoint must be the same on all nodes: compare them"
            )
        if self.count and not _TINY <= abs(self.count) <= _LARGEST:
            rule = f"must be 0 or between {_TINY:.1e} and {_LARGEST:.1e}, as fp32 gradients are divided by it"
            return f"the labels of the global batch weigh {self.count:g}, which {rule}; scale the weights"
        return ""

    @property
    def counts(self) -> tuple[int, ...]:
        """Sums of the further counts."""
        return tuple(map(sum, zip(*(vote.counts for vote in self.votes))))


class Agreement:
    """Agreed decisions: votes of all ranks, exchanged on the host while the device computes.

        agreement = Agreement()
        pending = agreement.start(Vote(stop=signal_number, count=num_labels))
        ...                                           # forward
        decision = pending.wait()                     # equal on every rank

    `group` is a process group that carries CPU tensors (gloo); without one the default group serves
    as soon as there is one, and a process without any decides by itself. With `alone=True` a rank of several
    decides by itself, too. Every rank calls every method, in the same order. Cost of a vote: one
    all-gather of 48 bytes a rank, and 8 for each of `counts`, between hosts, no device sync; `wait` blocks until the slowest rank
    has voted. All values of all ranks come back, not only their maximum, so a decision can name who
    asked for it.

    Raises ValueError for a group without CPU tensors. A rank that dies raises RuntimeError in the
    others at once, one that hangs after the group's timeout.
    """

    def __init__(self, group: Any = None, *, alone: bool = False) -> None:
        if alone and group is not None:
            raise invalid("alone", "excludes", alone, "excludes a group", "give one of them")
        self.group = group
        self.alone = alone

    def start(self, vote: Vote) -> PendingDecision:
        """Send this rank's vote; returns at once."""
        return PendingDecision(self._ranks(), vote)

    def _ranks(self) -> Any:
        """The group to vote in; None for a process that decides by itself."""
        # not imported here, because there is no group as long as nothing has imported it
        dist = sys.modules.get("torch.distributed")
        if self.alone or dist is None or not (dist.is_available() and dist.is_initialized()):
            return self.group
        group = self.group or dist.group.WORLD
        if dist.get_world_size(group) == 1:
            return None
        backends = dist.get_backend_config(group)
        if "cpu:" not in backends:
            fix = 'give a host group, such as torch.distributed.new_group(backend="gloo")'
            raise invalid("group", "backend", str(backends), "must carry CPU tensors", fix)
        return group

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks; a value is plain data that JSON can hold.

        For start-up and other rare moments: two collectives, blocking. Usage:
        `problems = [p for p in agreement.exchange(problem) if p]`.
        """
        group = self._ranks()
        if group is None:
            return [value]
        import torch
        import torch.distributed as dist

        text = bytearray(json.dumps(value).encode())
        world = dist.get_world_size(group)
        sizes = torch.zeros(world, 1, dtype=torch.int64)
        dist.all_gather(list(sizes), torch.tensor([len(text)]), group=group)
        longest = int(sizes.max())
        own = torch.frombuffer(text.ljust(longest, b" "), dtype=torch.uint8)
        gathered = torch.empty(world, longest, dtype=torch.uint8)
        dist.all_gather(list(gathered), own, group=group)
        return [json.loads(bytes(row.tolist())) for row in gathered]


class PendingDecision:
    """A vote of this step that other ranks may not have sent yet; `wait` returns the decision."""

    def __init__(self, group: Any, vote: Vote) -> None:
        self._work: Any = None
        if group is None:
            self._votes: Any = [_vote_to_integers(vote)]
            return
        import torch
        import torch.distributed as dist

        own = torch.tensor(_vote_to_integers(vote), dtype=torch.int64)
        self._votes = torch.empty(dist.get_world_size(group), len(own), dtype=torch.int64)
        self._work = dist.all_gather(list(self._votes), own, group=group, async_op=True)

    def wait(self) -> Decision:
        """Block until every rank has voted."""
        if self._work is not None:
            self._work.wait()
            self._votes, self._work = self._votes.tolist(), None
        return Decision(tuple(_vote_from_integers(row) for row in self._votes))


def _vote_to_integers(vote: Vote) -> tuple[int, ...]:
    """The integers of a vote, in the order of the exchange; the float64 count as its bits."""
    (count,) = struct.unpack("<q", struct.pack("<d", vote.count))
    return vote.stop, vote.save, vote.fault, int(vote.digest), count, vote.saved, *vote.counts


def _vote_from_integers(row: Sequence[int]) -> Vote:
    """The inverse of `_vote_to_integers`."""
    stop, save, fault, digest, bits, saved, *counts = map(int, row)
    (count,) = struct.unpack("<d", struct.pack("<q", bits))
    return Vote(stop, bool(save), fault, digest, count, saved, tuple(counts))


def _digest_bits(digest: int | str) -> int:
    """The signed integer of a digest's 64 bits."""
    if isinstance(digest, str):
        if not re.fullmatch("[0-9a-fA-F]{16}", digest):
            rule = "must be 16 hex digits or an integer"
            raise invalid("digest", "format", digest, rule, "use Batch.digest")
        digest = int(digest, 16)
    value = _integer("digest", digest)
    return value - 2**64 if 2**63 <= value < 2**64 else value


def _finite(name: str, value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(number := float(value)):
            return number
    rule = "must be a finite number of 64 bits"
    raise invalid(name, "finite", value, rule, "use a smaller float")


def _int64(name: str, value: Any) -> int:
    value = _integer(name, value)
    if value not in _INT64:
        rule = "must fit a signed integer of 64 bits"
        raise invalid(name, "range", value, rule, "use a smaller number")
    return value


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise invalid(name, "type", value, "must be an integer", "use one") from None
