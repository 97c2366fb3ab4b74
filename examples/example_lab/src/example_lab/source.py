"""Sums of two digits, made on demand; only the answer is trained."""

from typing import Any

import numpy as np

PLUS, EQUALS = 10, 11


class Sums:
    """Rows of `a + b = cc` without end. Token ids: the digits, 10 for plus, 11 for equals."""

    vocab_size, max_token_id, tokenizer = 12, 11, None

    def __init__(self, config: Any, largest: int = 9, prompt_weight: float = 0.0) -> None:
        if not 1 <= largest <= 9:
            raise ValueError(f"options.largest {largest} must be from 1 to 9; use 9")
        self.largest, self.prompt_weight = largest, prompt_weight
        self.offset = 0 if config.split == "train" else 10**9

    def fingerprint(self) -> dict[str, str | int]:
        return {"largest": self.largest, "offset": self.offset, "weight": str(self.prompt_weight)}

    def stream(self, seq_len: int, seed: int) -> "Rows":
        return Rows(self, seq_len, seed)


class Rows:
    def __init__(self, source: Sums, seq_len: int, seed: int) -> None:
        self.source, self.seq_len, self.seed = source, seq_len, seed

    def __len__(self) -> int:
        return 1000

    def arrays(self, ids: np.ndarray) -> dict[str, Any]:
        shape, source = (len(ids), self.seq_len), self.source
        line = np.empty((len(ids), self.seq_len + 1), np.int64)
        for row, i in zip(line, ids):
            row[:] = self._row(int(i) + source.offset)[: self.seq_len + 1]
        place = np.arange(1, self.seq_len + 1) % 6  # of a label in its sum
        weights = np.where(place >= 4, 1.0, source.prompt_weight).astype(np.float32)
        return {
            "tokens": line[:, :-1].copy(),
            "labels": line[:, 1:].copy(),
            "positions": np.broadcast_to(np.arange(self.seq_len), shape).copy(),
            "document_ids": np.zeros(shape, np.int64),
            "weights": np.broadcast_to(weights, shape).copy(),
        }

    def _row(self, i: int) -> np.ndarray:
        pairs = np.random.default_rng([self.seed, i]).integers(
            0, self.source.largest + 1, (self.seq_len // 6 + 1, 2)
        )
        return np.concatenate([[a, PLUS, b, EQUALS, *divmod(a + b, 10)] for a, b in pairs])

    def fingerprint(self) -> dict[str, str | int]:
        return {**self.source.fingerprint(), "seq_len": self.seq_len, "seed": self.seed}
