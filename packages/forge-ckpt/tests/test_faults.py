"""Damage on disk is found before the state is used, and an older checkpoint takes over."""

import hashlib
import itertools
import json
import os
import random
import shutil
import tracemalloc

import pytest
import torch

from forge_ckpt import CorruptCheckpoint, Store, manifest
from forge_ckpt.write.save import PlannedSave
from forge_testing.problems import ANY, assert_problem, rejects

BLOCK = manifest.BLOCK_BYTES


def _state(seed):
    g = torch.Generator().manual_seed(seed)
    big = torch.randint(0, 256, (2 * BLOCK + 1000,), generator=g, dtype=torch.uint8)
    return {"x": {"w": torch.randn(40, 50, generator=g), "big": big, "n": seed}}


def _zeros():
    return {"x": {"w": torch.zeros(40, 50), "big": torch.zeros(2 * BLOCK + 1000).byte(), "n": -1}}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Steps 100 (seed 1) and 200 (seed 2); copied for each test."""
    path = tmp_path_factory.mktemp("original")
    with Store(path) as store:
        store.save(100, _state(1))
        store.save(200, _state(2))
    return path


@pytest.fixture
def root(original, tmp_path):
    return shutil.copytree(original, tmp_path / "store")


def _flip(path, offset, mask=1):
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ mask]))


def _falls_back(root, caplog, key, value, code):
    """Step 200 is bad, as ``verify`` reports: step 100 is loaded, 200 quarantined, one line says so."""
    with Store(root, read_only=True) as store, rejects(key, value, code, CorruptCheckpoint):
        store.verify(200)
    caplog.clear()
    state = _zeros()
    with Store(root) as store:
        assert store.load(state) == 100
        assert store.steps() == [100]
    want = _state(1)["x"]
    assert torch.equal(state["x"]["w"], want["w"])
    assert torch.equal(state["x"]["big"], want["big"])
    assert state["x"]["n"] == 1
    assert (root / "quarantine" / "step-00000200-0").exists()
    (record,) = [record for record in caplog.records if record.name == "forge_ckpt"]
    assert "step 200 is corrupt" in record.getMessage()
    assert "\n" not in record.getMessage()
    return record.getMessage()


@pytest.mark.parametrize(
    "offset", [0, 1, 7999, 8000, BLOCK - 1, BLOCK, BLOCK + 12345, 2 * BLOCK, 2 * BLOCK + 8999]
)
def test_F51_flipped_bit_in_a_data_file(root, caplog, offset):
    path = root / "step-00000200" / "data-0.bin"
    _flip(path, offset % path.stat().st_size, 1 << (offset % 8))
    assert "data-0.bin" in _falls_back(root, caplog, "block", offset // BLOCK, "digest")


@pytest.mark.lane("test")
def test_F51_any_changed_byte_of_the_manifest_is_found(root):
    data = (root / "step-00000200" / "manifest.json").read_bytes()
    manifest.decode(data, "m")
    for offset in range(len(data)):
        changed = bytearray(data)
        changed[offset] ^= 1 << (offset % 8)
        with pytest.raises(CorruptCheckpoint):
            manifest.decode(bytes(changed), "m")
    for length in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(CorruptCheckpoint):
            manifest.decode(data[:length], "m")
    with pytest.raises(CorruptCheckpoint):
        manifest.decode(data + b" ", "m")


def test_F51_flipped_bit_in_the_manifest_falls_back(root, caplog):
    _flip(root / "step-00000200" / "manifest.json", 400)
    assert "manifest.json: " in _falls_back(root, caplog, "", ..., "digest")


def test_F51_zeroed_page(root, caplog):
    with open(root / "step-00000200" / "data-0.bin", "r+b") as f:
        f.seek(BLOCK + 8192)
        f.write(bytes(4096))
    _falls_back(root, caplog, "block", 1, "digest")


def test_F51_shard_of_another_step(root, caplog):
    shutil.copy(root / "step-00000100" / "data-0.bin", root / "step-00000200" / "data-0.bin")
    _falls_back(root, caplog, "block", 0, "digest")


def test_F51_directory_of_another_step(root, caplog):
    shutil.rmtree(root / "step-00000200")
    shutil.copytree(root / "step-00000100", root / "step-00000200")
    _falls_back(root, caplog, "step", 100, "mismatch")


@pytest.mark.parametrize("keep", [0, 10, BLOCK, -1])
def test_F52_truncated_shard_with_its_manifest(root, caplog, keep):
    path = root / "step-00000200" / "data-0.bin"
    size = path.stat().st_size
    left = keep if keep >= 0 else size + keep
    os.truncate(path, left)
    assert str(size) in _falls_back(root, caplog, "", left, "length")


def test_F52_longer_file(root, caplog):
    with open(root / "step-00000200" / "data-0.bin", "ab") as f:
        f.write(b"x")
    size = os.path.getsize(root / "step-00000200" / "data-0.bin")
    assert str(size - 1) in _falls_back(root, caplog, "", size, "length")


@pytest.mark.parametrize("name", ["data-0.bin", "manifest.json"])
def test_F53_missing_file_of_the_newest_does_not_block(root, caplog, name):
    (root / "step-00000200" / name).unlink()
    assert f"{name}: " in _falls_back(root, caplog, "", ..., "unreadable")


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
@pytest.mark.parametrize("name", ["data-0.bin", "manifest.json"])
def test_links_pipes_and_directories_are_rejected(root, caplog, name, kind):
    path = root / "step-00000200" / name
    aside = path.with_name("aside")
    os.rename(path, aside)
    if kind == "link":
        path.symlink_to(aside)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    code = "unreadable" if kind == "link" else "not_regular"
    assert name in _falls_back(root, caplog, "", ..., code)


@pytest.mark.lane("test")
def test_a_linked_step_directory_is_rejected(root, caplog):
    os.rename(root / "step-00000200", root / "elsewhere")
    (root / "step-00000200").symlink_to(root / "elsewhere")
    _falls_back(root, caplog, "", ..., "unreadable")
    assert (root / "elsewhere" / "manifest.json").exists()


def _forge(root, change):
    """A manifest with ``change`` applied and a digest that fits: what an attacker would write."""
    path = root / "step-00000200" / "manifest.json"
    table = json.loads(path.read_bytes())["manifest"]
    change(table)
    body = json.dumps(table, separators=(",", ":")).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    path.write_bytes(b'{"sha256": "' + digest + b'", "manifest": ' + body + b"}\n")


def _rename_file(table, name):
    table["files"][name] = table["files"].pop("data-0.bin")
    for entry in table["tensors"].values():
        for chunk in entry["chunks"]:
            chunk["file"] = name


def _chunks(table, *offsets, sizes=(40, 25)):
    """Two chunks of x.w, (40, 50), of the right sum: only their places are wrong."""
    entry = table["tensors"]["x.w"]
    (chunk,) = entry["chunks"]
    half = {**chunk, "sizes": list(sizes), "bytes": 4000}
    entry["chunks"] = [{**half, "offsets": list(at)} for at in offsets]


FORGERIES = {
    "parent": lambda t: _rename_file(t, "../outside.bin"),  # a copy: only the name is wrong
    "absolute": lambda t: _rename_file(t, "/etc/passwd"),
    "giant_shape": lambda t: t["tensors"]["x.w"].update(shape=[2**40, 2**20]),
    "giant_chunk": lambda t: t["tensors"]["x.w"]["chunks"][0].update(bytes=2**50),
    "giant_start": lambda t: t["tensors"]["x.w"]["chunks"][0].update(start=2**50),
    "giant_number": lambda t: t["tensors"]["x.w"].update(shape=[2**70]),
    "negative": lambda t: t["tensors"]["x.w"]["chunks"][0].update(start=-64),
    "giant_file": lambda t: t["files"]["data-0.bin"].update(bytes=2**50),
    "block_size": lambda t: t.update(block_bytes=2**40),
    "hole": lambda t: t["tensors"]["x.w"].update(chunks=[]),
    "overlap_and_hole": lambda t: _chunks(t, [0, 0], [0, 0]),
    "overlap_by_one": lambda t: _chunks(t, [0, 0], [1, 0], sizes=[20, 50]),
    "outside": lambda t: _chunks(t, [0, 0], [39, 0], sizes=[20, 50]),
    "many_dims": lambda t: t["tensors"]["x.w"].update(shape=[1] * 10**6),
    "many_digits": lambda t: t["tensors"]["x.w"].update(shape=[10**4000]),
    "dtype": lambda t: t["tensors"]["x.w"].update(dtype="load"),
    "list_position": lambda t: t["objects"].update(
        {f"x.{2**40}": {"path": ["x", ["list", 2**40]]}}
    ),
    "wrong_path": lambda t: t["tensors"]["x.w"].update(path=["y", "w"]),
    "not_a_table": lambda t: t.update(tensors=[1]),
    "no_files": lambda t: t.pop("files"),
    "no_digest": lambda t: t["files"]["data-0.bin"].update(blocks=["x"] * 3),
    "tensor_and_object": lambda t: t["objects"].update({"x.w": {"path": ["x", "w"], "value": 1}}),
    "metric": lambda t: t.update(metrics={"loss": True}),
    "no_step": lambda t: t.update(step="200"),
}
PROBLEMS = {
    "parent": ("files", "../outside.bin", "name"),
    "absolute": ("files", "/etc/passwd", "name"),
    "giant_shape": ("x.w", ..., "volume"),
    "giant_chunk": ("x.w", 2**50, "length"),
    "giant_start": ("x.w", 2**50 + 8000, "range"),
    "giant_number": ("x.w", 2**70, "count"),
    "negative": ("x.w", -64, "count"),
    "giant_file": ("data-0.bin", 3, "blocks"),
    "block_size": ("block_bytes", 2**40, "unsupported"),
    "hole": ("x.w", ..., "volume"),
    "overlap_and_hole": ("x.w", ..., "overlap"),
    "overlap_by_one": ("x.w", ..., "overlap"),
    "outside": ("x.w", (39, 0), "outside"),
    "many_dims": ("x.w", 10**6, "dims"),
    "many_digits": ("x.w", ANY, "count"),
    "dtype": ("dtype", "load", "unknown"),
    "list_position": ("path", ["list", 2**40], "step"),
    "wrong_path": ("x.w", ("y", "w"), "path"),
    "not_a_table": ("", ..., "error"),
    "no_files": ("", ..., "error"),
    "no_digest": ("data-0.bin", ..., "hex"),
    "tensor_and_object": ("x.w", ..., "duplicate"),
    "metric": ("metrics.loss", True, "finite"),
    "no_step": ("step", "200", "count"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_F97_forged_manifests_are_rejected(root, caplog, name):
    shutil.copy(root / "step-00000200" / "data-0.bin", root / "outside.bin")
    _forge(root, FORGERIES[name])
    assert len(_falls_back(root, caplog, *PROBLEMS[name])) < 1000


@pytest.mark.parametrize("content", ["zeros", "deep"])
def test_F107_a_manifest_of_a_gigabyte_is_rejected_by_its_first_bytes(root, caplog, content):
    path = root / "step-00000200" / "manifest.json"
    if content == "zeros":
        os.truncate(path, 0)
        os.truncate(path, manifest.MAX_BYTES)
    else:
        path.write_bytes(b"[" * 10**6)
    tracemalloc.start()
    try:
        _falls_back(root, caplog, "", ..., "digest")
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.lane("test")
def test_F107_deep_json_with_a_digest_that_fits_is_rejected(root, caplog):
    body = b'{"format": ' + b"[" * 10**6 + b"]" * 10**6 + b"}"
    digest = hashlib.sha256(body).hexdigest().encode()
    path = root / "step-00000200" / "manifest.json"
    path.write_bytes(b'{"sha256": "' + digest + b'", "manifest": ' + body + b"}\n")
    _falls_back(root, caplog, "", ..., "not_json")


def test_a_manifest_beyond_any_is_rejected_unread(root, caplog, monkeypatch):
    size = os.path.getsize(root / "step-00000200" / "manifest.json")
    _flip(root / "step-00000200" / "data-0.bin", 5)
    monkeypatch.setattr(manifest, "MAX_BYTES", size - 1)
    with rejects("", size, "size", CorruptCheckpoint), Store(root, read_only=True) as store:
        store.verify(200)


def test_a_manifest_that_is_truncated_while_it_is_read_is_rejected(root, monkeypatch):
    def cut(fd, view, offset):
        return read_at(fd, view, offset) - (len(view) > 100)

    read_at = manifest.read_at
    monkeypatch.setattr(manifest, "read_at", cut)
    with rejects("", ..., "changed", CorruptCheckpoint), Store(root, read_only=True) as store:
        store.verify(200)


@pytest.mark.lane("test")
def test_F97_chunks_that_tile_pass_whatever_their_order(root):
    def boxes(*cuts):
        sides = [list(itertools.pairwise(edges)) for edges in cuts]
        made = [
            (tuple(a for a, _ in box), tuple(b - a for a, b in box))
            for box in itertools.product(*sides)
        ]
        random.Random(0).shuffle(made)
        return made

    tiled = boxes([0, 3, 7, 8], [0, 5, 6], [0, 1])
    assert manifest._are_separable(tiled, 3)
    assert not manifest._are_separable([*tiled, tiled[0]], 3)
    assert manifest._are_separable(boxes(range(1000), [0, 1, 2]), 2)
    assert manifest._are_separable(boxes([], []), 2)
    below = boxes([4, 8], range(5))  # rows below are cut in other places
    assert manifest._are_separable([*boxes([0, 4], [0, 1, 4]), *below], 2)
    assert not manifest._are_separable([*boxes([0, 5], [0, 1, 4]), *below], 2)


@pytest.mark.lane("test")
def test_a_newer_format_is_no_corruption(root):
    _forge(root, lambda table: table.update(format=3))
    with Store(root) as store:
        with rejects("format", 3, "version"):
            store.load(_zeros())
        assert store.steps() == [100, 200]


@pytest.mark.lane("test")
def test_nothing_of_the_state_changes_when_the_last_block_is_bad(root):
    shutil.rmtree(root / "step-00000100")
    path = root / "step-00000200" / "data-0.bin"
    _flip(path, path.stat().st_size - 1)
    state = _zeros()
    with Store(root) as store, pytest.raises(CorruptCheckpoint):
        store.load(state)
    assert not state["x"]["w"].any()
    assert not state["x"]["big"].any()
    assert state["x"]["n"] == -1


def test_a_partial_read_verifies_only_the_blocks_it_touches(root):
    with Store(root) as store:
        store.save(300, {"a": torch.ones(2 * BLOCK).byte(), "b": torch.ones(2 * BLOCK).byte()})
        _flip(root / "step-00000300" / "data-0.bin", 10)
        state = {"b": torch.zeros(2 * BLOCK).byte()}
        assert store.load(state) == 300
        assert state["b"].all()
        with pytest.raises(CorruptCheckpoint, match="block 0"):
            store.verify(300)


@pytest.mark.lane("test")
def test_all_corrupt_raises_and_names_all_also_the_next_time(root, caplog):
    for step in (100, 200):
        _flip(root / f"step-00000{step}" / "data-0.bin", 5)
    with Store(root) as store:
        with rejects("path", str(root), "corrupt", CorruptCheckpoint) as caught:
            store.load(_zeros())
        found = [(p.key, p.value, p.code) for p in caught.value.problems[1:]]
        assert found == [("block", 0, "digest")] * 2
        files = [f"{root}/step-00000{step}/data-0.bin" for step in (200, 100)]
        assert [p.origin for p in caught.value.problems[1:]] == files
        # a run whose checkpoints are all in quarantine must not start from nothing without a word
        with rejects("quarantine", "step-00000100-0", "earlier", CorruptCheckpoint):
            store.load(_zeros())


@pytest.mark.lane("test")
@pytest.mark.parametrize("how", ["read_only", "quarantine=False"])
def test_a_load_that_may_move_nothing_falls_back_and_renames_nothing(root, caplog, how):
    _flip(root / "step-00000200" / "data-0.bin", 5)
    before = {path.name for path in root.iterdir()}
    with Store(root, read_only=how == "read_only") as store:
        assert store.load(_zeros(), quarantine=how == "read_only") == 100
        assert [step for step, _ in store.quarantined] == [200]
        if how != "read_only":
            with rejects("step", 150, "order"):
                store.save(150, _state(1))
    assert {path.name for path in root.iterdir()} - before <= {"lock"}
    assert sorted(path.name for path in root.glob("*00*")) == ["step-00000100", "step-00000200"]
    (record,) = caplog.records
    assert record.args[0] == 200
    _flip(root / "step-00000100" / "data-0.bin", 5)
    for _ in range(2):  # nothing was moved, so each load names both
        with (
            Store(root) as store,
            rejects("path", str(root), "corrupt", CorruptCheckpoint) as caught,
        ):
            store.load(_zeros(), quarantine=False)
        assert len(caught.value.problems) == 3


def test_quarantine_keeps_every_copy(root, caplog):
    for number in range(2):
        _flip(root / "step-00000200" / "data-0.bin", 5)
        with Store(root) as store:
            assert store.load(_zeros()) == 100
            assert (root / "quarantine" / f"step-00000200-{number}").is_dir()
            store.save(200, _state(2))


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_F53_retention_never_removes_the_last_sound_one(root, monkeypatch, caplog, damage):
    with Store(root, keep_last=1) as store:
        write = PlannedSave.write_and_commit

        def write_on_a_bad_disk(save, *args):
            write(save, *args)
            path = save.writer.path / "data-0.bin"
            _flip(path, BLOCK + 5) if damage == "flip" else os.truncate(path, 10)

        monkeypatch.setattr(PlannedSave, "write_and_commit", write_on_a_bad_disk)
        key, value, code = ("block", 1, "digest") if damage == "flip" else ("", 10, "length")
        with rejects(key, value, code, CorruptCheckpoint, where="step-00000300") as caught:
            store.save(300, _state(3))
        if damage == "flip":
            assert_problem(caught.value, "step", 300, "new")
        monkeypatch.undo()
        assert store.load(_zeros()) == 200
        store.save(300, _state(3))
        assert store.steps() == [300]
