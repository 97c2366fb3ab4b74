"""A checkpoint that ``dcp.save`` wrote, rewritten as one of a store, tensor by tensor."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_ckpt import objects, tree
from forge_ckpt._shared.problems import ProblemError, invalid, problems_of
from forge_ckpt.dcp.listing import DCPPath, Listing, read_listing
from forge_ckpt.dcp.payload import load_object, load_tensor
from forge_ckpt.files import Directory
from forge_ckpt.manifest import ObjectEntry
from forge_ckpt.write.stream import Box, write_checkpoint


def convert_from_dcp(
    source: Path,
    store: Path,
    step: int | None = None,
    without: Sequence[str] = (),
    positions: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write the DCP checkpoint ``source`` as ``step`` of the store; returns the new directory.

    ``step`` is that of a name like ``step-100`` where it is None. ``without`` are patterns of names to
    leave out. Names and paths are DCP's, with three changes that ``Store.load({"model": model,
    "optimizer": optimizer})`` needs: tensors at the top level come below ``model``; positions in lists
    are positions again; optimizer state by parameter name, as torch's ``get_state_dict`` gives it, is by
    position, as ``torch.optim`` has it (``positions=False`` keeps the names).

    Nothing is unpickled but by ``torch.load(weights_only=True)``. Memory is one box of one tensor.
    ``progress`` gets the bytes written and the bytes of all tensors. Raises CorruptCheckpoint for damaged files, and
    ValueError for what cannot be held.
    """
    if step is None:
        found = re.fullmatch(r"(?:.*[^0-9])?(\d{1,18})", source.name)
        if found is None:
            rule = "is a name without a number, of the source"
            raise invalid("step", "missing", source.name, rule, "give one with --step")
        step = int(found[1])
    with Directory(source) as directory:
        listing = _without(read_listing(directory), without)
        values = {n: load_object(directory, p, n) for n, p in listing.objects.items()}
        paths = _paths(listing)
        if positions:
            _by_position(paths, values)
        small = [*_tensors_in_objects(paths, values)]
        entries = _objects(paths, values)

        def boxes() -> Iterator[Box]:
            for name, tensor in listing.tensors.items():
                if not tensor.boxes:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    yield Box.whole(paths[name], empty)
                for offsets, sizes, payload in tensor.boxes:
                    data = load_tensor(directory, payload, name, sizes, tensor.dtype)
                    yield Box(paths[name], tensor.shape, offsets, data)
            yield from small

        total = sum(math.prod(t.shape) * t.dtype.itemsize for t in listing.tensors.values())
        return write_checkpoint(
            store, step, [boxes()], entries, progress=lambda done: progress(done, total)
        )


def _without(listing: Listing, patterns: Sequence[str]) -> Listing:
    def kept(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: entry
            for name, entry in entries.items()
            if not any(fnmatchcase(name, pattern) for pattern in patterns)
        }

    return Listing(kept(listing.tensors), kept(listing.objects), kept(listing.paths))


def _paths(listing: Listing) -> dict[str, tree.Path]:
    """Our path of each name: numbers in a path of DCP are positions in a list."""
    top = {path[0] for path in listing.paths.values()}

    def ours(name: str, path: DCPPath) -> tree.Path:
        if name in listing.tensors and len(path) == 1 and "model" not in top:
            path = ("model", *path)  # a flat state, as torchtitan's model is
        return tuple(("list", step) if type(step) is int else step for step in path)

    return {name: ours(name, path) for name, path in listing.paths.items()}


def _by_position(paths: dict[str, tree.Path], values: dict[str, Any]) -> None:
    """Change optimizer state by parameter name, or by a number that DCP made a string, to positions.

    The lists ``param_groups.*.params`` give the order, in which torch numbers the parameters.
    """
    groups: dict[tree.Path, list[tuple[int, str]]] = {}
    for name, path in paths.items():
        match path[-3:]:
            case ("param_groups", ("list", int(group)), "params") if name in values:
                groups.setdefault(path[:-3], []).append((group, name))
            case _:
                pass

    for before, lists in groups.items():
        names = [name for _, name in sorted(lists)]
        if not all(type(values[n]) is list and _are_keys(values[n]) for n in names):
            continue
        position = {str(key): i for i, key in enumerate(k for n in names for k in values[n])}
        for name in names:
            values[name] = [position[str(key)] for key in values[name]]

        state = (*before, "state")
        below = [name for name, path in paths.items() if path[: len(state)] == state]
        for name in below:
            key, *slot = paths[name][len(state) :]
            if key in position:
                paths[name] = (*state, position[str(key)], *slot)
        if not below:  # DCP drops empty dicts, such as the state of SGD without momentum
            label = tree.dotted_name(state)
            paths[label], values[label] = state, {}


def _are_keys(values: list[Any]) -> bool:
    return all(type(value) in (str, int) for value in values)


def _tensors_in_objects(paths: dict[str, tree.Path], values: dict[str, Any]) -> Iterator[Box]:
    """Take tensors out of objects: DCP keeps a tuple whole, with the tensors in it."""
    for name, value in list(values.items()):
        leaves, below = tree.flatten({name: value})
        if any(isinstance(leaf, Tensor) for leaf in leaves.values()):
            prefix = paths.pop(name)
            del values[name]
            for key, leaf in leaves.items():
                path = (*prefix, *below[key][1:])
                if isinstance(leaf, Tensor):
                    yield Box.whole(path, leaf.detach())
                else:
                    paths[key], values[key] = path, leaf


def _objects(paths: dict[str, tree.Path], values: dict[str, Any]) -> dict[str, ObjectEntry]:
    entries: dict[str, ObjectEntry] = {}
    for name, value in values.items():
        try:
            encoded = objects.encode(value, name)
        except ValueError as error:
            found = problems_of(error)
            fixes = [f"{p.fix}, or leave it out with --without '{name}'" for p in found]
            raise ProblemError([replace(p, fix=f) for p, f in zip(found, fixes)]) from None
        label = tree.dotted_name(paths[name])
        if label in entries:
            rule = "is the name of two objects"
            raise invalid(label, "duplicate", ..., rule, "leave one of them out")
        entries[label] = ObjectEntry(paths[name], encoded)
    return entries
