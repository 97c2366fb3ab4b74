"""Objects as tagged JSON: values are restored with their types, and decoding runs no code.

Plain JSON carries None, bool, int, finite float, str, list and dicts with string keys. The rest is
``{"$": tag, "v": ...}``: nan and inf (bits), tuple, dict with other keys, OrderedDict, bytes,
torch.dtype, torch.Size, and numpy arrays of numbers (recognized by name, numpy is not imported).
"""

import base64
import binascii
import json
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from forge_ckpt._shared.problems import invalid
from forge_ckpt.errors import CheckpointMismatch

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
    plain = type(value) is dict and all(type(key) is str for key in value) and TAG not in value
    if plain:
        return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    pairs = [
        [encode(key, f"{where} key {key!r}"), encode(item, f"{where}[{key!r}]")]
        for key, item in value.items()
    ]
    return {TAG: "dict" if type(value) is dict else "odict", "v": pairs}


def _encode_array(value: Any, where: str) -> Any:
    if not _NUMPY_DTYPE.fullmatch(str(value.dtype)):  # objects, strings, big-endian, structured
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
