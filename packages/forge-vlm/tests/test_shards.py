"""Files that are read front to back: rows are those of seed and number, each sample once an epoch, from any place on."""

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch

from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from data_files import IMAGE, OPTIONS  # noqa: E402

from forge_vlm.data import InvalidSample, open_source, streaming  # noqa: E402
from forge_vlm.data.sample import SampleEncoder  # noqa: E402
from forge_vlm.data.streaming import Chunks  # noqa: E402

SIZES = dict(virtual_shards=3, shuffle_window=4)
SHARDS = dict(format="webdataset", template="plain", **SIZES)


def picture(red, green=0):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (red, green, 0)).save(file, "PNG")
    return file.getvalue()


def tars(folder, files=5, each=9):
    """Sample n has a picture of red n, and the letter x up to five times."""
    folder.mkdir(parents=True, exist_ok=True)
    for f in range(files):
        with tarfile.open(folder / f"{f}.tar", "w") as tar:
            for i in range(each):
                n = f * each + i
                for name, content in (
                    (f"{n:03}.png", picture(n)),
                    (f"{n:03}.txt", b"x" * (1 + n % 5)),
                ):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return folder


def lines(folder, count=60):
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for i in range(count):
        (folder / f"{i}.png").write_bytes(picture(i))
        ask = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": "what? " * 40}]
        messages = [
            {"role": "user", "content": ask},
            {"role": "assistant", "content": "x" * (1 + i % 5)},
        ]
        found.append(json.dumps({"messages": messages}))
    (folder / "talks.jsonl").write_text("\n".join(found) + "\n")
    return folder / "talks.jsonl"


def source_of(path, **options):
    class Config:
        pass

    Config.path = str(path)
    return open_source(Config, streaming=True, **{**OPTIONS, **options})


def stream_of(path, seq_len=16, seed=0, **options):
    return source_of(path, **{**SHARDS, **options}).stream(seq_len, seed)


def rows_of(stream, ids):
    """Of each row the tokens, and what is red in each of its pictures."""
    found = stream.arrays(np.array(ids))
    images = found["images"]
    starts = images.row_offsets.tolist()
    red = images.values[:, 0, 0, 0].tolist()
    return [
        (found["tokens"][i].tolist(), tuple(red[starts[i] : starts[i + 1]]))
        for i in range(len(ids))
    ]


def epoch_of(stream, shard, samples):
    """Numbers of samples of a shard's first rows, until there are so many."""
    found = []
    row = 0
    while len(found) < samples:
        ((tokens, reds),) = rows_of(stream, [row * stream.num_shards + shard])
        assert tokens.count(IMAGE) == 4 * len(reds)
        found += reds
        row += 1
    return found


def test_every_sample_comes_once_an_epoch_of_its_shard(tmp_path):
    stream = stream_of(tars(tmp_path))
    pieces = [len([*stream._dealt[shard::3]]) for shard in range(3)]
    found = [epoch_of(stream, shard, 9 * n) for shard, n in enumerate(pieces)]
    assert sorted(n for shard in found for n in shard) == list(range(45))
    # packed by themselves, in another order than that of the files
    assert found[0] != sorted(found[0])
    second = epoch_of(stream, 0, 18 * pieces[0])[9 * pieces[0] :]
    assert sorted(second) == sorted(found[0])
    assert second != found[0]


def test_sequences_depend_only_on_seed_and_number(tmp_path):
    path, ids = tars(tmp_path), list(range(40))
    wanted = rows_of(stream_of(path), ids)
    assert [rows_of(stream_of(path), [i])[0] for i in ids[::7]] == wanted[::7]
    stream = stream_of(path)
    assert rows_of(stream, ids[::-1]) == wanted[::-1]
    # of three readers each reads its own shards
    apart = [rows_of(stream_of(path), ids[rank::3]) for rank in range(3)]
    assert [apart[i % 3][i // 3] for i in ids] == wanted
    assert rows_of(stream_of(path, seed=1), ids) != wanted


def test_a_reader_begins_at_the_start_of_a_window(tmp_path, monkeypatch):
    """From the places of rows 0 to 59 others go on with the same rows, and tokenize two windows of each shard at most."""
    path = tars(tmp_path)
    wanted = rows_of(stream_of(path), range(60, 99))
    table = np.zeros((3, 2), np.int64)
    for shard, *place in stream_of(path).arrays(np.arange(60))["shard_places"]:
        table[shard] = np.maximum(table[shard], place)
    after, read = stream_of(path), []
    real = SampleEncoder.sample
    monkeypatch.setattr(
        SampleEncoder, "sample", lambda self, r: read.append(r.name) or real(self, r)
    )
    after.load_places(table)
    assert rows_of(after, range(60, 63)) == wanted[:3]
    assert len(read) <= 3 * 2 * SIZES["shuffle_window"]
    assert rows_of(after, range(60, 99)) == wanted


def test_F197_a_fingerprint_covers_both_ends_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_ENDS", 2)
    path = tmp_path / "a.jsonl"
    found = set()
    for text in ("{}\n{}\n{}\n", "{ \n{}\n{}\n", "{}\n{}\n{ \n", "{}\n{ \n{}\n"):
        path.write_text(text)
        found.add(streaming._digest_of_ends([path]))
    assert len(found) == 3  # the last differs in the middle only, where sizes are compared


def test_text_is_split_into_chunks_of_complete_lines(tmp_path):
    path = lines(tmp_path)
    pieces = Chunks("chat", path, 2)
    assert len(pieces) > 3
    found = [record for i in range(len(pieces)) for record in segments_of(pieces, i)]
    assert found == [f"{i}.png" for i in range(60)]
    stream = stream_of(path, 300, format="chat", virtual_shards=2)
    reds = {red for _, row in rows_of(stream, range(80)) for red in row}
    assert reds == set(range(60))


def segments_of(pieces, number):
    records = pieces.open(number)
    return [Path(records[i].pictures[0].content).name for i in range(len(records))]


def test_memory_is_that_of_windows(tmp_path):
    """However far it reads, a shard holds one window: so many samples, and no bytes of pictures."""
    stream = stream_of(tars(tmp_path))
    rows_of(stream, range(90))
    held = [s for window, _ in stream._shards.values() for row in window.rows for s in row]
    assert len(held) <= 3 * SIZES["shuffle_window"]
    assert not any(isinstance(p.content, bytes) for s in held for p in s.pictures)


@pytest.mark.parametrize("corrupt", ["raise", "mask", "skip"])
def test_damaged_images_of_a_stream(tmp_path, corrupt, capfd):
    path = tars(tmp_path)
    file = path / "1.tar"
    file.write_bytes(file.read_bytes().replace(picture(12), b"x" * len(picture(12))))
    stream = stream_of(path, corrupt=corrupt, image_masks=True)
    if corrupt == "raise":
        with rejects("", ..., "damaged", InvalidSample, where="012.png"):
            rows_of(stream, range(60))
        return
    found = stream.arrays(np.arange(60))
    reds = set(found["images"].values[:, 0, 0, 0].tolist())
    if corrupt == "skip":
        assert reds == {*range(45)} - {12}
        assert stream.left_out > 0
        assert "left out" in capfd.readouterr().err
        return
    assert stream.reader.masked == (found["image_masks"].values.flatten(1).sum(1) == 0).sum()
    assert stream.reader.masked > 0
    learnt = torch.tensor((found["labels"] != -100).any(1))
    assert learnt.any()


def test_a_changed_file_or_option_is_another_fingerprint(tmp_path):
    path = tars(tmp_path)
    said = stream_of(path).fingerprint()
    assert stream_of(path).fingerprint() == said
    for options in (
        {"shuffle_window": 5},
        {"virtual_shards": 2},
        {"template": "vicuna"},
        {"seed": 2},
    ):
        assert stream_of(path, **options).fingerprint() != said
    tars(path, files=4)
    (path / "4.tar").unlink()
    assert stream_of(path).fingerprint() != said


@pytest.mark.parametrize(
    ("options", "key", "code"),
    [
        ({"format": "coco"}, "format", "streaming"),
        ({"virtual_shards": 0}, "virtual_shards", "size"),
        ({"shuffle_window": "4"}, "shuffle_window", "size"),
        ({"cache": "x"}, "cache", "streaming"),
        ({"format": "chat"}, "path", "format"),
        ({"template": "x"}, "template", "unknown"),
    ],
)
def test_sources_that_cannot_be_streamed_are_rejected(tmp_path, options, key, code):
    path = tars(tmp_path)
    with rejects(key, str(path) if key == "path" else options[key], code):
        source_of(path, **{**SHARDS, **options})


def test_paths_without_records_are_not_streamed(tmp_path):
    with rejects("path", str(tmp_path / "a"), "not_found", InvalidSample):
        source_of(tmp_path / "a", **SHARDS)
    (tmp_path / "a.tar").touch()
    with rejects("path", str(tmp_path), "empty", InvalidSample):
        source_of(tmp_path, **SHARDS)


def test_options_of_streaming_need_it(tmp_path):
    class Config:
        path = str(tars(tmp_path))

    with rejects("virtual_shards", 3, "streaming"):
        open_source(Config, virtual_shards=3)
    with pytest.raises(TypeError, match="rows of a streaming source"):  # prose: not about a value
        len(stream_of(Config.path))
    with rejects("tokens", code="too_long", kind=InvalidSample):
        stream_of(Config.path, seq_len=5).arrays(np.arange(3))
    with rejects("shard", code="empty", kind=InvalidSample):
        stream_of(Config.path, seq_len=3, too_long="skip").arrays(np.arange(3))


def test_branches_are_not_streamed(tmp_path):
    said = [{"role": "assistant", "content": "yes"}]
    talk = {"messages": [{"role": "user", "content": "?"}], "branches": [said, said]}
    (tmp_path / "a.jsonl").write_text(json.dumps(talk))
    stream = stream_of(tmp_path / "a.jsonl", format="chat")
    with rejects("branches", ..., "streaming", InvalidSample, where="a.jsonl"):
        stream.arrays(np.arange(1))


def test_no_ids_give_the_same_names_without_rows(tmp_path):
    stream = stream_of(tars(tmp_path))
    empty, one = stream.arrays(np.arange(0)), stream.arrays(np.arange(1))
    assert empty.keys() == one.keys()
    assert len(empty["tokens"]) == len(empty["images"].values) == 0
