"""The position of a loader in its stream, and what its state must look like."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from forge_data._shared.problems import Problem
from forge_data.collate import digest_of_ids
from forge_data.config import MAX_GLOBAL_BATCH
from forge_data.ledger import Ledger, window_problems

NO_STEPS = "0" * 16
_LAST_CURSOR = 2**62  # ids are int64, and windows and batches are added to the cursor


class Position(NamedTuple):
    """Where the batches that were given end.

    cursor is the number of samples in them. chain is the digest over the digests of all of them, chain_before without
    the last one, which has last_batch samples (None after a state of an older version) and this digest ("" if unknown).
    """

    cursor: int = 0
    chain: str = NO_STEPS
    chain_before: str = NO_STEPS
    last_batch: int | None = 0
    digest: str = ""

    def after(self, following: int, digest: str) -> Position:
        """The position after one more batch, which ends at `following`."""
        chain = _extend_chain(self.chain, digest)
        return Position(following, chain, self.chain, following - self.cursor, digest)


def state_problems(state: Any) -> Iterator[Problem]:
    """Problems of the state of a loader; the first makes others meaningless."""
    fix = "it is not from Loader.state_dict(), so load another checkpoint"
    if not isinstance(state, Mapping) or not isinstance(state.get("fingerprint"), Mapping):
        yield Problem("fingerprint", "missing", ..., "must be that of its data", fix)
    cursor, chain = state.get("cursor"), state.get("digest_chain")

    # States of versions before 0.2 lack the last link, so their chain cannot be compared.
    before, last = state.get("digest_chain_before", NO_STEPS), state.get("last_batch")
    if type(cursor) is not int or not 0 <= cursor <= _LAST_CURSOR:
        yield Problem("cursor", "range", cursor, f"must be within 0..{_LAST_CURSOR}", fix)

    for name, value in (("digest_chain", chain), ("digest_chain_before", before)):
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{16}", value):
            yield Problem(name, "format", value, "must be 16 hex digits", fix)

    windows = state.get("skipped", [])
    yield from window_problems(windows)
    if "last_batch" not in state:
        return
    limit = min(cursor, MAX_GLOBAL_BATCH)
    if type(last) is not int or not 0 <= last <= limit:
        yield Problem("last_batch", "range", last, f"must be within 0..{limit}", fix)
    # The chain binds cursor and history: an edited cursor, or one of another state, has another digest.
    digest = digest_of_ids(Ledger(windows).ids(np.arange(cursor - last, cursor)))
    ends = _extend_chain(before, digest) if last else NO_STEPS
    if chain != ends or (last == 0 and cursor != 0):
        rule = f"must be where digest_chain {chain} ends"
        yield Problem("cursor", "mismatch", cursor, rule, fix)


def _extend_chain(chain: str, digest: str) -> str:
    """The digest chain after one more step."""
    return hashlib.sha256((chain + digest).encode()).hexdigest()[:16]


def begins(key: str) -> int:
    """The first instance that a key of a fingerprint is about: `from_80.mixture.from_20` says it of 100 on."""
    return sum(int(part[5:]) for part in key.split(".") if re.fullmatch(r"from_\d+", part))
