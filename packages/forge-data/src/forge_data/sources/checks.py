"""Arguments of all sources: a split that exists, a range inside the source, files of ids that are not packed."""

from pathlib import Path

from forge_data._shared.problems import invalid
from forge_data.config import SPLITS
from forge_data.errors import InvalidData
from forge_data.prepare.byte_streams import COMPRESSIONS

__all__ = ["check_not_packed", "check_range", "check_split"]


def check_not_packed(path: Path) -> None:
    """Raise InvalidData for the name of a packed file: its bytes would be read as ids."""
    if name := COMPRESSIONS.get(path.suffix.lower()):
        rule = f"must be a file of ids that can be mapped, and ends as one of {name}"
        raise invalid("path", "packed", str(path), rule, "unpack it first", kind=InvalidData)


def check_split(split: str) -> None:
    """Raise ValueError unless `split` is one of SPLITS."""
    if split not in SPLITS:
        rule = 'must be "train" or "validation"'
        raise invalid("split", "unknown", split, rule, 'use "train"')


def check_range(start: int, stop: int, num_tokens: int) -> None:
    """Raise ValueError unless tokens start..stop-1 are inside a source of `num_tokens`."""
    if not 0 <= start <= stop <= num_tokens:
        rule = f"must be within 0..{num_tokens}"
        raise invalid("range", "range", (start, stop), rule, "ask for less")
