"""F93: damaged token files are named before a token of theirs is learnt from."""

import hashlib
import json
import pickle

import numpy as np
import pytest

from forge_data import (
    InvalidData,
    Loader,
    PackedStream,
    SourceConfig,
    TokenFiles,
    open_source,
    verify,
)
from forge_data.mixed_stream import MixedStream
from forge_data.mixture import Phase
from forge_data.prepare import prepare
from forge_data.tokens import format as token_format
from forge_testing.problems import ANY, rejects

pytestmark = pytest.mark.lane("test")

BLOCK = token_format.BLOCK_BYTES


@pytest.fixture
def folder(tmp_path):
    """Three blocks of tokens, the last one not full, in 60 documents."""
    (tmp_path / "text.txt").write_text(
        "".join(f"{i:05}".ljust(2500, "x") + "\n" for i in range(60))
    )
    prepare([tmp_path / "text.txt"], tmp_path / "tokens", document="line")
    assert 2 * BLOCK < (tmp_path / "tokens/tokens.bin").stat().st_size < 3 * BLOCK
    return tmp_path / "tokens"


@pytest.fixture
def old_folder(folder):
    """As it was written before there were block digests."""
    sidecar = json.loads((folder / "tokens.json").read_text())
    del sidecar["block_bytes"], sidecar["sha256"]["blocks.bin"]
    (folder / "tokens.json").write_text(json.dumps(sidecar))
    (folder / "blocks.bin").unlink()
    return folder


def flip(path, at):
    """Flip the lowest bit of a byte: of a letter, so that the id stays one of the vocabulary."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("damage", "number", "offset"),
    [
        (lambda d: d * 0, 1, 0),
        (lambda d: -d, 1, -2501),
        (lambda d: d[::-1], 0, ANY),
        (lambda d: d + 1, 0, 1),
        (lambda d: d * 2, ANY, ANY),
        (lambda d: np.where(d == d[7], d[9], d), 8, ANY),
        (lambda d: np.where(d == d[3], -(2**63), d), 3, -(2**63)),
    ],
    ids=[
        "zeros",
        "negative",
        "falling",
        "not from 0",
        "beyond",
        "one falls",
        "differences overflow",
    ],
)
@pytest.mark.parametrize("mode", ["touch", "off"])
def test_F93_offsets_that_do_not_rise_are_rejected_when_opened(
    folder, damage, number, offset, mode
):
    path = folder / "documents.bin"
    offsets = damage(np.fromfile(path, "<i8")).astype("<i8")
    offsets.tofile(path)
    number = len(offsets) - 1 if number is ANY else number
    value = (number, int(offsets[number]))
    with rejects("", value, "order", InvalidData, where="documents.bin"):
        TokenFiles(folder, verify=mode)
    assert offset in (ANY, offsets[number])


def test_F93_other_rising_offsets_are_rejected(folder):
    flip(folder / "documents.bin", 8)
    with rejects("sha256", ..., "mismatch", InvalidData, where="documents.bin"):
        TokenFiles(folder)


def test_F93_a_flipped_bit_is_named_when_its_block_is_first_touched(folder):
    flip(folder / "tokens.bin", BLOCK + 1000)
    source = TokenFiles(folder)
    assert len(source.read(0, BLOCK // 2)) == BLOCK // 2  # the block before
    problem, where = ("block", 1, "damaged", InvalidData), f"{BLOCK}..{2 * BLOCK - 1}"
    for _ in range(2):  # it does not pass for sound after it was named once
        with rejects(*problem, where=where):
            source.read(BLOCK // 2, BLOCK // 2 + 1)
    with rejects(*problem, where=where):
        source.read(0, source.num_tokens)
    with rejects(*problem, where=where):
        verify(folder)
    assert len(source.read(BLOCK, source.num_tokens))  # the block after


def test_F93_the_last_block_is_checked_too(folder):
    flip(folder / "tokens.bin", (folder / "tokens.bin").stat().st_size - 4)
    source = TokenFiles(folder)
    with rejects("block", 2, "damaged", InvalidData):
        source.read(source.num_tokens - 1, source.num_tokens)


def test_a_block_is_read_and_hashed_once(folder, monkeypatch):
    hashed = []
    real = hashlib.sha256
    source = TokenFiles(folder)
    monkeypatch.setattr(token_format.hashlib, "sha256", lambda b: hashed.append(len(b)) or real(b))
    for _ in range(3):
        for start in range(0, source.num_tokens - 64, 64):
            source.read(start, start + 64)
    assert hashed[:2] == [BLOCK, BLOCK]
    assert len(hashed) == 3


def test_F93_full_names_the_block_when_opened_and_off_does_not_look(folder):
    flip(folder / "tokens.bin", 2 * BLOCK + 2)
    with rejects("block", 2, "damaged", InvalidData, where="tokens.bin"):
        TokenFiles(folder, verify="full")
    with rejects("block", 2, "damaged", InvalidData, where="tokens.bin"):
        open_source(SourceConfig(name="tokens", path=str(folder), verify="full"))
    ids = TokenFiles(folder, verify="off").read(0, 10)
    assert ids.tolist() == [*b"00000xxxxx"]


def test_F93_folders_without_block_digests_are_fully_verified_when_opened(old_folder):
    assert TokenFiles(old_folder).read(0, 3).tolist() == [48, 48, 48]
    assert verify(old_folder) == 60 * 2501
    flip(old_folder / "tokens.bin", 40)
    for mode in ("touch", "full"):
        with rejects("sha256", ..., "mismatch", InvalidData, where="tokens.bin"):
            TokenFiles(old_folder, verify=mode)
    TokenFiles(old_folder, verify="off")


def test_fully_verified_files_are_not_read_again_in_a_worker(old_folder, monkeypatch):
    sent = pickle.dumps(TokenFiles(old_folder))
    monkeypatch.setattr("forge_data.tokens.files.check_digest", pytest.fail)
    assert pickle.loads(sent).read(0, 1).tolist() == [48]


def test_a_job_that_opens_a_source_often_reads_it_once(old_folder, monkeypatch):
    read = []
    real = token_format.digest_of
    monkeypatch.setattr(
        token_format, "digest_of", lambda path: read.append(path.name) or real(path)
    )
    monkeypatch.setattr(
        token_format, "_SETTLED_NS", -(10**18)
    )  # as if it had been written long ago
    for _ in range(4):
        TokenFiles(old_folder)
    assert sorted(read) == ["documents.bin", "tokens.bin"]


def test_damaged_digests_are_named_themselves(folder):
    flip(folder / "blocks.bin", 33)
    with rejects("sha256", ..., "mismatch", InvalidData, where="blocks.bin"):
        TokenFiles(folder)
    (folder / "blocks.bin").write_bytes(b"")
    with rejects("", 0, "length", InvalidData, where="blocks.bin"):
        TokenFiles(folder)
    (folder / "blocks.bin").unlink()
    with rejects("", ..., "missing", InvalidData, where="blocks.bin"):
        TokenFiles(folder)


@pytest.mark.lane("quick")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_F93_a_loader_raises_it_at_the_batch_also_at_a_resume(folder, num_workers):
    def loader():
        stream = PackedStream(TokenFiles(folder), 512, shuffle=False)
        return Loader(stream, 32, num_workers=num_workers)

    first = loader()
    next(first)
    state = first.state_dict()
    first.close()
    flip(folder / "tokens.bin", 80_002)  # block 0, which the next batch reads from
    resumed = loader()
    resumed.load_state_dict(state)
    with rejects("block", 0, "damaged", InvalidData, where="tokens.bin"):
        next(resumed)
    assert resumed.cursor == 32


def read_sound_rows(loader, stop):
    while loader.cursor < stop:
        assert int(next(loader).tokens.max()) <= 256


HOW = {"here": {}, "thread": {"prefetch": 2}, "workers": {"num_workers": 2}}


@pytest.mark.lane("quick")
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["block", "id", "raw", "negative"])
def test_F93_damage_is_found_through_every_way_to_a_batch(folder, tmp_path, kind, how, mixed):
    """What is read late is damaged after the source was opened; no row of it is handed out."""
    if kind == "negative":
        sidecar = json.loads((folder / "tokens.json").read_text())
        tokens = np.fromfile(folder / "tokens.bin", "<u2").astype("<i4")
        tokens.tofile(folder / "tokens.bin")
        del sidecar["block_bytes"], sidecar["sha256"]["blocks.bin"]
        (folder / "tokens.json").write_text(json.dumps({**sidecar, "dtype": "int32"}))
    path = folder / "tokens.bin"
    if kind == "raw":
        path = path.rename(tmp_path / "raw.bin")
    mode = "touch" if kind in ("block", "raw") else "off"
    source = TokenFiles(
        path if kind == "raw" else folder, "uint16" if kind == "raw" else None, verify=mode
    )
    stream = PackedStream(source, 512, shuffle=False)
    rows = len(stream) - 1
    if mixed:
        stream = MixedStream({"a": stream}, [Phase(0, (1.0,))])
    loader = Loader(stream, 1, **HOW[how])
    for _ in range(3):
        next(loader)
    with path.open("r+b") as file:
        file.seek(2 * 512 * (rows - 4) if kind != "negative" else 4 * 512 * (rows - 4))
        file.write({"block": b"\x41", "negative": b"\xff\xff\xff\xff"}.get(kind, b"\xff\xff"))
    problem = {"block": ("block", 2, "damaged"), "negative": ("id", -1, "range")}
    with rejects(*problem.get(kind, ("id", 65535, "range")), InvalidData):
        read_sound_rows(loader, rows)
    assert loader.cursor <= rows - 4
    loader.close()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"verify": "always"}, ("verify", "always", "unknown")),
        ({"name": "builtin", "path": None, "verify": "off"}, ("verify", "off", "excludes")),
    ],
)
def test_verify_is_one_of_three(arguments, problem):
    with rejects(*problem):
        SourceConfig(**{"name": "tokens", "path": "x", **arguments})


def test_a_raw_file_has_no_digests_to_verify(tmp_path):
    (tmp_path / "raw.bin").write_bytes(bytes(10))
    with rejects("verify", "full", "requires"):
        TokenFiles(tmp_path / "raw.bin", dtype="uint8", verify="full")
    with rejects("verify", "no", "unknown"):
        TokenFiles(tmp_path / "raw.bin", dtype="uint8", verify="no")
