"""Manifests that an attacker would write, with digests that fit: refused in one line, or harmless.

Each mutant is a real manifest with some changes of its structure, sealed again. It must be refused
(CorruptCheckpoint, CheckpointMismatch), or load with every element of every tensor read from the file:
targets and fresh memory are poisoned before, and no byte of the file is the poison.
"""

import contextlib
import hashlib
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from forge_ckpt import (
    CheckpointMismatch,
    CorruptCheckpoint,
    RNGState,
    Store,
    cli,
    load_weights,
    read_tensors,
)
from forge_ckpt._shared.file_bytes import byte_view
from forge_testing import run_on_ranks

pytestmark = pytest.mark.lane("test")

POISON = 0xA5


def _poison(tensor):
    byte_view(tensor)[:] = bytes([POISON]) * (tensor.numel() * tensor.element_size())
    return tensor


def _clean(shape, dtype, seed):
    """Random bytes, none of them the poison."""
    size = torch.empty(shape, dtype=dtype).nbytes
    g = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 0x80, (size,), generator=g, dtype=torch.uint8)
    return found.view(dtype).reshape(shape)


class Optimizer:
    """Has no slots before it loads: their memory is made by the load."""

    load_replaces = True

    def __init__(self):
        self.state = {}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def _state(seed):
    tensors = {
        "w": _clean((6, 7), torch.float32, seed),
        "b": _clean((5,), torch.bfloat16, seed),
        "scalar": _clean((), torch.int64, seed),
        "empty": torch.zeros(0, 3),
        "layers": [_clean((3, 2, 4), torch.uint8, seed), _clean((9,), torch.float64, seed)],
    }
    tensors["tied"] = tensors["w"]
    optimizer = Optimizer()
    optimizer.state = {"state": {0: {"m": _clean((6, 7), torch.float32, seed), "step": 3.0}}}
    loader = {"cursor": seed, "t": (1, {2: 3}), "nan": float("nan"), "b": b"x", "d": torch.bfloat16}
    return {"model": tensors, "optimizer": optimizer, "loader": loader, "n": seed}


def _targets():
    state = _state(0)
    for tensor in _tensors(state["model"]):
        _poison(tensor)
    state["optimizer"] = Optimizer()
    return {**state, "loader": None, "n": None}


def _tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree
    return [t for child in children for t in _tensors(child)] if _is_container(tree) else []


def _is_container(tree):
    return isinstance(tree, (dict, list, tuple))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz")
    with Store(path) as store:
        for step in (1, 2):
            store.save(step, _state(step))
    assert bytes([POISON]) not in (path / "step-00000002" / "data-0.bin").read_bytes()
    return path


# ---- mutations of a tree of JSON

_deep = []
for _ in range(900):
    _deep = [_deep]
VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, 2**59, 2**63, 2**64 - 1, 2**70, 10**4000, -(2**63)),
    *(1.5, 1e308, float("nan"), float("inf"), -0.0),
    *("", "x" * 5000, "\ud800", "a\x00b", "a\nb\x1b[31m", "../../etc/passwd", "/etc/passwd"),
    *(
        "data-0.bin",
        "data-1.bin",
        "data-00.bin",
        "manifest.json",
        "float8_e4m3fn",
        "float32",
        "uint8",
    ),
    *(
        "complex128",
        "bits1x8",
        "quint8",
        "float4_e2m1fn_x2",
        "load",
        "0" * 64,
        "model.w",
        "..",
        "$",
    ),
    *([], {}, [[]], [1] * 100, [0] * 100_000, _deep, [None], [-1], [2**62, 4]),
    *({"$": "nope", "v": 1}, {"$": "float"}, {"$": "float", "v": "zz"}, {"$": ["x"], "v": 0}),
    *({"$": "size", "v": [2**70]}, {"$": "size", "v": "ab"}, {"$": "dtype", "v": "load"}),
    *({"$": "dict", "v": [[[1], 2]]}, {"$": "dict", "v": [[1]]}, {"$": "bytes", "v": "\ud800"}),
    *({"$": "ndarray", "v": ["float64", [2**40], ""]}, {"$": "ndarray", "v": ["O", [1], "AAAA"]}),
    *({"$": "ndarray", "v": ["float32", [-1, -1], "AAAA"]}, {"$": "ndarray", "v": [[], 1, 2]}),
    *({"$": "odict", "v": [[{"$": "nope"}, 1]]}, {"$": "tuple", "v": 7}, {"$": {"$": "x"}, "v": 1}),
]


def _copy(tree):
    return json.loads(json.dumps(tree))  # deepcopy recurses in Python


def _places(tree, found, depth=0):
    """(container, key) of every value of the tree."""
    if depth < 12:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            found.append((tree, key))
            if isinstance(value, (dict, list)) and len(value) < 1000:
                _places(value, found, depth + 1)
    return found


def _delete(rng, tree, places):
    container, key = rng.choice(places)
    del container[key]


def _replace(rng, tree, places):
    container, key = rng.choice(places)
    container[key] = _copy(rng.choice(VALUES))


def _nudge(rng, tree, places):
    numbers = [(c, k) for c, k in places if type(c[k]) is int]
    container, key = rng.choice(numbers)
    n = container[key]
    container[key] = rng.choice(
        [n + 1, n - 1, -n, 2 * n, n + 64, n - 4, n + 2**32, n + 0.5, str(n)]
    )


def _swap(rng, tree, places):
    (a, i), (b, j) = rng.choice(places), rng.choice(places)
    a[i], b[j] = _copy(b[j]), _copy(a[i])


def _duplicate(rng, tree, places):
    container, key = rng.choice(places)
    if isinstance(container, list):
        container.insert(rng.randrange(len(container) + 1), _copy(container[key]))
    else:
        name = (
            f"{key}.x" if rng.random() < 0.5 else rng.choice(["model", "model.w.0", "n.0", "", "$"])
        )
        container[name] = _copy(container[key])


def _rename(rng, tree, places):
    places = [(c, k) for c, k in places if isinstance(c, dict)]
    container, key = rng.choice(places)
    name = rng.choice([v for v in VALUES if isinstance(v, str)] + [key + "\ud800", key + "x"])
    container[name] = container.pop(key)


def _chunks(rng, tree, places):
    """Chunks of one tensor that overlap, leave gaps, or take bytes of another tensor."""
    name = rng.choice([n for n, e in tree["tensors"].items() if e["chunks"]])
    entry = tree["tensors"][name]
    (chunk, *_) = entry["chunks"]
    kind = rng.randrange(5)
    if kind == 0:  # the bytes of another tensor: harmless, every element is read
        chunk["start"] = rng.randrange(0, 64)
    elif kind == 1 and chunk["sizes"]:  # halves
        dim = rng.randrange(len(chunk["sizes"]))
        n = chunk["sizes"][dim]
        cut = rng.randrange(0, n + 1)
        per = chunk["bytes"] // max(n, 1)
        first, second = _copy(chunk), _copy(chunk)
        first["sizes"][dim], first["bytes"] = cut, cut * per
        second["sizes"][dim], second["bytes"] = n - cut, (n - cut) * per
        second["offsets"][dim] = cut + rng.choice([0, 0, 0, 1, -1])
        entry["chunks"] = [first, second]
    elif kind == 2:
        entry["chunks"] = [_copy(chunk) for _ in range(rng.choice([2, 3, 1000]))]
    elif kind == 3:
        entry["dtype"] = rng.choice(["float64", "uint8", "int16", "complex64", "float8_e5m2"])
    else:
        entry["shape"] = rng.choice(
            [[42], [7, 6], [6, 7, 1], [3, 14], [], [0], [1] * 64, [2**30] * 3]
        )


def _many(rng, tree, places):
    table = tree[rng.choice(["tensors", "objects", "files"])]
    key = rng.choice(list(table))
    for n in range(rng.choice([10, 3000])):
        table[f"model.{n}"] = table[key]


def _relabel(rng, tree, places):
    """A name and its path, changed together."""
    table = tree[rng.choice(["tensors", "objects"])]
    entry = table.pop(rng.choice(list(table)))
    last = rng.choice(["\ud800", "a\nb", "\x1b[31m", "x" * 5000, "", ".", "$", 2**70, -1])
    kept = rng.randrange(len(entry["path"]))
    entry["path"][kept:] = rng.choice(
        [[last], [last], ["state", last], [["list", 10**5], last], []]
    )
    table[".".join(str(step[1] if isinstance(step, list) else step) for step in entry["path"])] = (
        entry
    )


OPERATIONS = [
    _relabel,
    _delete,
    _replace,
    _replace,
    _replace,
    _nudge,
    _nudge,
    _swap,
    _duplicate,
    _rename,
]
OPERATIONS += [_chunks, _chunks]


def _mutant(seed, table):
    rng = random.Random(seed)
    tree = _copy(table)
    if seed % 400 == 0:
        _many(rng, tree, [])
    text = seed % 50 == 7  # hostile as a text, with the content of the original
    for _ in range(0 if text else rng.choice([1, 1, 1, 2, 3, 8])):
        try:
            rng.choice(OPERATIONS)(rng, tree, _places(tree, []))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
            continue  # an earlier mutation took the place away
    body = json.dumps(tree, separators=(",", ":")).encode()
    if text:
        body = rng.choice(
            [
                json.dumps(tree, ensure_ascii=False).encode("utf-16", "surrogatepass"),
                b"\xef\xbb\xbf" + body,
                body.replace(b'"tensors"', b'"tensors": 1, "tensors"'),
                body.replace(b'"step":2', b'"step":2,"step":1e999'),
                body.replace(b":2", b":" + b"9" * 5000),
                b"[" * 200_000,
                *(
                    body.replace(b'"format":1', b'"format":2,"digest":' + digest)
                    for digest in (b'"md5"', b"[]", b"null", b'"sha256"', b'"\\ud800"', b"1e400")
                ),
                b'"' + body[:50] + b"\xff\xfe" + b'"',
                b"",
            ]
        )
    return body


def _seal(body):
    digest = hashlib.sha256(body).hexdigest().encode()
    return b'{"sha256": "' + digest + b'", "manifest": ' + body + b"}\n"


def _refusal(error):
    """Checks the words of a refusal; returns its class."""
    text = str(error)
    text.encode()  # a lone surrogate cannot be printed
    assert type(error) in (CorruptCheckpoint, CheckpointMismatch), repr(error)
    assert len(text) < 4000, text[:5000]  # eight names of 300
    lines = text.split("\n")  # "no sound checkpoint ..." and a line for its step; names that differ
    assert len(lines) == 2 or type(error) is CheckpointMismatch, ascii(text)
    assert all(line.isprintable() for line in lines), ascii(text)
    return type(error).__name__


def _loaded(root):
    """What a load of the newest step gives: "corrupt", "mismatch", or "filled"."""
    state = _targets()
    before = [tensor.clone() for tensor in _tensors(state["model"])]
    with Store(root, read_only=True) as store:
        try:
            step = store.load(state)
        except (CorruptCheckpoint, CheckpointMismatch) as error:
            for was, now in zip(before, _tensors(state["model"])):
                assert byte_view(was) == byte_view(now), "refused, and changed"
            return _refusal(error)
    assert step == 2
    for tensor in _tensors([state["model"], state["optimizer"].state]):
        assert POISON not in bytes(byte_view(tensor.contiguous())), "an element was not read"
    return "filled"


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(6, 7))


def _read_all(root):
    for name, tensor in read_tensors(root):
        assert POISON not in bytes(byte_view(tensor)), f"{name}: an element was not read"


def _command(*arguments):
    return lambda root: cli.main([str(root) if a is _ROOT else a for a in arguments])


_ROOT = object()
DOORS = [
    _read_all,
    lambda root: str(load_weights(root, _Model())),
    _command("ls", _ROOT),
    _command("inspect", _ROOT),
    _command("inspect", _ROOT, "--json"),
    _command("verify", _ROOT),
    _command("cat", _ROOT, "model.w"),
    _command("cat", _ROOT, "loader", "--json"),
    _command("diff", _ROOT, _ROOT),
]


def _refused_at_other_doors(root, capsys):
    """Functions raise the same classes, commands leave with their codes; all that is printed is text."""
    for door in DOORS:
        try:
            code = door(root)
            assert type(code) is not int or code in (0, 66, 78)
        except UnicodeError:  # a ValueError, too
            raise
        except (CorruptCheckpoint, ValueError) as error:
            print(error)
    printed = capsys.readouterr()
    for line in (printed.out + printed.err).split("\n"):
        line.encode()
        assert line.isprintable(), ascii(line)


@pytest.fixture
def victim(root, tmp_path, monkeypatch):
    """Step 2 alone, in a store of its own, and fresh memory that is poisoned."""
    shutil.copytree(root / "step-00000002", tmp_path / "store" / "step-00000002")
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return _poison(made) if made.device.type == "cpu" and made.is_contiguous() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    return tmp_path / "store"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(300), marks=pytest.mark.lane("ci")), range(300, 4000)],
    ids=str,
)
def test_F97_manifests_with_hostile_content_are_rejected_or_harmless(victim, seeds, capsys):
    target = victim / "step-00000002" / "manifest.json"
    table = json.loads(target.read_bytes())["manifest"]
    assert _loaded(victim) == "filled"
    counts = Counter()
    for seed in seeds:
        body = _mutant(seed, table)
        target.write_bytes(_seal(body))
        with _seed_noted(seed, body):
            counts[_loaded(victim)] += 1
            if seed % 4 == 0 or seed % 50 == 7:
                _refused_at_other_doors(victim, capsys)
    assert counts["CorruptCheckpoint"] > len(seeds) // 2
    assert counts["CheckpointMismatch"] > len(seeds) // 50
    assert counts["filled"] > len(seeds) // 50


@contextlib.contextmanager
def _seed_noted(seed, body):
    try:
        yield
    except Exception as error:
        error.add_note(f"seed {seed}: {body[:3000]!r}")
        raise


def _job(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": RNGState()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(100), marks=pytest.mark.lane("ci")), range(100, 2000)],
    ids=str,
)
def test_F97_what_an_object_cannot_use_falls_back_to_the_older_checkpoint(tmp_path, seeds):
    """torch's optimizers and RNGState get the hostile values; step 1 is sound."""
    with Store(tmp_path) as store:
        for step in (1, 2):
            store.save(step, _job(step))
    target = tmp_path / "step-00000002" / "manifest.json"
    table = json.loads(target.read_bytes())["manifest"]
    wanted = _job(1)["model"].state_dict()
    steps = Counter()
    for seed in seeds:
        body = _mutant(seed, table)
        target.write_bytes(_seal(body))
        state = _job(7)
        with _seed_noted(seed, body), Store(tmp_path, read_only=True) as store:
            try:
                step = store.load(state)
            except CheckpointMismatch as error:
                steps[_refusal(error)] += 1
                continue
            steps[step] += 1
            if step == 1:
                assert all(map(torch.equal, state["model"].state_dict().values(), wanted.values()))
                assert state["optimizer"].param_groups[0]["lr"] == 0.1
    assert steps[1] > len(seeds) // 2
    assert steps[2] > len(seeds) // 50


def _renamed(table, name, path):
    table["tensors"][name] = {**table["tensors"].pop("model.w"), "path": path}


FOUND_BY_FUZZING = {  # what was raised: UnicodeDecodeError, UnicodeEncodeError when printed, two lines
    "utf16": lambda table: json.dumps(table).encode("utf-16"),
    "surrogate": lambda table: _renamed(table, "model.\ud800", ["model", "\ud800"]),
    "surrogate_of_another_path": lambda table: _renamed(table, "model.\ud800", ["model", -1, []]),
    "lines": lambda table: _renamed(table, "model.a\nb\x1b[31m", ["model", "a\nb\x1b[31m"]),
    "long": lambda table: _renamed(table, "model." + "x" * 10**5, ["model", "x" * 10**5]),
}


@pytest.mark.parametrize("kind", FOUND_BY_FUZZING)
def test_F97_names_and_encodings_that_no_message_can_hold(victim, kind, capsys):
    target = victim / "step-00000002" / "manifest.json"
    table = json.loads(target.read_bytes())["manifest"]
    body = FOUND_BY_FUZZING[kind](table)
    target.write_bytes(_seal(body or json.dumps(table).encode()))
    assert _loaded(victim) in ("CorruptCheckpoint", "CheckpointMismatch")
    _refused_at_other_doors(victim, capsys)


def test_F97_an_object_instead_of_the_random_states(tmp_path):
    with Store(tmp_path) as store:
        store.save(1, {"rng": RNGState()})
        store.save(2, {"rng": 7})
        assert store.load({"rng": RNGState()}) == 1


# ---- two ranks, each of which reads parts of the boxes


def _sharded(value):
    mesh = init_device_mesh("cpu", (2,))
    w = _clean((6, 8), torch.float32, value)
    return {
        "rows": distribute_tensor(w, mesh, [Shard(0)]),
        "columns": distribute_tensor(w, mesh, [Shard(1)]),
        "all": w.clone(),
    }


def _load_on_ranks(root, seeds):
    """(seed, what this rank found) of all seeds; every rank must find the same."""
    target, rank, empty = (
        Path(root) / "step-00000001" / "manifest.json",
        dist.get_rank(),
        torch.empty,
    )
    with Store(root) as store:
        store.save(1, {"m": _sharded(1), "n": 1})
    table = json.loads(target.read_bytes())["manifest"]
    dist.barrier()  # before rank 0 writes there
    found = []
    for seed in seeds:
        if rank == 0:
            target.write_bytes(_seal(_mutant(seed, table)))
        # to other dims than those that were saved
        state = {"m": {name: _sharded(1)[name] for name in ("rows", "columns", "all")}, "n": None}
        state["m"]["rows"] = state["m"]["rows"].redistribute(placements=[Shard(1)])
        local = [t.to_local() if hasattr(t, "to_local") else t for t in state["m"].values()]
        dist.barrier()
        for tensor in local:
            _poison(tensor)
        torch.empty = lambda *args, **kwargs: _poisoned_if_host(empty(*args, **kwargs))
        try:
            with Store(root, read_only=True) as store:
                store.load(state)
            bad = any(POISON in bytes(byte_view(tensor.contiguous())) for tensor in local)
            found.append((seed, "a hole" if bad else "filled"))
        except (CorruptCheckpoint, CheckpointMismatch) as error:
            kept = all(set(bytes(byte_view(tensor.contiguous()))) == {POISON} for tensor in local)
            found.append((seed, type(error).__name__ if kept else "refused, and changed"))
        finally:
            torch.empty = empty
        dist.barrier()
    return found


def _poisoned_if_host(tensor):
    host = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    return _poison(tensor) if host and tensor.is_contiguous() else tensor


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(60), marks=pytest.mark.lane("ci")), range(60, 800)],
    ids=str,
)
def test_F97_all_ranks_reject_a_hostile_manifest_or_none_has_a_hole(tmp_path, seeds):
    first, second = run_on_ranks(2, _load_on_ranks, str(tmp_path), seeds, timeout=300)
    assert first == second
    kinds = Counter(kind for _, kind in first)
    assert set(kinds) == {"CorruptCheckpoint", "CheckpointMismatch", "filled"}, kinds
