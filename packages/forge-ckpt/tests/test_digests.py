"""Digests by name: which format they make, and what happens where one is not installed."""

import hashlib
import json
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from forge_ckpt import (
    CheckpointMismatch,
    CorruptCheckpoint,
    ForgeLoadPlanner,
    ForgeReader,
    ForgeSavePlanner,
    ForgeWriter,
    Store,
    codec,
    manifest,
)
from forge_testing.problems import rejects

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.lane("test"),
]
STATE = {"x": {"w": torch.arange(3_000_000.0), "n": 1}}  # three blocks


def _zeros():
    return {"x": {"w": torch.zeros(3_000_000), "n": 0}}


def _save(root, digest):
    writer = ForgeWriter(root / "step-00000001", step=1, digest=digest)
    dcp.save(STATE, storage_writer=writer, planner=ForgeSavePlanner())
    return root / "step-00000001"


def _table(path):
    return json.loads((path / "manifest.json").read_bytes())["manifest"]


def test_sha256_is_format_1_with_the_keys_it_always_had(tmp_path):
    path = _save(tmp_path, "sha256")
    table = _table(path)
    keys = ["format", "step", "torch", "block_bytes", "files", "tensors", "objects"]
    assert (list(table), table["format"]) == (keys, 1)
    data = (path / "data-0.bin").read_bytes()
    size = manifest.BLOCK_BYTES
    blocks = [hashlib.sha256(data[i : i + size]) for i in range(0, len(data), size)]
    root = hashlib.sha256(b"".join(block.digest() for block in blocks)).hexdigest()
    (entry,) = table["files"].values()
    assert entry == {"bytes": len(data), "root": root, "blocks": [b.hexdigest() for b in blocks]}


def test_blake3_is_format_2_and_loads_and_finds_damage(tmp_path):
    blake3 = pytest.importorskip("blake3").blake3
    path = _save(tmp_path, "blake3")
    table = _table(path)
    assert (table["format"], table["digest"]) == (2, "blake3")
    data = (path / "data-0.bin").read_bytes()
    (entry,) = table["files"].values()
    assert entry["blocks"][0] == blake3(data[: manifest.BLOCK_BYTES]).hexdigest()
    assert entry["root"] == blake3(bytes.fromhex("".join(entry["blocks"]))).hexdigest()
    state = _zeros()
    with Store(tmp_path) as store:
        assert store.load(state) == 1
        assert torch.equal(state["x"]["w"], STATE["x"]["w"])
        store.verify(1)
        with open(path / "data-0.bin", "r+b") as file:
            file.seek(manifest.BLOCK_BYTES + 7)
            file.write(b"\xff")
        with pytest.raises(CorruptCheckpoint, match="block 1"):
            store.verify(1)
        with pytest.raises(CorruptCheckpoint, match="block 1"):
            store.load(_zeros())


def test_the_manifest_survives_its_own_encoding_with_either(tmp_path):
    pytest.importorskip("blake3")
    for name in codec.DIGESTS:
        data = (_save(tmp_path / name, name) / "manifest.json").read_bytes()
        assert manifest.encode(manifest.decode(data, "m")) == data


def test_without_the_package_a_sound_checkpoint_is_rejected_and_not_moved(tmp_path, monkeypatch):
    pytest.importorskip("blake3")
    _save(tmp_path, "blake3")
    monkeypatch.setitem(sys.modules, "blake3", None)
    with Store(tmp_path) as store:
        with rejects("digest", "blake3", "requires", CheckpointMismatch) as caught:
            store.load(_zeros())
        assert "\n" not in str(caught.value)
        assert store.steps() == [1]
    assert not (tmp_path / "quarantine").exists()


def test_a_digest_that_is_not_here_is_rejected_before_anything_is_written(tmp_path, monkeypatch):
    with rejects("digest", "md5", "unknown"):
        ForgeWriter(tmp_path / "a", digest="md5")
    monkeypatch.setitem(sys.modules, "blake3", None)
    with rejects("digest", "blake3", "requires"):
        ForgeWriter(tmp_path / "a", digest="blake3")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("digest", ["md5", None, ["sha256"], 256])
def test_a_manifest_with_another_digest_is_of_a_newer_version(tmp_path, digest):
    path = _save(tmp_path, "sha256")
    body = json.dumps({**_table(path), "format": 2, "digest": digest}).encode()
    seal = hashlib.sha256(body).hexdigest().encode()
    (path / "manifest.json").write_bytes(
        b'{"sha256": "' + seal + b'", "manifest": ' + body + b"}\n"
    )
    with rejects("digest", digest, "unknown", CheckpointMismatch, where=path):
        ForgeReader(path).open()


def test_torchs_own_load_reads_either(tmp_path):
    pytest.importorskip("blake3")
    for name in codec.DIGESTS:
        path, state = _save(tmp_path / name, name), _zeros()
        dcp.load(state, storage_reader=ForgeReader(path), planner=ForgeLoadPlanner())
        assert torch.equal(state["x"]["w"], STATE["x"]["w"])
