"""Hostile DCP directories: each is refused in one line, nothing runs, and no checkpoint appears."""

import contextlib
import enum
import io
import os
import pickle
import zipfile
from pathlib import PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as sharded_tensor_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from forge_ckpt import read_tensors
from forge_ckpt.dcp import convert_from_dcp, unpickle
from forge_ckpt.dcp.convert import _check_storage
from forge_ckpt.errors import CorruptCheckpoint
from forge_testing.problems import ANY, assert_problem, rejects

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected pickle"
)


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a command that ran would leave its canary
    state = {
        "model": {"w": torch.arange(6.0).view(2, 3), "v": torch.ones(2)},
        "step": 3,
        "epoch": 4,
    }
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    return tmp_path / "in"


def canary():
    return Call(os.system, "touch canary")


def metadata_of(source):
    return pickle.loads((source / ".metadata").read_bytes())


def rewrite(source, change):
    """Change the metadata as an attacker would, who has DCP's classes too."""
    metadata = metadata_of(source)
    changed = change(metadata)
    (source / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))


def refused(source, key, code, value=ANY, error=(CorruptCheckpoint, ValueError)):
    with pytest.raises(error) as caught:
        convert_from_dcp(source, source.parent / "out", 1)
    assert_problem(caught.value, key, value, code)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 700
    assert not (source.parent / "canary").exists(), "a command ran"
    assert not list(source.parent.glob("out/step-*")), "a checkpoint was written"


#: Key and code of each refusal that is not the usual one of its group.
PROBLEMS = {
    "getattr of an admitted class": ("", "arguments"),
    "getattr-of-a-size": ("", "arguments"),
    "an admitted class with arguments": ("", "arguments"),
    "an admitted class, not made": ("MetadataIndex", "record"),
    "a layout by another name": ("", "arguments"),
    "a-size-of-a-size": ("", "operation"),
    "a-path-of-bytes": ("", "operation"),
    "a number instead of metadata": ("Metadata", "record"),
    "no storage": ("storage_data", "dict"),
    "storage for nothing": ("model.w", "missing"),
    "a key that is a tuple": ("", "damaged"),
    "names that are numbers": ("", "name"),
    "a path that is empty": ("model.w", "path"),
    "a-path-of-floats": ("", "operation"),
    "a position beyond any list": ("model.w", "path"),
    "a negative position": ("model.w", "path"),
    "two tensors of one path": ("model.v", "duplicate"),
    "a-tensor-and-an-object-of-one-path": ("step", "duplicate"),
    "two objects of one path": ("step", "duplicate"),
    "a file above": ("file", "name"),
    "a-file-by-its-root": ("file", "name"),
    "a file below": ("file", "name"),
    "a hidden file": ("file", "name"),
    "a-file-with-a-NUL": ("file", "name"),
    "a-file-that-is-not-there": ("", "unreadable"),
    "bytes beyond the file": ("__0_0.distcp", "truncated"),
    "bytes beyond all files": ("__0_0.distcp", "truncated"),
    "a negative offset": ("__0_0.distcp", "count"),
    "an offset that is true": ("__0_0.distcp", "count"),
    "an extension": ("__0_0.distcp", "transformed"),
    "bytes of another entry": ("__0_0.distcp", "overlap"),
    "a payload for many tensors": ("__0_0.distcp", "overlap"),
    "an empty payload in another": ("__0_0.distcp", "overlap"),
    "a giant shape": ("model.w", "length"),
    "more elements than any number": ("model.w", "length"),
    "a shape of 70 dims": ("offset", "shape"),
    "a missing part": ("model.w", "volume"),
    "a part twice": ("model.w", "volume"),
    "parts that overlap": ("model.w", "overlap"),
    "no parts": ("model.w", "volume"),
    "a part outside": ("model.w", "missing"),
    "a-part-of-other-dims": ("model.w", "missing"),
    "another dtype": ("model.w", "mismatch"),
    "a smaller dtype": ("model.w", "mismatch"),
    "a dtype that is a string": ("model.w", "dtype"),
    "a tensor listed as an object": ("model.w", "missing"),
    "an object listed as a tensor": ("step", "missing"),
    "nothing": ("", "error"),
    "no end": ("", "error"),
    "cut off": ("", "error"),
    "an unknown operation": ("", "error"),
    "a-name-with-a-length-of-2**63": ("", "error"),
    "bytes with a length of 2**62": ("", "error"),
    "a memo index of 2**31": ("Metadata", "record"),
    "a-memo-that-is-not-there": ("", "damaged"),
    "a-tuple-of-nothing": ("", "damaged"),
    "a-mark-that-is-missing": ("", "damaged"),
    "a call of nothing": ("", "damaged"),
    "the old form of a call": ("", "unknown"),
    "OBJ": ("", "unknown"),
    "NEWOBJ_EX": ("", "unknown"),
    "a build of a class": ("", "state"),
    "a build of a dtype": ("", "state"),
    "a class made by its name alone": ("", "new"),
    "a-function-that-torch-has": ("dtype", "unknown"),
    "a dotted name": ("dtype", "unknown"),
    "a long int of text": ("", "error"),
    "a stack of a million lists": ("", "stack"),
    "a million marks": ("", "stack"),
    "lists that hold themselves": ("Metadata", "record"),
    "doubling tuples": ("", "error"),
    "a dict of tuples that are deep": ("", "damaged"),
    "two values": ("", "error"),
    "a command for a tensor": ("model.w", "pickle"),
    "another shape": ("model.w", "mismatch"),
    "a list": ("model.w", "type"),
    "a sparse tensor": ("model.w", "type"),
    "a meta tensor": ("model.w", "type"),
    "a dict with the tensor": ("model.w", "type"),
    "a compressed archive": ("model.w", "compressed"),
    "big-endian numbers": ("model.w", "byte_order"),
    "a-module-with-code": ("model.w", "pickle"),
    "a set": ("step['a']", "type"),
    "lists that double": ("step", "expands"),
    "one text a thousand times": ("step", "expands"),
    "a list as deep as no stack": ("step", "expands"),
    "a list that holds itself": ("step", "expands"),
    "a-list-of-150": ("step", "expands"),
    "a tensor in a set": ("step['a']", "type"),
    "a dict with a list of tensors as keys": ("step key (tensor([1.]),)[0]", "tensor"),
    "a call of a number": ("", "call"),
    "a record twice": ("model.w", "larger"),
}


def w_entry(m):
    return m.state_dict_metadata["model.w"]


def info(m, **changes):
    key = MetadataIndex("model.w", [0, 0])
    for name, value in changes.items():
        setattr(m.storage_data[key], name, value)


def set_path(m, value):
    m.planner_data["model.w"] = value


def many(m):
    """A thousand tensors of the same bytes."""
    for number in range(1000):
        m.state_dict_metadata[f"x{number}"] = w_entry(m)
        m.storage_data[MetadataIndex(f"x{number}", [0, 0])] = m.storage_data[
            MetadataIndex("model.w", [0, 0])
        ]


METADATA = {
    "a command as the whole file": lambda m: canary(),
    "a command beside the names": lambda m: setattr(m, "planner_data", canary()),
    "a command as a name's path": lambda m: set_path(m, canary()),
    "a command as an entry": lambda m: m.state_dict_metadata.update(x=canary()),
    "a command as a dtype": lambda m: setattr(w_entry(m).properties, "dtype", canary()),
    "a command as a size": lambda m: setattr(w_entry(m), "size", canary()),
    "a-command-as-a-file": lambda m: info(m, relative_path=canary()),
    "a command in the storage": lambda m: m.storage_data.update({"x": canary()}),
    "eval": lambda m: Call(eval, "open('canary', 'w')"),
    "exec": lambda m: Call(exec, "open('canary', 'w')"),
    "open": lambda m: Call(open, "canary", "w"),
    "getattr of getattr": lambda m: Call(getattr, Call(__import__, "os"), "system"),
    "getattr of an admitted class": lambda m: Call(getattr, TensorProperties, "__init__"),
    "getattr-of-a-size": lambda m: Call(getattr, torch.Size([1]), "__class__"),
    "a-method-of-an-admitted-class": lambda m: Call(TensorProperties.create_from_tensor, 3),
    "torch.load inside": lambda m: Call(torch.load, "x"),
    "a storage that loads itself": lambda m: Call(torch.storage._load_from_bytes, b"x"),
    "a tensor": lambda m: m.planner_data.update(x=torch.ones(2)),
    "an admitted class with arguments": lambda m: Call(MetadataIndex, "x"),
    "an admitted class, not made": lambda m: m.storage_data.update({"x": MetadataIndex}),
    "a layout by another name": lambda m: Call(torch.serialization._get_layout, "torch.sparse_coo"),
    "a-size-of-a-size": lambda m: setattr(w_entry(m), "size", Call(torch.Size, (1.5, 2))),
    "a-path-of-bytes": lambda m: Call(PosixPath, b"x"),
    "a-class-of-another-package": lambda m: setattr(m, "planner_data", pytest.raises),
    "a number instead of metadata": lambda m: 3,
    "no storage": lambda m: setattr(m, "storage_data", None),
    "storage for nothing": lambda m: m.storage_data.clear(),
    "a key that is a tuple": lambda m: m.planner_data.update({("a",): 1}),
    "names that are numbers": lambda m: m.state_dict_metadata.update({5: BytesStorageMetadata()}),
    "a path that is empty": lambda m: set_path(m, ()),
    "a-path-of-floats": lambda m: set_path(m, (1.5,)),
    "a position beyond any list": lambda m: set_path(m, ("model", 10**9)),
    "a negative position": lambda m: set_path(m, ("model", -1)),
    "two tensors of one path": lambda m: set_path(m, m.planner_data["model.v"]),
    "a-tensor-and-an-object-of-one-path": lambda m: set_path(m, ("step",)),
    "two objects of one path": lambda m: m.planner_data.update(epoch=("step",)),
    "a file above": lambda m: info(m, relative_path="../in/__0_0.distcp"),
    "a-file-by-its-root": lambda m: info(m, relative_path="/etc/passwd"),
    "a file below": lambda m: info(m, relative_path="a/b"),
    "a hidden file": lambda m: info(m, relative_path=".metadata"),
    "a-file-with-a-NUL": lambda m: info(m, relative_path="a\0b"),
    "a-file-that-is-not-there": lambda m: info(m, relative_path="__9_0.distcp"),
    "bytes beyond the file": lambda m: info(m, offset=10**6),
    "bytes beyond all files": lambda m: info(m, length=2**59),
    "a negative offset": lambda m: info(m, offset=-1),
    "an offset that is true": lambda m: info(m, offset=True),
    "an extension": lambda m: info(m, transform_descriptors=["stream.zstd"]),
    "bytes of another entry": lambda m: info(
        m, **vars(m.storage_data[MetadataIndex("model.v", [0])])
    ),
    "a payload for many tensors": many,
    "an empty payload in another": lambda m: info(m, offset=5, length=0),
    "a giant shape": lambda m: giant(m, [2**40, 2**20]),
    "more elements than any number": lambda m: giant(m, [2**59, 2**59, 2**59]),
    "a shape of 70 dims": lambda m: giant(m, [1] * 70),
    "a missing part": lambda m: setattr(w_entry(m), "size", torch.Size([3, 3])),
    "a part twice": lambda m: w_entry(m).chunks.append(w_entry(m).chunks[0]),
    "parts that overlap": lambda m: overlap(m),
    "no parts": lambda m: w_entry(m).chunks.clear(),
    "a part outside": lambda m: setattr(w_entry(m).chunks[0], "offsets", torch.Size([1, 0])),
    "a-part-of-other-dims": lambda m: setattr(w_entry(m).chunks[0], "offsets", torch.Size([0])),
    "another dtype": lambda m: setattr(w_entry(m).properties, "dtype", torch.int32),
    "a smaller dtype": lambda m: setattr(w_entry(m).properties, "dtype", torch.int8),
    "a dtype that is a string": lambda m: setattr(w_entry(m).properties, "dtype", "float32"),
    "a tensor listed as an object": lambda m: m.state_dict_metadata.update(
        {"model.w": BytesStorageMetadata()}
    ),
    "an object listed as a tensor": lambda m: m.state_dict_metadata.update(step=w_entry(m)),
}


def giant(m, shape):
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
    entry = TensorStorageMetadata(w_entry(m).properties, torch.Size(shape), [chunk])
    m.state_dict_metadata["model.w"] = entry
    old = m.storage_data.pop(MetadataIndex("model.w", [0, 0]))
    m.storage_data[MetadataIndex("model.w", [0] * len(shape))] = old


def overlap(m):
    """Two rows at one place, the other row nowhere: the volume is right."""
    place = torch.Size([0, 0])
    row = ChunkStorageMetadata(place, torch.Size([1, 3]))
    w_entry(m).chunks[:] = [row, row]


@pytest.mark.parametrize("kind", METADATA)
def test_a_hostile_metadata(source, kind):
    rewrite(source, METADATA[kind])
    refused(source, *PROBLEMS.get(kind, ("", "unknown")))


STREAMS = {  # pickles that no pickler writes
    "nothing": b"",
    "no end": b"\x80\x04N",
    "cut off": b"\x80\x04\x8c\x50abc",
    "an unknown operation": b"\x80\x04\xff.",
    "a-name-with-a-length-of-2**63": b"\x80\x05\x8d" + b"\xff" * 7 + b"\x7f.",
    "bytes with a length of 2**62": b"\x80\x05\x8e" + b"\0" * 7 + b"\x40.",
    "a memo index of 2**31": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "a-memo-that-is-not-there": b"\x80\x04h\x07.",
    "a pop of nothing": b"\x80\x040.",
    "a-tuple-of-nothing": b"\x80\x04\x87.",
    "a-mark-that-is-missing": b"\x80\x04t.",
    "a call of nothing": b"\x80\x04R.",
    "the old form of a call": b"cos\nsystem\n(S'touch canary'\ntR.",
    "INST": b"(S'touch canary'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch canary'\no.",
    "NEWOBJ_EX": b"\x80\x04cos\nsystem\n)}\x92.",
    "an extension of copyreg": b"\x80\x02\x82\x01.",
    "a persistent id": b"Px\n.",
    "a binary persistent id": b"\x80\x04NQ.",
    "a buffer out of band": b"\x80\x05\x97.",
    "a build of a class": b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n}b.",
    "a build of a dtype": b"\x80\x04ctorch\nfloat32\n}b.",
    "a class made by its name alone": b"\x80\x04ctorch\nSize\n)\x81.",
    "a-function-that-torch-has": b"\x80\x04ctorch\nload\n.",
    "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x0cSize.__new__\x93.",
    "a long int of text": b"I" + b"9" * 5000 + b"\n.",
    "a stack of a million lists": b"\x80\x04" + b"]" * 1_100_000 + b".",
    "a million marks": b"\x80\x04" + b"(" * 1_100_000 + b".",
    "lists that hold themselves": b"\x80\x04]\x94h\x00a.",
    "doubling tuples": b"\x80\x04)\x94" + b"h\x00h\x00\x86q\x00" * 200 + b".",
    "a dict of tuples that are deep": b"\x80\x04})" + b"\x85" * 100_000 + b"Ns.",
    "two values": b"\x80\x04NN.",
    "a call of a number": b"\x80\x04K\x01)R.",
}


@pytest.mark.lane("test")
def test_a_stack_beyond_any_is_rejected(source, monkeypatch):
    monkeypatch.setattr(unpickle, "_MAX_STACK", 5)
    refused(source, "", "stack", ...)


def _streams():
    """Long ones are slow."""
    for kind, stream in STREAMS.items():
        slow = [pytest.mark.slow, pytest.mark.lane("ci")] if len(stream) > 1_000_000 else []
        yield pytest.param(kind, marks=slow)


@pytest.mark.parametrize("kind", list(_streams()))
def test_a_hostile_pickle(source, kind):
    (source / ".metadata").write_bytes(STREAMS[kind])
    refused(source, *PROBLEMS.get(kind, ("", "operation")))


def archive(source, entry, data):
    """Put ``data`` in the place of an entry's payload."""
    metadata = metadata_of(source)
    place = next(i for key, i in metadata.storage_data.items() if key.fqn == entry)
    name = "__7_0.distcp"
    (source / name).write_bytes(data)
    place.relative_path, place.offset, place.length = name, 0, len(data)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))


def saved(value, protocol=2):
    data = io.BytesIO()
    torch.save(value, data, pickle_protocol=protocol)
    return data.getvalue()


def rezipped(change, value=None, compression=zipfile.ZIP_STORED):
    old = zipfile.ZipFile(
        io.BytesIO(saved(torch.arange(6.0).view(2, 3) if value is None else value))
    )
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return data.getvalue()


def doubling():
    value = ["x"]
    for _ in range(40):
        value = [value, value]
    return value


def long_text():
    text = "y" * 10_000
    return [text] * 10_000


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def longer_storage(name, data):
    """The pickle asks for 2,000,000 elements of a record that has 6."""
    number = b"J" + (2_000_000).to_bytes(4, "little")
    return data.replace(b"K\x06tq", number + b"tq") if name.endswith("data.pkl") else data


TENSORS = {
    "a command for a tensor": lambda: saved(canary()),
    "a pickle alone": lambda: pickle.dumps(canary()),
    "the old form of torch.save": lambda: legacy(torch.arange(6.0).view(2, 3)),
    "another shape": lambda: saved(torch.zeros(3, 2)),
    "another dtype": lambda: saved(torch.zeros(2, 3).int()),
    "a list": lambda: saved([1, 2]),
    "a sparse tensor": lambda: saved(torch.eye(2, 3).to_sparse()),
    "a meta tensor": lambda: saved(torch.zeros(2, 3, device="meta")),
    "a dict with the tensor": lambda: saved({"w": torch.zeros(2, 3)}),
    "noise": lambda: bytes(range(256)) * 8,
    "nothing of it": lambda: saved(torch.zeros(2, 3))[:700],
    "a record that is too short": lambda: rezipped(  # prose: the name of a case
        lambda n, d: d[:8] if n.endswith("data/0") else d
    ),
    "a storage beyond its record": lambda: rezipped(longer_storage),
    "a compressed archive": lambda: rezipped(lambda n, d: d, compression=zipfile.ZIP_DEFLATED),
    "a record twice": lambda: listed_twice(),
    "big-endian numbers": lambda: rezipped(lambda n, d: b"big" if n.endswith("byteorder") else d),
    "a-module-with-code": lambda: rezipped(
        lambda n, d: pickle.dumps(canary(), 2) if n.endswith("data.pkl") else d
    ),
}


def listed_twice():
    """The directory of the archive has its largest record two times."""
    old = zipfile.ZipFile(io.BytesIO(saved(torch.zeros(2000))))
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
        new.filelist.append(max(new.filelist, key=lambda entry: entry.file_size))
    return data.getvalue()


def legacy(value):
    data = io.BytesIO()
    torch.save(value, data, _use_new_zipfile_serialization=False)
    return data.getvalue()


@pytest.mark.parametrize("kind", TENSORS)
def test_a_hostile_payload_of_a_tensor(source, kind):
    archive(source, "model.w", TENSORS[kind]())
    refused(source, *PROBLEMS.get(kind, ("model.w", "damaged")))


OBJECTS = {
    "a command": lambda: saved(canary()),
    "a command inside": lambda: saved({"a": [1, canary()]}),
    "a command by protocol 4": lambda: saved(canary(), protocol=4),
    "a class": lambda: saved(os.system),
    "a-function-of-torch": lambda: saved(torch.load),
    "an object of another package": lambda: saved(PosixPath("x")),
    "a set": lambda: saved({"a": {1, 2}}),
    "lists that double": lambda: saved(doubling()),
    "one text a thousand times": lambda: saved(long_text()),
    "a list as deep as no stack": lambda: rezipped(
        lambda n, d: b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"." if n.endswith("pkl") else d
    ),
    "a list that holds itself": lambda: rezipped(
        lambda n, d: b"\x80\x02]q\x00h\x00a." if n.endswith("data.pkl") else d
    ),
    "a-list-of-150": lambda: saved(nested(150)),
    "a tensor in a set": lambda: saved({"a": {torch.ones(1)}}),
    "a dict with a list of tensors as keys": lambda: saved({(torch.ones(1),): 1}),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_hostile_payload_of_an_object(source, kind):
    archive(source, "step", OBJECTS[kind]())
    refused(source, *PROBLEMS.get(kind, ("step", "pickle")))


@pytest.mark.lane("test")
def test_a_storage_beyond_its_record_is_rejected_whatever_torch_does():
    with rejects("w", 8, "storage", CorruptCheckpoint):
        _check_storage(torch.zeros(2), {4}, "w")


@pytest.mark.lane("test")
def test_hostile_files(source):
    payload = source / "__0_0.distcp"
    data = payload.read_bytes()
    payload.write_bytes(data[:-100])
    refused(source, payload.name, "truncated", len(data) - 100, CorruptCheckpoint)
    payload.unlink()
    payload.symlink_to("/etc/passwd")
    refused(source, "", "unreadable", ..., CorruptCheckpoint)
    payload.unlink()
    os.mkfifo(payload)
    refused(source, "", "not_regular", ..., CorruptCheckpoint)
    payload.unlink()
    payload.write_bytes(data)
    metadata = source / ".metadata"
    metadata.rename(source / "elsewhere")
    metadata.symlink_to("elsewhere")
    refused(source, "", "unreadable", ..., CorruptCheckpoint)
    metadata.unlink()
    with open(metadata, "wb") as file:
        file.truncate(2**30)
    refused(source, "", "size", 2**30, CorruptCheckpoint)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_every_flipped_byte_of_the_metadata_is_harmless(source):
    """Refused or read, by the machine alone: no other exception and no call, whatever the byte."""
    data = (source / ".metadata").read_bytes()
    for position in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            changed = bytearray(data)
            changed[position] ^= flip
            with contextlib.suppress(ValueError):
                unpickle.load(bytes(changed))


@pytest.mark.lane("test")
def test_the_machine_reads_what_pickle_reads(source):
    """The same records as by torch's classes, for what torch wrote."""
    ours, torchs = unpickle.load((source / ".metadata").read_bytes()), metadata_of(source)
    assert ours.fields["planner_data"] == torchs.planner_data
    found = {}
    for key, record in ours.fields["storage_data"].items():
        found[MetadataIndex(key.fields["fqn"], key.fields.get("offset"))] = _StorageInfo(
            **record.fields
        )
    assert found == torchs.storage_data
    for name, entry in torchs.state_dict_metadata.items():
        record = ours.fields["state_dict_metadata"][name]
        assert record.kind == type(entry).__name__
        if isinstance(entry, TensorStorageMetadata):
            assert record.fields["size"] == tuple(entry.size)
            assert record.fields["properties"].fields[0] == entry.properties.dtype


def older_properties(entry):
    """As torch wrote them until 2.2; the class is still there."""
    return sharded_tensor_metadata.TensorProperties(dtype=entry.properties.dtype)


class NamingEnums(pickle.Pickler):
    """As some releases of Python 3.11 pickle the members of an enum."""

    def reducer_override(self, value):
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


@pytest.mark.lane("test")
@pytest.mark.parametrize("form", ["torch 2.2", "Python 3.11.2"])
def test_older_forms_of_the_metadata(source, form):
    data, metadata = io.BytesIO(), metadata_of(source)
    if form == "torch 2.2":
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata):
                entry.properties = older_properties(entry)
        del metadata.storage_meta
        pickle.dump(metadata, data)
        assert b"_shard.sharded_tensor.metadata" in data.getvalue()
    else:
        NamingEnums(data).dump(metadata)
        assert b"getattr" in data.getvalue()
    (source / ".metadata").write_bytes(data.getvalue())
    convert_from_dcp(source, source.parent / "out", 1)
    found = dict(read_tensors(source.parent / "out"))
    assert torch.equal(found["model.w"], torch.arange(6.0).view(2, 3))
