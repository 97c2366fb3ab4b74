"""The pickle in a DCP ``.metadata``, read by a machine that imports, calls and builds nothing.

``pickletools.genops`` of the standard library splits the bytes into operations without running them. The
machine here knows the operations that DCP's writer needs. A class becomes its name, an instance a
:class:`Record` of plain values; anything but the classes in ``_ADMITTED`` is refused by name.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forge_ckpt import codec
from forge_ckpt._shared.problems import invalid

_METADATA = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # its place until torch 2.2: older pickles name it
# Name in the pickle: name here; any other is an error, so that a pickle can call nothing else.
_ADMITTED = {
    **{
        f"{_METADATA} {name}": name
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
        )
    },
    f"{_OLD} TensorProperties": "TensorProperties",
    "torch.distributed.checkpoint.filesystem _StorageInfo": "_StorageInfo",
    "torch Size": "Size",
    "torch.serialization _get_layout": "layout",
    f"{_METADATA} _MEM_FORMAT_ENCODING": "memory format",
    f"{_OLD} MEM_FORMAT_ENCODING": "memory format",
    # Some releases of Python 3.11 (3.11.2 of Debian 12) pickle a member of an enum so. It is a name here as well.
    "builtins getattr": "getattr",
    **{
        f"{module} {name}": "path"
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
_RECORDS = {name for key, name in _ADMITTED.items() if name[0].isupper() or name[0] == "_"} - {
    "Size"
}
_MAX_STACK = 1_000_000  # torch's pickler puts at most some thousands of values there


@dataclass(frozen=True)
class _Class:
    name: str


@dataclass(eq=False)
class Record:
    """An instance of a class of DCP: its ``fields`` by name, or a tuple of their values."""

    kind: str
    fields: Any = None


def load(data: bytes) -> Any:
    """The value of a pickle of DCP metadata; raises ValueError for any other pickle.

    Cost: about 1.5 s for the 5 MB of 32,000 boxes.
    """
    machine = _Machine()
    try:
        for operation, argument, _ in pickletools.genops(data):
            run = _OPERATIONS.get(operation.name)
            if run is None:
                rule = "is an operation that DCP's metadata does not need"
                raise invalid("", "operation", operation.name, rule)
            run(machine, argument)
            if len(machine.stack) + len(machine.marks) > _MAX_STACK:
                raise invalid("", "stack", ..., f"the stack has more than {_MAX_STACK} values")
        (value,) = machine.stack
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        rule = f"is not a pickle of DCP ({type(error).__name__})"
        raise invalid("", "damaged", ..., rule) from None
    return value


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def above_mark(self) -> list[Any]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def top(self, count: int) -> tuple[Any, ...]:
        if count > len(self.stack):
            raise IndexError
        values = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return values

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise TypeError
        for key, value in zip(values[::2], values[1::2]):
            # The hash of a deeply nested tuple would overflow the C stack.
            if type(key) not in (str, int, Record):
                raise TypeError
            target[key] = value

    def find(self, _argument: Any) -> None:
        module, name = self.top(2)
        if type(module) is not str or type(name) is not str:
            raise TypeError
        self.push(_find(f"{module} {name}"))

    def new(self, _argument: Any) -> None:
        kind, arguments = self.top(2)
        if type(kind) is not _Class or kind.name not in _RECORDS or arguments != ():
            raise invalid("", "new", ..., "makes an object that DCP does not make")
        self.push(Record(kind.name))

    def build(self, _argument: Any) -> None:
        record, state = self.top(2)
        if type(record) is not Record or record.fields is not None:
            raise invalid("", "state", ..., "gives state to a value that takes none")
        record.fields = state
        self.push(record)

    def call(self, _argument: Any) -> None:
        function, arguments = self.top(2)
        if type(function) is not _Class or type(arguments) is not tuple:
            raise invalid("", "call", ..., "calls a value that is not a class of DCP")
        self.push(_call(function.name, arguments))


def _find(name: str) -> Any:
    """The class, or the dtype, that a pickle imports by "module name"; ValueError for any other."""
    module, _, attribute = name.partition(" ")
    if module == "torch" and attribute != "Size":
        return codec.dtype_from_name(attribute)
    if name not in _ADMITTED:
        shown = name.replace(" ", ".")[:120]
        raise invalid("", "unknown", shown, "is not a class of DCP's metadata")
    return _Class(_ADMITTED[name])


def _call(name: str, arguments: tuple[Any, ...]) -> Any:
    """The value of the few calls that DCP's writer records; nothing is called."""
    match name, arguments:
        case "Size", ((*numbers,),) if all(type(number) is int for number in numbers):
            return tuple(numbers)
        case "layout", ("torch.strided",):
            return None
        case "memory format", (int(),):
            return None
        case "getattr", (_Class("memory format"), str()):
            return None
        case "path", (*parts,) if all(type(part) is str for part in parts):
            return None
    raise invalid("", "arguments", name, "is called with arguments that DCP does not give")


_Operation = Callable[[_Machine, Any], None]
_OPERATIONS: dict[str, _Operation] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda m, a: None),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"), _Machine.push
    ),
    "NONE": lambda m, a: m.push(None),
    "NEWTRUE": lambda m, a: m.push(True),
    "NEWFALSE": lambda m, a: m.push(False),
    "EMPTY_TUPLE": lambda m, a: m.push(()),
    "EMPTY_LIST": lambda m, a: m.push([]),
    "EMPTY_DICT": lambda m, a: m.push({}),
    "MARK": lambda m, a: m.marks.append(len(m.stack)),
    "TUPLE": lambda m, a: m.push(tuple(m.above_mark())),
    "TUPLE1": lambda m, a: m.push(m.top(1)),
    "TUPLE2": lambda m, a: m.push(m.top(2)),
    "TUPLE3": lambda m, a: m.push(m.top(3)),
    "APPEND": lambda m, a: m.append(list(m.top(1))),
    "APPENDS": lambda m, a: m.append(m.above_mark()),
    "SETITEM": lambda m, a: m.set_items(list(m.top(2))),
    "SETITEMS": lambda m, a: m.set_items(m.above_mark()),
    "MEMOIZE": lambda m, a: m.memo.update({len(m.memo): m.stack[-1]}),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda m, a: m.memo.update({a: m.stack[-1]})),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, a: m.push(m.memo[a])),
    "GLOBAL": lambda m, a: m.push(_find(a)),
    "STACK_GLOBAL": _Machine.find,
    "NEWOBJ": _Machine.new,
    "BUILD": _Machine.build,
    "REDUCE": _Machine.call,
}
