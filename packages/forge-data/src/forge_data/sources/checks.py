"""Arguments of all sources: a split that exists, a range inside the source."""

from forge_data.config import SPLITS

__all__ = ["check_range", "check_split"]


def check_split(split: str) -> None:
    """Raise ValueError unless `split` is one of SPLITS."""
    if split not in SPLITS:
        raise ValueError(f'split {split!r} must be "train" or "validation"; use "train"')


def check_range(start: int, stop: int, num_tokens: int) -> None:
    """Raise ValueError unless tokens start..stop-1 are inside a source of `num_tokens`."""
    if not 0 <= start <= stop <= num_tokens:
        raise ValueError(f"range {start}..{stop} must be within 0..{num_tokens}; ask for less")
