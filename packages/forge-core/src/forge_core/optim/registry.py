"""Finding an optimizer or a schedule by name: built in, installed by another package, or by import path."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any


def find(name: str, built_in: Mapping[str, Any], group: str, key: str) -> Any:
    """Return what `name` stands for.

    Args:
        name: a key of `built_in`, the name of an entry point in `group`, or an import path `module:attr`.
        built_in: what this package brings. Entry points are read only for a name that is not in it.
        group: group of entry points, such as `forge.optimizers`.
        key: the setting that holds the name, for the message.

    Raises: ValueError for an unknown name (with the nearest known one) and for a path that leads nowhere.
    """
    if name in built_in:
        return built_in[name]
    if ":" in name:
        return _from_path(name, key)
    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name in installed:
        return installed[name].load()
    known = sorted({*built_in, *installed})
    near = difflib.get_close_matches(name, known, n=1)
    raise ValueError(
        f"{key} {name!r} is unknown: known in {group} are {', '.join(known)}, anything else is an import "
        f"path module:attr; " + (f"did you mean {near[0]!r}?" if near else "use one of these")
    )


def _from_path(path: str, key: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{key}: cannot import {path!r} ({error}): a name with a colon is module:attr; "
            "install the module or correct the path"
        ) from error
