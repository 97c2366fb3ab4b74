"""What differs between two fingerprints, as lines for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["difference_lines"]

_DIGEST = re.compile("[0-9a-f]{16,}")
_SHOWN = 12  # digits of a digest: enough to tell two apart


def difference_lines(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """`key: checkpoint OLD, now NEW` for each key: what can be understood first, then digests by their first digits."""
    ranked = sorted(changed.items(), key=lambda item: any(map(_is_digest, item[1])))
    return [f"{key}: checkpoint {_show(old)}, now {_show(new)}" for key, (old, new) in ranked]


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _show(value: Any) -> str:
    return f"{value[:_SHOWN]}..." if _is_digest(value) else str(value)
