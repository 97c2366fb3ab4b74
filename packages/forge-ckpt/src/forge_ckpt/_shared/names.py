# Copied from scripts/shared/names.py; edit that file, then run scripts/copy_shared.py.
"""Names of parameters, modules and tensors, and the patterns by which a user chooses some."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

#: The number of a layer: between the dots of a name, also after "cross_", as in layers.cross_3.up.weight.
_LAYER = re.compile(r"(?:(?<![^.])|(?<=\.cross_))\d+(?=\.)")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches `name`, as in fnmatch, and none with "!" in front excludes it."""
    if any(fnmatchcase(name, pattern[1:]) for pattern in patterns if pattern.startswith("!")):
        return False
    return any(fnmatchcase(name, pattern) for pattern in patterns if not pattern.startswith("!"))


def match_names(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches and none excludes (see `matches`), in their order."""
    return [name for name in names if matches(name, patterns)]


def nearest_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return three names like a pattern that matches none, one of each kind of layer."""
    of_kind: dict[str, str] = {}
    for name in names:
        of_kind.setdefault(without_layer_number(name), name)
    near = difflib.get_close_matches(pattern, of_kind, n=3, cutoff=0.0)
    return [of_kind[kind] for kind in near]


def without_layer_number(name: str) -> str:
    """Return the pattern of a name for all layers: `layers.*.up.weight` of `layers.3.up.weight`."""
    return _LAYER.sub("*", name)
