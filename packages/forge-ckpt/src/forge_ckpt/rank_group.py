"""Calls that succeed on all ranks of a store or raise on all of them.

Ranks exchange compressed JSON in byte tensors on the CPU. Torch's object collectives are not used:
they pickle, and they need numpy.
"""

import contextlib
import copy
import json
import os
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forge_ckpt._shared.file_bytes import byte_view
from forge_ckpt._shared.problems import Problem, ProblemError, Shown, WithProblems, invalid, show
from forge_ckpt.errors import (
    CheckpointMismatch,
    CorruptCheckpoint,
    StateRefused,
    StepExists,
    StoreInUse,
    has_problems,
    is_problem_error,
)

T = TypeVar("T")
# Begins the text of that RuntimeError, to tell it from others: torch raises the same class for other faults.
LOST_RANKS = "the ranks of this store lost each other"
# Another rank raises the nearest base in this table, because an exception is sent as JSON with one of these names.
_CLASSES: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        CorruptCheckpoint,
        CheckpointMismatch,
        StateRefused,
        StepExists,
        StoreInUse,
        OSError,
        ValueError,
        RuntimeError,
    )
}
# {"kind", "text", "errno", "where", "problems"}: an exception as JSON, to be sent.
_Failure = dict[str, Any]
# {"value": result} or {"failure": _Failure}: the outcome of a call as JSON, to be sent.
_Outcome = dict[str, Any]


class RankGroup:
    """The processes that call the same methods of a store in the same order.

    ``group``: a process group that carries CPU tensors (gloo). Without it the default group is used;
    where that is NCCL alone, a gloo group of all ranks is made, so every rank must construct this.
    Without a process group, or in one of size 1, nothing is communicated. Raises ValueError for a
    group that carries no CPU tensors, or that this process is not in.

    Rank numbers are those of the group. If a rank dies, the next exchange raises RuntimeError on
    the others; if it hangs, after the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = _host_group(group)
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        self.size = 1 if self._group is None else dist.get_world_size(self._group)

    def twin(self) -> "RankGroup":
        """The same ranks on a gloo group of its own, for another thread: exchanges of two threads on one group mix.

        Collective. Its ranks wait up to an hour for each other, as one may write for long.
        """
        if self.size == 1:
            return self
        twin = copy.copy(self)
        self._equalize_group_counts()
        ranks = dist.get_process_group_ranks(self._group)
        twin._group = dist.new_group(
            ranks, timeout=timedelta(hours=1), backend="gloo", use_local_synchronization=True
        )
        return twin

    def _equalize_group_counts(self) -> None:
        """Let all ranks be in as many groups as the others; some join groups of their own.

        new_group(use_local_synchronization=True) makes the name of a group from its ranks and from the number of
        groups that this process is in. Where that differs, ranks wait for each other under two names.
        """
        count = len(dist.distributed_c10d._world.pg_names)
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([count]), group=self._group)
        for _ in range(int(max(counts)) - count):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

    def run_on_all_ranks(self, run: Callable[[], T]) -> T:
        """Call ``run`` on every rank; if it raises on one, all raise that class, with the rank in the message.

        Cost: 8 bytes a rank in one all-gather when it succeeds everywhere.
        """
        if self.size == 1:
            return run()
        value, error = _attempt(run)
        # A rank that failed still takes part in the exchange: the others wait in it.
        with _lost_ranks_explained():
            reports = self._gather(b"" if error is None else _pack(_failure(error)), True)
        failures = {rank: _unpack(report) for rank, report in enumerate(reports) if report}
        if failures:
            self._raise(failures, error)
        return value  # type: ignore[return-value]

    def run_on_rank_0(self, run: Callable[[], Any]) -> Any:
        """Call ``run`` on rank 0; every rank returns its result, plain JSON, or raises its exception.

        Cost: a broadcast of 8 bytes and one of the result.
        """
        if self.size == 1:
            return run()
        outcome, own = _outcome(run) if self.rank == 0 else (None, None)
        return self._broadcast_outcome(outcome, own)

    def map_reduce(self, of_rank: Callable[[], Any], reduce: Callable[[list[Any]], Any]) -> Any:
        """Call ``of_rank`` on every rank and ``reduce``, with the list of results, on rank 0; every rank
        returns its result. All results are plain JSON.

        If ``of_rank`` raises on any rank, ``reduce`` does not run. All ranks raise an exception of either.
        Cost: an all-gather of 8 bytes a rank, a gather to rank 0, the broadcasts of run_on_rank_0.
        """
        if self.size == 1:
            return reduce([of_rank()])
        outcome, own = _outcome(of_rank)
        with _lost_ranks_explained():
            outcomes = [_unpack(data) for data in self._gather(_pack(outcome))]
        if self.rank == 0:
            failures = [(rank, o["failure"]) for rank, o in enumerate(outcomes) if "failure" in o]
            if failures:
                outcome = {"failures": failures}
            else:
                outcome, own = _outcome(lambda: reduce([o["value"] for o in outcomes]))
        return self._broadcast_outcome(outcome, own)

    def _broadcast_outcome(self, outcome: _Outcome | None, own: BaseException | None) -> Any:
        """Return the value of rank 0's outcome on every rank, or raise its exception.

        An outcome with "failures" has those of several ranks, by rank. ``own``: this rank's exception.
        """
        with _lost_ranks_explained():
            outcome = _unpack(self._broadcast(_pack(outcome) if self.rank == 0 else b""))
        assert outcome is not None
        if "failures" in outcome:
            self._raise(dict(outcome["failures"]), own)
        if "failure" in outcome:
            # rank 0 alone ran, so its number would tell nothing
            self._raise({0: outcome["failure"]}, own, name_ranks=False)
        return outcome["value"]

    def _raise(
        self, failures: dict[int, _Failure], own: BaseException | None, name_ranks: bool = True
    ) -> None:
        """Raise the failure of the lowest failed rank, with the same class and message on all ranks.

        ``own``, this rank's exception, is raised unchanged if its class is not in ``_CLASSES`` and this is the
        lowest failed rank, whose caller may catch that class; or all ranks failed alike; or it is an interrupt.
        """
        lowest, report = next(iter(failures.items()))
        alike = len(failures) == self.size and all(f == report for f in failures.values())
        known = type(own) in _CLASSES.values() or (own is not None and is_problem_error(own))
        raised_anew = own is None or isinstance(own, OSError) or known
        interrupted = not isinstance(own, Exception)
        if not raised_anew and (alike or self.rank == lowest or interrupted):
            raise own  # type: ignore[misc]

        ranks = [_rank_names(list(failures))] if name_ranks and not alike else []
        text = ": ".join([*ranks, report["text"]])
        if report["errno"] is not None:
            raise OSError(report["errno"], text) from own
        kind = _CLASSES[report["kind"]]
        problems = [
            Problem(key, code, ... if shown is None else Shown(shown), *texts)
            for key, code, shown, *texts in report["problems"]
        ]
        if problems:
            kind = ProblemError if kind is ValueError else kind
            if issubclass(kind, WithProblems):
                raise kind(problems, ": ".join(filter(None, [*ranks, report["where"]]))) from own
        raise kind(text) from own

    def _gather(self, data: bytes, everywhere: bool = False) -> list[bytes]:
        """The data of every rank, on rank 0 or ``everywhere``; an empty list on the others."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        longest = int(max(sizes))
        if longest == 0:
            return [b""] * self.size

        takes = everywhere or self.rank == 0
        found = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if takes else None
        if everywhere:
            dist.all_gather(found, _padded(data, longest), group=self._group)
        else:
            dist.gather(_padded(data, longest), found, group=self._group, group_dst=0)
        return [_bytes(tensor, int(size)) for tensor, size in zip(found or [], sizes)]

    def _broadcast(self, data: bytes) -> bytes:
        size = torch.tensor([len(data)])
        dist.broadcast(size, group=self._group, group_src=0)
        tensor = _padded(data, int(size))
        dist.broadcast(tensor, group=self._group, group_src=0)
        return _bytes(tensor, int(size))


def _host_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group whose collectives take CPU tensors; None for a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_rank(group) < 0:
        rule, fix = "does not hold this process", "open the store on its ranks only"
        raise invalid("group", "member", ..., rule, fix)
    if dist.get_world_size(group) == 1:
        return None
    backends = dist.get_backend_config(group)
    if any(part.startswith("cpu:") for part in backends.split(",")):
        return group or dist.group.WORLD
    if group is not None:
        fix = 'give a host group, such as torch.distributed.new_group(backend="gloo")'
        raise invalid("group", "backend", backends, "is a backend without CPU tensors", fix)
    return dist.new_group(backend="gloo")


def _outcome(run: Callable[[], Any]) -> tuple[_Outcome, BaseException | None]:
    """The outcome of ``run`` as JSON, and its exception."""
    value, error = _attempt(run)
    return {"value": value} if error is None else {"failure": _failure(error)}, error


def _attempt(run: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """The result of ``run`` and None, or None and its exception."""
    try:
        return run(), None
    except BaseException as error:  # KeyboardInterrupt too: the others must learn of it, not hang
        return None, error


def _failure(error: BaseException) -> _Failure:
    """An exception as JSON: its nearest class in ``_CLASSES``, its message and problems, and the errno of an OSError."""
    kind = next((k.__name__ for k in type(error).__mro__ if _CLASSES.get(k.__name__) is k), None)
    if isinstance(error, OSError) and error.errno is not None:
        name = f": {error.filename}" if error.filename is not None else ""
        text = f"{error.strerror or os.strerror(error.errno)}{name}"
        return {"kind": "OSError", "errno": error.errno, "text": text}
    text = str(error) if kind is not None else f"{type(error).__name__}: {error}"
    found: Any = error if has_problems(error) else WithProblems(text)
    problems = [
        (p.key, p.code, None if p.value is ... else show(p.value), p.rule, p.fix, p.origin)
        for p in found.problems
    ]
    report = {"kind": kind or "RuntimeError", "errno": None, "text": text}
    return {**report, "where": found.where, "problems": problems}


def _rank_names(ranks: list[int]) -> str:
    """ "rank 1", "ranks 0, 1, 2, 3 and 4 more"."""
    shown = ", ".join(str(rank) for rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


@contextlib.contextmanager
def _lost_ranks_explained() -> Iterator[None]:
    """Begin the text of a RuntimeError of a collective with LOST_RANKS."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        cause = f"one has died, is stuck, or did not make the same call ({reason})"
        fix = "end all of them and start again: the newest committed checkpoint loads"
        raise RuntimeError(f"{LOST_RANKS}: {cause}; {fix}") from error


def _pack(value: Any) -> bytes:
    """``value`` as compressed JSON."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def _unpack(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


def _padded(data: bytes, size: int) -> torch.Tensor:
    """(size,) uint8 that begins with ``data``: all ranks send tensors of one size."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    byte_view(tensor)[: len(data)] = data
    return tensor


def _bytes(tensor: torch.Tensor, size: int) -> bytes:
    return bytes(byte_view(tensor)[:size])
