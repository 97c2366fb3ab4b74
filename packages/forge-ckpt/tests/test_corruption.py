"""The corpus of damage: kinds of harm x regions of a checkpoint x ways to load it. All of it is found.

A checkpoint of two ranks: each file holds 64-byte aligned parts of tensors, the largest over three blocks.
Each case harms one place and loads on one process or on two ranks, of which one alone reads that place.
"""

import hashlib
import itertools
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from forge_ckpt import CorruptCheckpoint, Store, manifest, read_tensors
from forge_ckpt.files import Directory
from forge_testing import run_on_ranks

pytestmark = pytest.mark.distributed

BLOCK = manifest.BLOCK_BYTES
DATA = ["data-0.bin", "data-1.bin"]
FILES = [*DATA, "manifest.json"]
MANIFEST = "step-00000002/manifest.json"


def _whole(seed):
    """Full tensors; every rank's part of ``big`` ends in its third block, between two small ones."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"a": (2, 1001), "big": (2, 2 * BLOCK + 777), "z": (2, 333)}
    return {n: torch.randint(1, 256, s, generator=g, dtype=torch.uint8) for n, s in shapes.items()}


def _state(tensors, step):
    if dist.is_initialized() and dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        tensors = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in tensors.items()}
    return {"m": {**tensors, "n": step}}


def _save(root):
    with Store(root) as store:
        for step in (1, 2):
            store.save(step, _state(_whole(step), step))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus") / "store"
    run_on_ranks(2, _save, str(root))
    return root


# ---- harm: functions of (path of the file, the same file of step 1, offset, random numbers)


def _overwrite(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def _read(path, at, size):
    with open(path, "rb") as file:
        file.seek(at)
        return file.read(size)


def _flip(path, other, at, rng):
    _overwrite(path, at, bytes([_read(path, at, 1)[0] ^ 1 << rng.randrange(8)]))


def _zero_page(path, other, at, rng):
    page = at // 4096 * 4096
    _overwrite(path, page, bytes(len(_read(path, page, 4096))))


def _zero_byte(path, other, at, rng):
    byte = _read(path, at, 1)
    _overwrite(path, at, bytes(1) if byte != b"\0" else b"\1")


def _run(path, other, at, rng):
    _overwrite(path, at, rng.randbytes(len(_read(path, at, 700))))


def _of_other_step(path, other, at, rng):
    """A page of the same place of another step: a write that the disk lost."""
    page = at // 4096 * 4096
    _overwrite(path, page, _read(other, page, len(_read(path, page, 4096))))


def _truncate(path, other, at, rng):
    os.truncate(path, at)


def _lose_byte(path, other, at, rng):
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[:at] + data[at + 1 :])


def _lose_byte_padded(path, other, at, rng):
    """The rest moves by one, and the size is right."""
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[:at] + data[at + 1 :] + b"\0")


def _insert(path, other, at, rng):
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[:at] + b"\0" + data[at:])


def _exchange(path, other, at, rng):
    """Two bytes that differ change places: every sum of bytes stays."""
    data = _read(path, 0, 2 * BLOCK)
    far = next(n for n in range(len(data)) if data[n : n + 1] != _read(path, at, 1))
    byte = _read(path, at, 1)
    _overwrite(path, at, data[far : far + 1])
    _overwrite(path, far, byte)


IN_PLACE = [_flip, _zero_page, _zero_byte, _run, _of_other_step, _truncate, _lose_byte]
IN_PLACE += [_lose_byte_padded, _insert, _exchange]


def _extend(path, size):
    with open(path, "ab") as file:
        file.write(bytes(size))


def _replaced(make):
    def harm(path, other):
        os.unlink(path)
        make(path, other)

    return harm


WHOLE_FILE = {
    "missing": lambda path, other: os.unlink(path),
    "empty": lambda path, other: os.truncate(path, 0),
    "one_byte": lambda path, other: os.truncate(path, 1),
    "a_byte_longer": lambda path, other: _extend(path, 1),
    "a_page_longer": lambda path, other: _extend(path, 4096),
    "a_block_longer": lambda path, other: _extend(path, BLOCK),
    "zeros": lambda path, other: _overwrite(path, 0, bytes(os.path.getsize(path))),
    "of_other_step": _replaced(lambda path, other: shutil.copy(other, path)),
    "link": _replaced(lambda path, other: os.symlink(other, path)),
    "link_to_nothing": _replaced(lambda path, other: os.symlink("nowhere", path)),
    "link_to_itself": _replaced(lambda path, other: os.symlink(os.path.basename(path), path)),
    "directory": _replaced(lambda path, other: os.mkdir(path)),
    "pipe": _replaced(lambda path, other: os.mkfifo(path)),
    "device": _replaced(lambda path, other: os.symlink("/dev/zero", path)),
}


def _move_block(path, source, target, back):
    first, second = (_read(path, n * BLOCK, BLOCK) for n in (source, target))
    size = min(len(first), len(second))  # the last block is shorter
    _overwrite(path, target * BLOCK, first[:size])
    if back:
        _overwrite(path, source * BLOCK, second[:size])


def _across(folder, first, second):
    """Block ``second`` of data-1 takes the place of block ``first`` of data-0, and the other way round."""
    a, b = (os.path.join(folder, name) for name in DATA)
    one, two = _read(a, first * BLOCK, BLOCK), _read(b, second * BLOCK, BLOCK)
    size = min(len(one), len(two))
    _overwrite(a, first * BLOCK, two[:size])
    _overwrite(b, second * BLOCK, one[:size])


def _swap(folder, first, second):
    a, b = os.path.join(folder, first), os.path.join(folder, second)
    os.rename(a, a + ".x")
    os.rename(b, a)
    os.rename(a + ".x", b)


def _regions(step):
    """{file: {name: offset}} of the places that are harmed."""
    with Directory(step) as directory:
        table = manifest.read(directory, 2)
    found = {}
    for name in DATA:
        chunks = sorted(
            (c.start, c.start + c.length)
            for entry in table.tensors.values()
            for c in entry.chunks
            if c.file == name
        )
        (_, end), (begin, _) = next((a, b) for a, b in itertools.pairwise(chunks) if a[1] < b[0])
        size = table.files[name].size
        found[name] = {
            "first_byte": 0,
            "first_block": 5000,
            "end_of_block": BLOCK - 1,
            "begin_of_block": BLOCK,
            "middle_block": BLOCK + BLOCK // 2,
            "end_of_tensor": end - 1,
            "padding": end,
            "end_of_padding": begin - 1,
            "begin_of_tensor": begin,
            "last_block": 2 * BLOCK + 100,
            "last_byte": size - 1,
        }
    size = (step / "manifest.json").stat().st_size
    body = len(manifest._PREFIX) + 64 + len(manifest._MIDDLE)
    found["manifest.json"] = {
        "frame": 3,
        "digest": 40,
        "middle_of_frame": len(manifest._PREFIX) + 70,
        "header": body + 5,
        "body": size // 2,
        "end_of_body": size - 5,
        "tail": size - 2,
    }
    return found


def _cases(step):
    """{name: harm of (folder of step 2, folder of step 1)}."""
    cases = {}
    for name, regions in _regions(step).items():
        for (region, at), harm in itertools.product(regions.items(), IN_PLACE):

            def in_place(folder, other, name=name, at=at, harm=harm, seed=at):
                harm(*(os.path.join(f, name) for f in (folder, other)), at, random.Random(seed))

            cases[f"{name}-{region}-{harm.__name__}"] = in_place
    for name, (kind, harm) in itertools.product(FILES, WHOLE_FILE.items()):
        cases[f"{name}-{kind}"] = lambda folder, other, name=name, harm=harm: harm(
            *(os.path.join(f, name) for f in (folder, other))
        )
    for name, (a, b), back in itertools.product(
        DATA, itertools.permutations(range(3), 2), [True, False]
    ):
        if back and a > b:
            continue
        cases[f"{name}-block_{a}_{'swapped_with' if back else 'repeated_as'}_{b}"] = (
            lambda folder, other, name=name, a=a, b=b, back=back: _move_block(
                os.path.join(folder, name), a, b, back
            )
        )
    for a, b in itertools.product(range(3), repeat=2):
        cases[f"blocks_{a}_and_{b}_across_files"] = lambda folder, other, a=a, b=b: _across(
            folder, a, b
        )
    for a, b in itertools.combinations(FILES, 2):
        cases[f"{a}_and_{b}_swapped"] = lambda folder, other, a=a, b=b: _swap(folder, a, b)
    return cases


def _digests(folder):
    """What tells that a harm changed anything: kind of each name, and its bytes."""
    return {
        entry.name: (
            entry.stat(follow_symlinks=False).st_mode,
            hashlib.sha256(Path(entry).read_bytes()).digest()
            if entry.is_file(follow_symlinks=False)
            else b"",
        )
        for entry in os.scandir(folder)
    }


def _harmed(original, root, harm, older, before):
    """A store with step 2 harmed, and with step 1 if ``older``; ``before``: digests of step 2."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(original / "step-00000002", root / "step-00000002")
    if older:
        shutil.copytree(original / "step-00000001", root / "step-00000001", copy_function=os.link)
    harm(str(root / "step-00000002"), str(original / "step-00000001"))
    assert _digests(root / "step-00000002") != before, "no harm"


def _load(original, root, names, older):
    """What each case gives on this rank: None as it must be, else what was wrong."""
    original, root = Path(original), Path(root)
    rank = dist.get_rank() if dist.is_initialized() else 0
    together = dist.barrier if dist.is_initialized() else lambda: None
    kept, wanted = _state(_whole(9), 9), _state(_whole(1 if older else 9), 1 if older else 9)
    cases, before = _cases(original / "step-00000002"), _digests(original / "step-00000002")
    wrong = {}
    for name in names:
        if rank == 0:
            _harmed(original, root, cases[name], older, before)
        together()
        state = {"m": {n: t.clone() if n != "n" else t for n, t in kept["m"].items()}}
        with Store(root) as store:
            try:
                result = store.load(state)
            except CorruptCheckpoint as error:
                result = "corrupt" if "step-00000002" in str(error) else str(error)
            except Exception as error:
                result = repr(error)
            aside = [step for step, _ in store.quarantined]
        together()
        if result != (1 if older else "corrupt"):
            wrong[name] = result
        elif aside != [2] or not (root / "quarantine" / "step-00000002-0").exists():
            wrong[name] = f"set aside {aside}"
        elif not _same(state["m"], wanted["m"]):
            wrong[name] = "other bits than the older checkpoint" if older else "the state changed"
        together()
    return wrong


def _read_and_verify(original, root, names):
    """What `read_tensors` and `verify` do not find of each case; one process."""
    original, root = Path(original), Path(root)
    cases, before = _cases(original / "step-00000002"), _digests(original / "step-00000002")
    wrong = {}
    for name in names:
        _harmed(original, root, cases[name], False, before)
        with Store(root, read_only=True) as store:
            doors = (lambda: list(read_tensors(root / "step-00000002")), lambda: store.verify(2))
            for door in doors:
                try:
                    door()
                    wrong[name] = "not found"
                except CorruptCheckpoint:
                    pass
                except Exception as error:  # without a manifest, a path is no checkpoint
                    if not isinstance(error, ValueError) or (root / MANIFEST).is_file():
                        wrong[name] = repr(error)
    return wrong


def _same(a, b):
    return all(
        torch.equal(getattr(x, "_local_tensor", x), getattr(y, "_local_tensor", y))
        if isinstance(x, torch.Tensor)
        else x == y
        for x, y in ((a[n], b[n]) for n in b)
    )


def _names(original):
    return list(_cases(original / "step-00000002"))


ALL = {"alone": 1, "older": 3}  # of the damages where an older checkpoint is there, every third


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_corpus_has_900_cases(original):
    count = len(_names(original))
    assert sum(2 * -(-count // every) for every in ALL.values()) >= 900


@pytest.mark.slow
@pytest.mark.parametrize("way", ["alone", "older"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("lane", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_all_damage_is_found_before_it_is_used(original, tmp_path, world, way, lane):
    names = _names(original)[:: 17 if lane == "some" else ALL[way]]
    root, older = str(tmp_path / "store"), way == "older"
    found = run_on_ranks(world, _load, str(original), root, names, older, timeout=300)
    assert found == [{}] * world


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(17, marks=pytest.mark.lane("ci")), 2])
def test_all_damage_is_found_without_a_state_too(original, tmp_path, every):
    names, root = _names(original)[::every], str(tmp_path / "store")
    assert run_on_ranks(1, _read_and_verify, str(original), root, names, timeout=300) == [{}]
