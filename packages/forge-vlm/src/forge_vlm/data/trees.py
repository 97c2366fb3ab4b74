"""Several answers to one picture as one sample: what they share once, then a branch for each.

L   tokens of a sample        P   tokens that all share        K   branches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from forge_vlm.data.errors import invalid
from forge_vlm.data.records import Record
from forge_vlm.data.sample import Sample
from forge_vlm.plan import IGNORE

__all__ = ["check_ahead", "paths_of", "tree_of"]


def paths_of(record: Record) -> list[Record]:
    """The conversation of each branch, with the messages that all share before it; the record itself without branches."""
    if not record.branches:
        return [record]
    return [
        replace(record, messages=(*record.messages, *branch), branches=())
        for branch in record.branches
    ]


def tree_of(name: str, paths: Sequence[Sample], image_id: int) -> Sample:
    """One sample of the K conversations of a record, whose loss is the sum of theirs.

    Shared is what all have in common from the beginning, tokens and labels; the labels there weigh what they weigh in all
    together. Raises InvalidSample where a picture is not shared, as behind one the first learnt token follows at once.
    """
    shared = _shared(paths)
    first = paths[0]
    held = int((first.tokens[:shared] == image_id).sum())
    if any(int((path.tokens == image_id).sum()) != held for path in paths):
        rule = "must share all pictures, and something after them that is not learnt"
        fix = "use a template with a text before answers (not 'plain'), or a record for each"
        raise invalid("branches", "picture", ..., rule, fix, where=name)
    rests = [path.tokens[shared:] for path in paths]
    numbers = [np.zeros(shared, np.int64)]
    numbers += [np.full(len(rest), n, np.int64) for n, rest in enumerate(rests, 1)]
    together = np.stack([path.weights[:shared] for path in paths]).sum(0)
    common = np.where(first.labels[:shared] == IGNORE, 1.0, together).astype(np.float32)
    return first._replace(
        tokens=np.concatenate([first.tokens[:shared], *rests]),
        labels=np.concatenate([first.labels[:shared], *(path.labels[shared:] for path in paths)]),
        weights=np.concatenate([common, *(path.weights[shared:] for path in paths)]),
        branches=np.concatenate(numbers),
    )


def _shared(paths: Sequence[Sample]) -> int:
    """How many tokens from the beginning are equal in all, and predict the same."""
    shortest = min(len(path.tokens) for path in paths)
    same = np.ones(shortest, bool)
    for path in paths[1:]:
        for mine, other in ((paths[0].tokens, path.tokens), (paths[0].labels, path.labels)):
            same &= mine[:shortest] == other[:shortest]
    return shortest if same.all() else int(np.argmin(same))


def check_ahead(name: str, sample: Sample, scope: str, image_id: int) -> None:
    """InvalidSample where a learnt token stands between pictures that see each other, through which it would be seen before
    it is predicted, and for branches of which the questions would be no part of the prefix."""
    if scope == "prefix_lm" and sample.branches is not None:
        rule = "have no prefix of their own with bidirectional 'prefix_lm'"
        raise invalid("branches", "prefix", ..., rule, "write a record for each", where=name)
    if scope not in ("clip", "document"):
        return
    places = np.flatnonzero(sample.tokens == image_id)
    sizes = [time * rows * columns for time, rows, columns in sample.grids]
    clips = np.repeat(sample.clips, sizes) if scope == "clip" else np.zeros(len(places), np.int64)
    learnt = np.flatnonzero(sample.labels != IGNORE)
    for clip in np.unique(clips):
        mine = places[clips == clip]
        if ((learnt >= mine[0]) & (learnt < mine[-1])).any():
            rule = "excludes learnt text between pictures that see each other, as the later ones have read it"
            raise invalid("bidirectional", "between", scope, rule, "use 'image'", where=name)
