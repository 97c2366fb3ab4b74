"""What a load costs in reads, digests, opened files and memory."""

import os
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.multiprocessing.reductions import StorageWeakRef

from forge_ckpt import (
    CheckpointMismatch,
    CorruptCheckpoint,
    ForgeSavePlanner,
    ForgeWriter,
    Store,
    codec,
    files,
    read_tensors,
)
from forge_ckpt.manifest import BLOCK_BYTES
from forge_ckpt.read import blocks, load, reader
from forge_ckpt.read.memory import Arena, Span

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.lane("test"),
]


def _save(path, state):
    dcp.save(state, storage_writer=ForgeWriter(path, step=1), planner=ForgeSavePlanner())


@pytest.fixture
def counts(monkeypatch):
    """Bytes of each read of a data file and of each digest, numbers of pools and of open files."""
    found = {"reads": [], "digests": [], "pools": 0, "open": 0, "most_open": 0}
    real_read, real_digest = blocks.read_at, codec.digest_function

    def read_at(fd, view, offset):
        found["reads"].append(len(view))
        return real_read(fd, view, offset)

    def digest_function(name):
        digest_of = real_digest(name)

        def counted(data):
            found["digests"].append(len(data))
            return digest_of(data)

        return counted

    real_pool = blocks.ThreadPoolExecutor

    def pool(*args, **kwargs):
        found["pools"] += 1
        return real_pool(*args, **kwargs)

    real_open, real_close = files.Directory.open, os.close

    def opened(self, name):
        found["open"] += 1
        found["most_open"] = max(found["most_open"], found["open"])
        return real_open(self, name)

    class CountingOS:
        @staticmethod
        def close(fd):
            found["open"] -= 1
            real_close(fd)

    monkeypatch.setattr(blocks, "read_at", read_at)
    monkeypatch.setattr(blocks.codec, "digest_function", digest_function)
    monkeypatch.setattr(blocks, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(blocks, "os", CountingOS)
    found["count_opens"] = lambda: monkeypatch.setattr(files.Directory, "open", opened)
    return found


@pytest.mark.slow
def test_5000_small_tensors_in_3_blocks_cost_3_reads_and_3_digests(tmp_path, counts):
    names = [f"layer.{i}.w" for i in range(5000)]
    state = {name: torch.full((500,), float(i)) for i, name in enumerate(names)}
    _save(tmp_path / "step-00000001", {"x": state})
    assert 2 < os.path.getsize(tmp_path / "step-00000001" / "data-0.bin") / BLOCK_BYTES <= 3
    target = {name: torch.zeros(500) for name in names}
    counts["digests"].clear()
    with Store(tmp_path) as store:
        store.load({"x": target})
    assert len(counts["reads"]) == 3
    # and one for the root of the file, of 32 bytes a block, when the manifest is decoded
    assert sorted(counts["digests"]) == [3 * 32, *sorted(counts["reads"])]
    assert counts["pools"] == 1
    assert all(torch.equal(target[name], state[name]) for name in names)


@pytest.mark.slow
def test_small_tensors_read_one_by_one_cost_each_block_once(tmp_path, counts):
    state = {f"w{i:04d}": torch.full((500,), float(i)) for i in range(5000)}
    _save(tmp_path / "step-00000001", {"x": state})
    for name, tensor in read_tensors(tmp_path):
        assert torch.equal(tensor, state[name.removeprefix("x.")])
    assert len(counts["reads"]) == 3


def test_blocks_of_adjacent_tensors_are_read_into_place(tmp_path, monkeypatch):
    """No scratch block, so no second copy, whatever the sizes of the small tensors."""
    sizes = [3, reader._LARGE // 4 - 5, 1, *[50_001] * 30, 17]
    state = {f"w{i}": torch.randn(size) for i, size in enumerate(sizes)}
    _save(tmp_path / "step-00000001", {"x": state})
    monkeypatch.setattr(blocks, "_scratch", lambda: pytest.fail("a block was copied"))
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with Store(tmp_path) as store:
        store.load({"x": target})
    assert all(torch.equal(target[name], state[name]) for name in state)


def test_a_load_opens_one_pool_and_few_of_many_files(tmp_path, counts):
    (tmp_path / "d").mkdir()
    entries = {}
    for number in range(20):
        content = os.urandom(100 + number)
        (tmp_path / "d" / f"data-{number}.bin").write_bytes(content)
        digest = codec.digest_function("sha256")(content)
        entries[f"data-{number}.bin"] = blocks.FileEntry.of(len(content), (digest,))
    table = blocks.Manifest(1, "", entries, {}, {})
    counts["count_opens"]()
    with files.Directory(tmp_path / "d") as directory:
        blocks.verify_files(directory, table, list(entries), threads=3)
        (tmp_path / "d" / "data-7.bin").write_bytes(bytes(107))
        with pytest.raises(CorruptCheckpoint, match=r"data-7\.bin"):
            blocks.verify_files(directory, table, list(entries), threads=3)
    assert (counts["pools"], counts["open"], counts["most_open"]) == (2, 0, 4)


def test_the_arena_holds_each_span_exactly_once(tmp_path):
    generator = random.Random(0)
    content = {f"data-{i}.bin": generator.randbytes(50_000) for i in range(3)}
    for case in range(16):
        spans = []
        for _ in range(generator.randint(0, 20)):
            start = generator.randrange(49_000)
            length = 8 * generator.randint(1, 60)
            spans.append(Span(generator.choice(list(content)), start, length))
        if case % 2:
            spans += spans[:3]  # tied tensors
        memory = Arena(spans)
        needed = set()
        for file, start, length in spans:
            needed |= {(file, byte) for byte in range(start, start + length)}
        taken = sum(len(segment.destination) for segment in memory.segments)
        assert len(needed) <= taken <= len(needed) + 64 * len(spans)
        for segment in memory.segments:
            stop = segment.start + len(segment.destination)
            segment.destination[:] = content[segment.file][segment.start : stop]
        for i, (file, start, length) in enumerate(spans):
            for dtype in (torch.uint8, torch.bfloat16, torch.float64):
                want = bytearray(content[file][start : start + length])
                got = memory.span(i, dtype).view(torch.uint8)
                assert torch.equal(got, torch.frombuffer(want, dtype=torch.uint8))


@pytest.fixture
def arenas(monkeypatch):
    """The arenas that loads make."""
    made = []

    class Recorded(Arena):
        def __init__(self, spans):
            super().__init__(spans)
            made.append((self._bytes.nbytes, StorageWeakRef(self._bytes.untyped_storage())))

    monkeypatch.setattr(reader, "Arena", Recorded)
    return made


def test_large_leaves_made_for_the_load_are_read_without_staging(tmp_path, arenas):
    state = {"big": torch.randn(3_000_000), "small": torch.randn(10)}
    with Store(tmp_path) as store:
        store.save(1, {"x": state})
        target = {"x": None}
        store.load(target)
        assert all(torch.equal(target["x"][name], state[name]) for name in state)
        assert arenas[0][0] == 40
        with open(tmp_path / "step-00000001" / "data-0.bin", "r+b") as file:
            file.seek(BLOCK_BYTES)
            file.write(b"damaged")
        target = {"x": None}
        with pytest.raises(CorruptCheckpoint, match="block 1"):
            store.load(target)
        assert target == {"x": None}


def _sizes(numbers):
    return {f"w{i}": torch.randn(n) for i, n in enumerate(numbers)}


@pytest.fixture
def large(tmp_path):
    """Steps 1 and 2 of a store: small tensors between large ones, over four blocks, one of them within a tensor; the tensors of each."""
    saved = {}
    with Store(tmp_path, keep_last=3) as store:
        for step in (1, 2):
            saved[step] = _sizes([7, 2_100_000, 11, 70_000, BLOCK_BYTES // 4, 13])
            store.save(step, {"x": saved[step]})
    return saved


def _is(target, saved):
    return all(torch.equal(target[name], tensor) for name, tensor in saved.items())


def test_large_tensors_take_no_memory_above_the_state(tmp_path, large, counts, arenas):
    target = {name: torch.zeros_like(tensor) for name, tensor in large[2].items()}
    versions = {name: tensor._version for name, tensor in target.items()}
    counts["digests"].clear()
    with Store(tmp_path) as store:
        store.load({"x": target})
    assert _is(target, large[2])
    assert arenas[0][0] < 256, "the small ones"
    blocks_of_file = -(-os.path.getsize(tmp_path / "step-00000002" / "data-0.bin") // BLOCK_BYTES)
    assert len(counts["reads"]) == blocks_of_file
    assert sorted(counts["digests"])[1:] == sorted(counts["reads"])  # each block once
    assert all(tensor._version > versions[name] for name, tensor in target.items())


def test_a_damaged_block_changes_no_large_tensor(tmp_path, large):
    for step in (1, 2):
        with open(tmp_path / f"step-0000000{step}" / "data-0.bin", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
    target = {name: torch.zeros_like(tensor) for name, tensor in large[2].items()}
    with Store(tmp_path) as store, pytest.raises(CorruptCheckpoint, match="block 3"):
        store.load({"x": target})
    assert not any(tensor.any() for tensor in target.values())


def test_without_cached_reads_large_tensors_are_staged(tmp_path, large, monkeypatch, arenas):
    monkeypatch.setattr(files.Directory, "has_cached_reads", lambda self, name: False)
    target = {name: torch.zeros_like(tensor) for name, tensor in large[2].items()}
    with Store(tmp_path) as store:
        store.load({"x": target})
    assert _is(target, large[2])
    assert arenas[0][0] > sum(tensor.nbytes for tensor in target.values())


def test_what_left_the_page_cache_is_verified_again(tmp_path, large, monkeypatch, counts):
    target = {name: torch.zeros_like(tensor) for name, tensor in large[2].items()}
    monkeypatch.setattr(blocks, "read_cached", lambda fd, view, offset: False)
    with Store(tmp_path) as store:
        store.load({"x": target})
    assert _is(target, large[2])
    path = tmp_path / "step-00000002" / "data-0.bin"
    assert sum(counts["reads"]) == 2 * path.stat().st_size
    assert len(counts["digests"]) >= len(counts["reads"])


@pytest.mark.parametrize("harm", ["flip", "swap", "touch"])
def test_a_file_that_changes_between_its_two_reads_is_verified_again(
    tmp_path, large, monkeypatch, caplog, harm
):
    path, fill = tmp_path / "step-00000002" / "data-0.bin", load.fill

    def changed(staged, planner):
        if path.exists():
            data = bytearray(path.read_bytes())
            if harm == "swap":
                path.unlink()  # the directory gets another file of that name
            data[2 * BLOCK_BYTES] ^= harm != "touch"
            path.write_bytes(data)
        fill(staged, planner)

    monkeypatch.setattr(load, "fill", changed)
    target = {name: torch.zeros_like(tensor) for name, tensor in large[2].items()}
    with Store(tmp_path) as store:
        step = store.load({"x": target})
    assert step == (2 if harm == "touch" else 1)
    assert _is(target, large[step])
    assert ("block 2" in caplog.text) == (harm != "touch")


def test_tensors_whose_bytes_are_not_those_of_the_file_are_staged(tmp_path, arenas):
    """Strided, conjugate, shared and of a subclass."""
    made = torch.randn(400, 500)
    with Store(tmp_path) as store:
        store.save(
            1,
            {
                "x": {
                    n: made + 1j * made if n == "conj" else made + 0
                    for n in ["strided", "conj", "one", "two", "sub"]
                }
            },
        )
        both = torch.zeros(400, 500)
        target = {
            "strided": torch.zeros(500, 400).t(),
            "conj": torch.zeros(400, 500, dtype=torch.complex64).conj(),
            "one": both,
            "two": both,
            "sub": torch.zeros(400, 500).as_subclass(type("Sub", (torch.Tensor,), {})),
        }
        store.load({"x": target})
    assert all(torch.equal(torch.as_tensor(t).real, made) for t in target.values())
    assert torch.equal(target["conj"].imag, made)
    assert arenas[0][0] >= 6 * made.nbytes
    with Store(tmp_path) as store:
        store.save(2, {"x": {"one": made, "two": made + 1}})
        with pytest.raises(CheckpointMismatch, match="shares memory"):
            store.load({"x": {"one": both.zero_(), "two": both}})
    assert not both.any()


def test_staging_memory_is_freed_before_load_state_dict(tmp_path, arenas):
    class Model:
        def __init__(self, value):
            self.weight = torch.full((100,), value)

        def state_dict(self):
            return {"weight": self.weight}

        def load_state_dict(self, content):
            self.staging_was_freed = arenas[-1][1].expired()

    loaded = Model(0.0)
    with Store(tmp_path) as store:
        store.save(1, {"m": Model(3.0)})
        store.load({"m": loaded})
    assert loaded.staging_was_freed
    assert (loaded.weight == 3).all()
