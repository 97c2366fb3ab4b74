"""How a state is named and encoded: digests, tagged JSON, paths of leaves, plain tensors of wrapper subclasses.

Objects are tagged JSON: values are restored with their types, and decoding runs no code. Plain JSON carries None, bool,
int, finite float, str, list and dicts with string keys. The rest is ``{"$": tag, "v": ...}``: nan and inf (bits), tuple,
dict with other keys, OrderedDict, bytes, torch.dtype, torch.Size, and numpy arrays of numbers (recognized by name, numpy
is not imported).

A leaf of a state is a tensor, or a *largest subtree without tensors*: the whole state of a data loader is one object,
and a load replaces it even where its structure has changed; tensors are filled one by one. A path is a tuple of steps:
a ``str`` or ``int`` is a key of a dict, ``("list", n)`` and ``("tuple", n)`` are positions. Its steps joined by dots are
the leaf's name: ``("model", "layers.0.w")`` is ``model.layers.0.w``.
"""

import base64
import binascii
import hashlib
import json
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.masked import MaskedTensor

from forge_ckpt._renamed import renamed
from forge_ckpt._shared.problems import Problem, invalid
from forge_ckpt.errors import CheckpointMismatch

DEFAULT_DIGEST = "sha256"
DIGESTS = (DEFAULT_DIGEST, "blake3")
# 64 hex digits; releases the GIL for a block, so threads digest at once.
Digest = Callable[[bytes | memoryview], str]


def digest_function(name: str) -> Digest:
    """The function of the digest ``name``.

    Both are cryptographic hashes of 256 bits: no damage and no swap of blocks keeps either. Per
    thread, sha256 with SHA extensions takes 1-2 GB/s and blake3 with AVX2 or AVX-512 takes 4-6.
    Raises ValueError for another name, and for blake3 where the package is not installed.
    """
    if name not in DIGESTS:
        raise invalid("digest", "unknown", name, f"must be one of {', '.join(DIGESTS)}")
    if name == DEFAULT_DIGEST:
        return lambda data: hashlib.sha256(data).hexdigest()
    try:
        from blake3 import blake3
    except ImportError:
        rule, fix = "needs the package blake3", "pip install 'forge-ckpt[fast]'"
        raise invalid("digest", "requires", name, rule, fix) from None
    return lambda data: blake3(data).hexdigest()


TAG = "$"
_LARGE = 10**4300  # Python reads no longer int from text, as its conversion takes quadratic time
_NUMPY_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
# torch.Size raises RuntimeError for numbers beyond int64
_UNREADABLE = (KeyError, TypeError, OverflowError, RuntimeError, struct.error, binascii.Error)
_KNOWN = (
    "None, bool, int, float, str, list, tuple, dict, OrderedDict, bytes, torch.dtype, torch.Size, "
    "numpy arrays of numbers"
)


def encode(value: Any, where: str) -> Any:
    """``value`` as a tree that the json module can write; ``where`` names it in errors.

    Raises ValueError with position and type for a value outside the table above.
    """
    kind = type(value)
    if kind is int and abs(value) >= _LARGE:
        rule = "is an int of more than 4300 digits"
        raise invalid(where, "digits", ..., rule, "save its to_bytes()")
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:  # json writes the shortest text that reads back to the same bits
        if math.isfinite(value):
            return value
        return {TAG: "float", "v": struct.pack(">d", value).hex()}
    if kind in (list, tuple):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if kind is list else {TAG: "tuple", "v": items}

    if kind in (dict, OrderedDict):
        return _encode_dict(value, where)
    if kind is bytes:
        return {TAG: "bytes", "v": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {TAG: "dtype", "v": dtype_name(value)}
    if kind is torch.Size:
        return {TAG: "size", "v": list(value)}
    if (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        return _encode_array(value, where)
    raise _unknown(value, where)


def decode(tree: Any) -> Any:
    """The value that :func:`encode` encoded.

    Raises ValueError for a tree that it cannot have made, CheckpointMismatch if numpy is missing.
    """
    if isinstance(tree, list):
        return [decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TAG not in tree:
        return {key: decode(item) for key, item in tree.items()}
    try:
        return _DECODERS[tree[TAG]](tree["v"])
    except _UNREADABLE as error:
        rule = f"is a tag whose value cannot be read ({error!r:.80})"
        raise invalid("object", "tag", tree[TAG], rule) from error


def dumps(tree: Any) -> str:
    """One line of JSON, equal for equal trees."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: Any) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``; raises ValueError if this torch has no such dtype."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise invalid("dtype", "unknown", name, f"is unknown to torch {torch.__version__}")
    return found


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    """A JSON object for keys that are all text, else a tag with pairs."""
    plain = type(value) is dict and all(type(key) is str for key in value) and TAG not in value
    if plain:
        return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    pairs = [
        [encode(key, f"{where} key {key!r}"), encode(item, f"{where}[{key!r}]")]
        for key, item in value.items()
    ]
    return {TAG: "dict" if type(value) is dict else "odict", "v": pairs}


def _encode_array(value: Any, where: str) -> Any:
    # The bytes of an object array are addresses; strings, big-endian and structured arrays are excluded, too.
    if not _NUMPY_DTYPE.fullmatch(str(value.dtype)):
        rule = "is the dtype of a numpy array, and only numbers are stored"
        raise invalid(where, "dtype", str(value.dtype), rule, "convert it to numbers")
    data = base64.b64encode(value.tobytes()).decode()
    return {TAG: "ndarray", "v": [str(value.dtype), list(value.shape), data]}


def _decode_array(parts: list[Any]) -> Any:
    name, shape, data = parts
    if not _NUMPY_DTYPE.fullmatch(name):
        raise invalid("dtype", "not_numbers", name, "must be a numpy dtype of numbers")
    try:
        import numpy
    except ImportError as error:
        rule, fix = "is needed for an array in the checkpoint", "pip install numpy"
        raise invalid("numpy", "requires", ..., rule, fix, kind=CheckpointMismatch) from error
    return numpy.frombuffer(base64.b64decode(data), dtype=name).reshape(shape).copy()


def _unknown(value: Any, where: str) -> Any:
    """The error of a value that is not stored, to be raised."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__ == "numpy":
        rule = "is a numpy scalar, and is not stored"
        return invalid(where, "numpy_scalar", name, rule, "convert it with .item()")
    if isinstance(value, torch.Tensor):
        rule = "is in a dict key or a subclassed container, and is not stored"
        return invalid(where, "tensor", name, rule, "use dict, list, tuple")
    rule = "is a type that is not stored (nothing is pickled)"
    fix = f"give its state as {_KNOWN}, or an object with state_dict() and load_state_dict() at the top level"
    return invalid(where, "type", name, rule, fix)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": lambda v: struct.unpack(">d", bytes.fromhex(v))[0],
    "tuple": lambda v: tuple(decode(item) for item in v),
    "dict": lambda v: {decode(key): decode(item) for key, item in v},
    "odict": lambda v: OrderedDict((decode(key), decode(item)) for key, item in v),
    "bytes": lambda v: base64.b64decode(v, validate=True),
    "dtype": dtype_from_name,
    "size": torch.Size,
    "ndarray": _decode_array,
}


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
        match step:
            case str() | int() if type(step) is not bool:
                steps.append(step)
            case ["list" | "tuple" as kind, position] if (
                type(position) is int and 0 <= position < 1_000_000
            ):
                steps.append((kind, position))
            case _:
                raise invalid("path", "step", step, "is a step, and must be a key or a position")
    return tuple(steps)


# A generator, as a nested function that calls itself is a cycle: it would keep all tensors until a collection.
def _leaves(value: Any, path: Path, saving: bool) -> Iterator[tuple[Path, Any]]:
    """(path, value) of all leaves below ``path``; a container without tensors is one leaf."""
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
    """(step, child) of a mapping, list or tuple; None for a leaf. Raises ValueError for keys of other types."""
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


# Inner tensors that are recomputed from the values; they are not saved, and stale after a load.
_DERIVED = {"_precomputed_scale"}


def layout_problem(name: str, tensor: torch.Tensor) -> Problem | None:
    """The problem of a tensor whose bytes are not those of its elements, one after the other."""
    masked = isinstance(tensor, MaskedTensor)
    layout = "masked" if masked else "nested" if tensor.is_nested else tensor.layout
    if layout == torch.strided:
        return None
    rule = f"is the layout of a tensor of {tensor.dtype}, and must be dense"
    return Problem(name, "dense", layout, rule, "densify it")


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor with this rank's bytes: of a DTensor its shard, of a wrapper its inner tensor.

    A wrapper (``__tensor_flatten__``) owns no memory: its ``data_ptr()`` is 0. Raises ValueError
    unless it holds one tensor of its own shape and dtype.
    """
    if isinstance(tensor, DTensor):
        return unwrap(tensor.to_local())
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    # A collective may still run: its bytes are valid only after the wait.
    if hasattr(tensor, "trigger_wait"):
        return unwrap(tensor.trigger_wait())
    names = [name for name in tensor.__tensor_flatten__()[0] if name not in _DERIVED]
    inner = getattr(tensor, names[0])
    if len(names) > 1 or (inner.shape, inner.dtype) != (tensor.shape, tensor.dtype):
        rule = f"holds {', '.join(names)}, and not one tensor of its own shape and dtype"
        fix = "save the plain tensors inside it"
        raise invalid("", "subclass", type(tensor).__name__, rule, fix)
    return unwrap(inner.detach())


__getattr__ = renamed(__name__)
