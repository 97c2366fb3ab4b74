"""Objects that other packages register by name."""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from forge_moe._shared.problems import invalid


def find_registered(key: str, name: str, group: str, built_in: Mapping[str, Any]) -> Any:
    """The object called `name`: a built-in one, an entry point of `group`, or "module:attribute".

    Raises ValueError, with `key` of a configuration, for an unknown name and for one that cannot be imported.
    """
    if name in built_in:
        return built_in[name]
    try:
        module, separator, attribute = name.partition(":")
        if separator:
            return getattr(import_module(module), attribute)
        installed = {point.name: point for point in entry_points(group=group)}
        if name in installed:
            return installed[name].load()
    except (ImportError, AttributeError) as error:
        rule, fix = f"cannot be imported ({error})", "check the path, or install what it needs"
        raise invalid(key, "not_found", name, rule, fix) from error
    known = ", ".join(sorted({*built_in, *installed}))
    raise invalid(key, "unknown", name, "is unknown", f"use one of {known}, or module:attribute")
