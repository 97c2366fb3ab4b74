"""What any source of tokens is asked for: a split that exists, and a range that it has."""

from forge_data.config import SPLITS

__all__ = ["check_range", "check_split"]


def check_split(split: str) -> None:
    """ValueError for a split that no source has."""
    if split not in SPLITS:
        raise ValueError(f'split {split!r} must be "train" or "validation"; use "train"')


def check_range(start: int, stop: int, num_tokens: int) -> None:
    """ValueError where tokens start..stop-1 are not all among the `num_tokens` of a source."""
    if not 0 <= start <= stop <= num_tokens:
        raise ValueError(f"range {start}..{stop} must lie within 0..{num_tokens}; ask for less")
