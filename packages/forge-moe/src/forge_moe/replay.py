"""Decisions of a forward, recorded and replayed when the forward is recomputed.

Rounding may differ between a forward and its recomputation (other kernels, other batch shapes), and a token near a tie
would then go to another expert: shapes, split sizes and gradients would no longer fit. Discrete decisions are therefore
recorded once and replayed in each recomputation of the block.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")
_Record = list[tuple[object, str, Any]]
"""Values in the order in which a forward made them, each with its owner and name."""


class _Context(AbstractContextManager["_Context"]):
    """Append to a record, or read it from the beginning each time it is entered."""

    def __init__(self, record: _Record, replays: bool) -> None:
        self.record = record
        self.replays = replays
        self.position = 0
        self.tokens: list[Token[tuple[_Context, ...]]] = []

    def __enter__(self) -> "_Context":
        self.position = 0
        if not self.replays:
            self.record.clear()
        self.tokens.append(_active.set((*_active.get(), self)))
        _enter(1)
        return self

    def __exit__(self, *error: object) -> None:
        _active.reset(self.tokens.pop())
        _enter(-1)

    def next_value(self, owner: object, name: str) -> Any:
        """The next value; RuntimeError if the forward recorded another owner or name there."""
        if self.position < len(self.record):
            recorded_owner, recorded_name, value = self.record[self.position]
            if recorded_owner is owner and recorded_name == name:
                self.position += 1
                return value
        raise RuntimeError(
            f"recomputation needs {name!r} of {type(owner).__name__} as value {self.position} of "
            f"{len(self.record)} recorded ones, and the forward recorded another there; "
            "checkpoint a function that calls the same layers in the same order each time"
        )


_active: ContextVar[tuple[_Context, ...]] = ContextVar("forge_moe_replay", default=())
_lock = Lock()
_entered = 0
"""Number of contexts entered in any thread. torch.compile cannot trace a ContextVar but guards a global:
while this is 0, `record_or_replay` compiles to `make()`."""


def _enter(change: int) -> None:
    global _entered
    with _lock:
        _entered += change


def recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A (record, replay) pair for one checkpointed call.

        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=recompute_contexts)

    Routes, counts and split sizes of the forward under `record` are used again under `replay`, bit for bit, however
    often it is entered (zero-bubble schedules recompute twice). Counters of balance and statistics do not change under
    `replay`. Checkpoints may be nested. Costs 8 bytes per token and slot.
    """
    record: _Record = []
    return _Context(record, replays=False), _Context(record, replays=True)


def record_or_replay(owner: object, name: str, make: Callable[[], T]) -> T:
    """`make()`, or under replay its value in the forward; `make` is then not called.

    `owner`, the calling module, and `name` are compared with the record. The value holds no autograd graph: ids,
    counts, Python integers, tuples of such.
    """
    if _entered == 0:
        return make()
    contexts = _active.get()
    for context in reversed(contexts):
        if context.replays:
            value: T = context.next_value(owner, name)
            break
    else:
        value = make()

    # Nested checkpoints: an outer one that records keeps the value that an inner one replays.
    for context in contexts:
        if not context.replays:
            context.record.append((owner, name, value))
    return value


def replaying() -> bool:
    """Whether a recorded forward is being recomputed."""
    return _entered > 0 and any(context.replays for context in _active.get())
