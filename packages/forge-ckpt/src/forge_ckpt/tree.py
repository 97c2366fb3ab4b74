"""Nested state to named leaves and back.

A leaf is a tensor, or a *largest subtree without tensors*: the whole state of a data loader is one
object, and a load replaces it even where its structure has changed; tensors are filled one by one.

A path is a tuple of steps: a ``str`` or ``int`` is a key of a dict, ``("list", n)`` and
``("tuple", n)`` are positions. Its steps joined by dots are the leaf's name: ``("model", "layers.0.w")`` is
``model.layers.0.w``.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from forge_ckpt._shared.problems import invalid

Step = str | int | tuple[str, int]
Path = tuple[Step, ...]


def flatten(
    state: Mapping[str, Any], *, saving: bool = False
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Leaves and their paths by dotted name, in the order of ``state``.

    Raises ValueError for two leaves of one name, for keys that are neither str nor int on the way to a tensor, for a
    state that contains itself, and, if ``saving``, for mappings that a load would make a dict of.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, Path] = {}

    found: list[tuple[Path, Any]] = []
    for key, child in _children(state, ()) or ():
        try:
            found += _leaves(child, (key,), saving)
        except RecursionError:
            raise too_deep(str(key)) from None
    for path, value in found:
        name = dotted_name(path)
        if name in paths:
            rule = f"is the name of two entries, {paths[name]} and {path}"
            raise invalid(name, "duplicate", ..., rule, "rename a key")
        leaves[name], paths[name] = value, path
    return leaves, paths


def too_deep(name: str) -> Any:
    """The error of a state that contains itself, or nearly so, to be raised."""
    rule = "contains itself, or is nested too deeply"
    return invalid(name, "depth", ..., rule, "save a flat copy of what is needed")


def dotted_name(path: Path) -> str:
    """The name of a leaf, in messages and in torch's plans (its fqn)."""
    return ".".join(str(step[1] if isinstance(step, tuple) else step) for step in path)


def set_element(container: Any, path: Path, value: Any) -> Any:
    """Set ``value`` at ``path`` below ``container``; returns the container.

    Dicts and lists are changed in place, tuples are rebuilt, missing containers are made.
    """
    if not path:
        return value
    step, rest = path[0], path[1:]
    if not isinstance(step, tuple):
        if not isinstance(container, MutableMapping):
            container = {}
        container[step] = set_element(container.get(step), rest, value)
        return container

    kind, position = step
    items = list(container) if isinstance(container, (list, tuple)) else []
    items += [None] * (position + 1 - len(items))
    items[position] = set_element(items[position], rest, value)
    if kind == "tuple":
        return tuple(items)
    if isinstance(container, list):
        container[:] = items
        return container
    return items


def copy_containers(value: Any) -> Any:
    """A copy with the same leaves in new containers: :func:`set_element` on it does not change ``value``."""
    if isinstance(value, Mapping):
        return {key: copy_containers(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_containers(child) for child in value)
    return value


def path_to_json(path: Path) -> list[Any]:
    """A JSON list of the steps; a position is ``["list", n]`` or ``["tuple", n]``."""
    return [list(step) if isinstance(step, tuple) else step for step in path]


def path_from_json(tree: Any) -> Path:
    """The path that :func:`path_to_json` wrote; raises ValueError for any other JSON value."""
    steps: list[Step] = []
    if not isinstance(tree, list) or not tree:
        raise invalid("path", "type", tree, "must be a list of steps")

    for step in tree:
        if type(step) is str or type(step) is int:
            steps.append(step)
        elif (
            isinstance(step, list)
            and len(step) == 2
            and step[0] in ("list", "tuple")
            and type(step[1]) is int
            and 0 <= step[1] < 1_000_000
        ):
            steps.append((step[0], step[1]))
        else:
            raise invalid("path", "step", step, "is a step, and must be a key or a position")
    return tuple(steps)


# A generator, as a nested function that calls itself is a cycle: it would keep all tensors until a collection.
def _leaves(value: Any, path: Path, saving: bool) -> Iterator[tuple[Path, Any]]:
    children = _children(value, path) if _has_tensor(value) else None
    if children is None:
        yield path, value
        return
    if saving and isinstance(value, Mapping) and type(value) not in (dict, OrderedDict):
        rule, fix = "holds tensors, and would be restored as a dict", "save dict(...) of it"
        raise invalid(dotted_name(path), "mapping", type(value).__name__, rule, fix)
    for step, child in children:
        yield from _leaves(child, (*path, step), saving)


def _children(value: Any, path: Path) -> list[tuple[Step, Any]] | None:
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                rule = f"is the type of key {key!r}, which leads to a tensor"
                shown = type(key).__name__
                raise invalid(dotted_name(path), "key", shown, rule, "use str or int keys")
        return list(value.items())
    if type(value) in (list, tuple):
        return [((type(value).__name__, i), child) for i, child in enumerate(value)]
    return None


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_tensor(child) for child in value.values())
    if type(value) in (list, tuple):
        return any(_has_tensor(child) for child in value)
    return isinstance(value, Tensor)
