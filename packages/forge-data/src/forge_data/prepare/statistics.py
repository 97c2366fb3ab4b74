"""Statistics of prepared documents: counts, tokens per byte, quantiles of lengths."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from forge_data._shared.paths import read_regular
from forge_data._shared.problems import invalid
from forge_data.errors import InvalidData

__all__ = ["STATISTICS", "SplitStatistics", "read_statistics"]

STATISTICS = "statistics.json"
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_MAX_BYTES = 1 << 20


class SplitStatistics:
    """Counts of documents of one split; memory grows with the number of different lengths only."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lengths: Counter[int] = Counter()

    def add(self, tokens: np.ndarray, num_bytes: np.ndarray) -> None:
        """Count documents of these lengths (n,) in tokens and in bytes of text; those without a token are left out."""
        values, counts = np.unique(tokens[tokens > 0], return_counts=True)
        self._lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self.num_bytes += int(num_bytes[tokens > 0].sum())

    def summary(self) -> dict[str, Any]:
        """Plain data; a quantile is the length of a document, the smallest that at least this share do not exceed."""
        documents = sum(self._lengths.values())
        tokens = sum(length * count for length, count in self._lengths.items())
        lengths = sorted(self._lengths)
        reached = np.cumsum([self._lengths[length] for length in lengths])
        places = [int(np.searchsorted(reached, max(1, q * documents))) for q in QUANTILES]
        return {
            "documents": documents,
            "tokens": tokens,
            "bytes": self.num_bytes,
            "tokens_per_byte": round(tokens / max(1, self.num_bytes), 6),
            "length_quantiles": {str(q): lengths[i] for q, i in zip(QUANTILES, places, strict=True)}
            if documents
            else {},
        }


def read_statistics(folder: Path) -> dict[str, Any] | None:
    """The content of `statistics.json`; None in folders without it, which older versions wrote."""
    try:
        found = json.loads(read_regular(folder / STATISTICS, _MAX_BYTES, InvalidData))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        rule, where = f"must be JSON ({error!s:.80})", folder / STATISTICS
        fix = "remove it, nothing depends on it"
        raise invalid("", "not_json", ..., rule, fix, where=where, kind=InvalidData) from None
    return found if isinstance(found, dict) else None
