"""Keys of records: images and videos beside messages and by name, keys that are not read, and what a source says it is."""

import io
import json
import re
import tarfile

import pytest

from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from data_files import COLOURS, EOS, IMAGE, OPTIONS, llava, picture_files, png  # noqa: E402

from forge_vlm.data import InvalidSample, VisionChatSource, index  # noqa: E402
from forge_vlm.data.formats import open_records  # noqa: E402
from forge_vlm.data.prepare import prepare  # noqa: E402
from forge_vlm.data.prepared import Prepared  # noqa: E402
from forge_vlm.data.source import options_of  # noqa: E402

RED, BLUE = "p/red.png", "p/blue.png"
ASK, SHOWN = {"type": "text", "text": "what?"}, {"type": "image"}


def talk(content, **keys):
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "it"}]
    return {"messages": messages, **keys}


def turns(text, **keys):
    said = [{"from": "human", "value": text}, {"from": "gpt", "value": "it"}]
    return {"conversations": said, **keys}


def named(path, kind="image"):
    return {"type": kind, kind: path}


def opened(folder, record, **options):
    """A source of one record, of the format that its keys are of."""
    if not (folder / "p").exists():
        picture_files(folder)
    (folder / "a.jsonl").write_text(json.dumps(record))
    format = "llava" if "conversations" in record else "chat"
    return VisionChatSource(folder / "a.jsonl", format=format, **{**OPTIONS, **options})


def question(source, number=0):
    """The text of the first question, with the color of each image where its tokens stand."""
    sample = source.sample(number)
    colors = []
    for media in source.decoder.media(sample)[0]:
        pixel = tuple(media["images"][0][:, 0, 0].tolist())
        colors.append(next(name for name, value in COLOURS.items() if value == pixel))
    text, tokens = "", sample.tokens.tolist()
    while tokens:
        if tokens[0] == IMAGE:
            text, tokens = f"{text}[{colors.pop(0)}]", tokens[4:]
        else:
            text += "#" if tokens[0] == EOS else chr(tokens[0])
            tokens = tokens[1:]
    return text.partition("user\n")[2].partition("#")[0]


BESIDE = {
    "a mark": (talk("<image>what?", images=[RED]), "[red]what?"),
    "image": (talk("a <image> b", image=RED), "a [red] b"),
    "two marks": (talk("<image><image>what?", images=[RED, BLUE]), "[red][blue]what?"),
    "no mark": (talk("what?", images=[RED, BLUE]), "[red][blue]what?"),
    "bare parts": (talk([SHOWN, ASK, SHOWN], images=[RED, BLUE]), "[red]what?[blue]"),
    "a mark in a part": (talk([{"type": "text", "text": "a<image>b"}], images=[RED]), "a[red]b"),
    "bare part, mark typed": (talk([SHOWN, {"type": "text", "text": "<image>"}], images=[RED]), "[red]<image>"),
    "named parts": (talk([named(BLUE), ASK, named(RED)], images=[RED, BLUE]), "[blue]what?[red]"),
    "named without folder": (talk([named("blue.png"), SHOWN], images=[RED, BLUE]), "[blue][red]"),
    "parts with an index": (talk([{**SHOWN, "index": 1}, {**ASK, "index": None}, SHOWN], images=[RED, BLUE]), "[blue]what?[red]"),
    "parts of transformers": (talk([{"type": "image", "path": RED}, ASK]), "[red]what?"),
    "no images": (talk("<image>what?", images=[]), "<image>what?"),
    "empty": (talk("what?", image="", images=[None], videos=None), "what?"),
    "LLaVA images": (turns("a <image> b", images=[RED]), "a [red] b"),
    "LLaVA without mark": (turns("what?", images=[RED, BLUE]), "[red][blue]what?"),
    "LLaVA, no video": (turns("<image><video>?", image=RED, video=None), "[red]<video>?"),
    "LLaVA, empty": (turns("what?", image=[""]), "what?"),
}  # fmt: skip


@pytest.mark.parametrize("layout", BESIDE)
def test_F134_images_next_to_messages_are_read(layout, tmp_path):
    """LLaMA-Factory, ms-swift and TRL name them there; the text says where each stands."""
    record, wanted = BESIDE[layout]
    assert question(opened(tmp_path, record)) == wanted


@pytest.mark.parametrize(
    ("record", "key", "value", "code"),
    [
        (talk("<image>what?", images=[RED, BLUE]), "messages", 1, "number"),
        (talk("<image><image>", images=[RED]), "messages", 2, "number"),
        (talk([SHOWN, ASK], images=[RED, BLUE]), "messages", 1, "number"),
        (talk([named("data:;base64,"), ASK], images=[RED]), "messages", 0, "number"),
        (talk([named("p/green.png")], images=[RED]), "image", "p/green.png", "unknown"),
        (talk([{**SHOWN, "index": 1}], images=[RED]), "index", 1, "range"),
        (talk("<image>what?", image=RED, images=[RED]), "images", [RED], "excludes"),
        (talk("what?", images=["none.png"]), "", ..., "unreadable"),
        (talk("<video>what?", videos=["a.mp4"]), "", ..., "unreadable"),
        (turns("<image>what?"), "conversations", 1, "number"),
        (turns("<image>what?", images=[RED, BLUE]), "conversations", 1, "number"),
    ],
)
def test_F134_images_without_a_placeholder_are_rejected(record, key, value, code, tmp_path):
    if "videos" in record:
        pytest.importorskip("av")
    options = {"resolution": {"name": "aspect_tiles"}} if code == "unreadable" else {}
    with rejects(key, value, code, InvalidSample, where="a.jsonl"):
        opened(tmp_path, record, **options)


@pytest.mark.parametrize("format", ["parquet", "dataset"])
def test_F134_tables_give_what_lines_give(format, tmp_path):
    """Marks and weights of messages, too."""
    datasets = pytest.importorskip("datasets")
    record = talk("a <image> b")
    record["messages"][1]["weight"] = 0.5
    picture_files(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps({**record, "images": [RED]}))
    lines = VisionChatSource(tmp_path / "a.jsonl", **OPTIONS)
    rows = datasets.Dataset.from_list([{**record, "images": [{"bytes": png("red"), "path": None}]}])
    path = tmp_path / ("a.parquet" if format == "parquet" else "set")
    rows.to_parquet(path) if format == "parquet" else rows.save_to_disk(path)
    table = VisionChatSource(path, format=format, **OPTIONS)
    assert question(table) == question(lines) == "a [red] b"
    assert np.array_equal(table.sample(0).weights, lines.sample(0).weights)
    assert lines.sample(0).weights.min() == 0.5


LOST = {
    "tools": (talk("what?", tools=[{"name": "f"}]), "tools", [{"name": "f"}], "not_read"),
    "a system": (turns("what?", system="be short"), "system", "be short", "not_read"),
    "audio": (talk("what?", audios=["a.wav"]), "audios", ["a.wav"], "not_read"),
    "a weight": (talk("what?", weight=0), "weight", 0, "not_read"),
    "one letter more": (talk("what?", imagess=[RED]), "imagess", [RED], "misspelt"),
    "two letters swapped": (turns("what?", iamge=RED), "iamge", RED, "misspelt"),
    "images of a message": ({"messages": [{"role": "user", "content": "?", "images": [RED]}]}, "messages.images", [RED], "not_read"),  # prose: the name of a case
    "a turn that is not learnt": ({"conversations": [{"from": "gpt", "value": "a", "loss": False}]}, "conversations.loss", False, "not_read"),  # prose: the name of a case
    "a mask": (turns("what?", mask=[0, 1]), "mask", [0, 1], "not_read"),
    "a mask of a message": ({"messages": [{"role": "assistant", "content": "a", "loss_mask": 0}]}, "messages.loss_mask", 0, "not_read"),  # prose: the name of a case
    "a turn of training": ({"conversations": [{"from": "gpt", "value": "a", "training": False}]}, "conversations.training", False, "not_read"),  # prose: the name of a case
    "calls of tools": ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}, "messages.tool_calls", [1], "not_read"),  # prose: the name of a case
    "an image in a part of text": (talk([{**ASK, "image": RED}]), "content.image", RED, "not_read"),
}  # fmt: skip


@pytest.mark.parametrize("layout", LOST)
def test_F134_content_that_would_be_lost_is_named(layout, tmp_path):
    """The same record opens where the key is listed, whole or by its last name."""
    record, key, value, code = LOST[layout]
    with rejects(key, value, code, InvalidSample, where="a.jsonl, record 0"):
        opened(tmp_path, record)
    if code == "not_read" and len(next(iter(record.values()))) == 2:
        for name in (key, key.rpartition(".")[2]):
            assert opened(tmp_path, record, ignore_keys=[name]).counted.unread == {key: 1}


def test_F134_other_keys_are_counted_and_reported(tmp_path):
    """The line of a source has what a count by hand has."""
    source = VisionChatSource(llava(tmp_path), format="llava", **OPTIONS)
    values = json.loads((tmp_path / "llava.json").read_text())
    values += [{**turns("what?", score=1.5), "extra": {}}, turns("what?", score=2)]
    (tmp_path / "b.json").write_text(json.dumps(values))
    source = VisionChatSource(tmp_path / "b.json", format="llava", **OPTIONS)
    samples = [source.sample(n) for n in range(6)]
    tokens = sum(len(s.tokens) for s in samples)
    trained = sum(int((s.labels >= 0).sum()) for s in samples)
    (line,) = source.stream(128).source_lines
    wanted = ["6", "66.7", "4", str(tokens), str(trained), "id (4)", "score (2)"]
    assert re.findall(r"\w+ \(\d+\)|[\d.]+", line) == wanted
    with rejects("id", "a", "strict", InvalidSample):
        VisionChatSource(tmp_path / "b.json", format="llava", strict=True, **OPTIONS)
    with rejects("ignore_keys", "id", "type", ValueError):
        VisionChatSource(tmp_path / "b.json", format="llava", ignore_keys="id", **OPTIONS)


@pytest.mark.parametrize("kind", ["cache", "prepared"])
def test_F134_the_line_of_a_source_counts_what_its_rows_train(kind, tmp_path, monkeypatch):
    """Against the rows of an epoch; a sample that is too long has no part in it."""
    monkeypatch.setattr(index, "SMALL", 0)
    picture_files(tmp_path)
    values = [talk("what? " * n + "<image>" * (n % 3), images=[RED, BLUE][: n % 3], id=n) for n in range(9)]  # fmt: skip
    path, options = tmp_path / "a.jsonl", {**OPTIONS, "too_long": "skip"}
    path.write_text("\n".join(map(json.dumps, values)))
    if kind == "prepared":
        prepare(path, tmp_path / "prepared", options_of(str(path), options))
    for seq_len in (48, 70, 4096):
        source = Prepared(tmp_path / "prepared") if kind == "prepared" else VisionChatSource(path, cache=str(tmp_path), **options)  # fmt: skip
        stream = source.stream(seq_len)
        rows = stream.arrays(np.arange(len(stream)))
        samples = [s for row in range(len(stream)) for s in stream.samples_of(row)]
        counts = [len(samples), (rows["document_ids"] >= 0).sum(), (rows["labels"] >= 0).sum()]
        images = rows["images"].row_offsets[-1].item()
        (line,) = stream.source_lines
        found = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:sam|ima|tok|tra)", line)]
        assert found == [counts[0], images, *counts[1:]]
        shown = np.mean([source.pictured[n] for n in samples])
        assert f"{shown:.1%} with images" in line
        if seq_len < 4096:
            assert counts[0] < 9
    assert "seq_len" in source.summary()  # of all samples


def tar_of(path, value, ending="json", **pictures):
    """A tar of one sample, `0`, with pictures of colors by ending."""
    members = {f"{name}.png": png(color) for name, color in pictures.items()}
    with tarfile.open(path, "w") as tar:
        for name, content in {**members, ending: json.dumps(value).encode()}.items():
            member = tarfile.TarInfo(f"d/0.{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def from_tar(folder, value, **options):
    path = tar_of(folder / "a.tar", value, a="red", b="blue")
    return VisionChatSource(path, format="webdataset", **OPTIONS, **options)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (talk([named("0.b.png"), ASK, named("0.a.png")]), "[blue]what?[red]"),
        (talk([named("0.B.PNG"), ASK, named("x/0.a.png", "image_url")]), "[blue]what?[red]"),
        (talk([SHOWN, ASK, SHOWN]), "[red]what?[blue]"),
        (talk("<image>what?<image>", images=["0.b.png", "0.a.png"]), "[blue]what?[red]"),
        (turns("<image>what?<image>", image=["0.b.png", "0.a.png"]), "[blue]what?[red]"),
        (
            talk("<image>what?<image>", images=[{"path": "0.b.png"}, {"path": "0.a.png"}]),
            "[blue]what?[red]",
        ),
        (talk("<image>what?<image>", images=[1, 0]), "[blue]what?[red]"),
        (
            talk("<image>what?<image>", images=[{"url": "0.b.png"}, {"index": 0}]),
            "[blue]what?[red]",
        ),
        (turns("<image>what?<image>"), "[red]what?[blue]"),
    ],
)
def test_F135_parts_of_a_tar_get_the_member_that_they_name(value, wanted, tmp_path):
    assert question(from_tar(tmp_path, value)) == wanted


def test_F135_a_document_gets_the_members_that_it_names(tmp_path):
    value = {"texts": ["one", None, "two", None], "images": [None, "0.b.png", None, "0.a.png"]}
    source = from_tar(tmp_path, value)
    media = source.decoder.media(source.sample(0))[0]
    assert [tuple(m["images"][0][:, 0, 0].tolist()) for m in media] == [COLOURS["blue"], COLOURS["red"]]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "key", "found", "code"),
    [
        (talk([named("0.c.png"), named("0.a.png")]), "image", "0.c.png", "unknown"),
        (talk([named("0.a.png"), named("0.a.png")]), "image", "0.a.png", "unknown"),
        (turns("<image><image>", image=["u/1.png", "u/2.png"]), "image", "u/1.png", "unknown"),
        (turns("<image>", image=["0.a.png"]), "images", 1, "number"),
        (
            talk("<image><image>", images=[{"name": "0.b.png"}, {"path": "0.a.png"}]),
            "images",
            None,
            "type",
        ),
        (talk("<image><image>", images=[0, 2]), "images", 2, "type"),
    ],
)
def test_F135_names_that_no_member_has_are_rejected(value, key, found, code, tmp_path):
    with rejects(key, found, code, InvalidSample, where="a.tar"):
        from_tar(tmp_path, value)


def test_F135_members_in_order_where_names_are_of_another_folder(tmp_path):
    value = turns("<image>what?<image>", image=["u/1.png", "u/2.png"])
    assert question(from_tar(tmp_path, value, ignore_keys=["image"])) == "[red]what?[blue]"
    path = tar_of(tmp_path / "one.tar", turns("<image>what?", image="u/1.png"), a="red")
    assert question(VisionChatSource(path, format="webdataset", **OPTIONS)) == "[red]what?"


@pytest.mark.parametrize("format", ["parquet", "dataset"])
def test_F135_chunks_of_tables_get_the_image_that_they_name(format, tmp_path):
    datasets = pytest.importorskip("datasets")
    images = [{"bytes": png(color), "path": f"{color}.png"} for color in ("red", "blue")]
    record = talk([named("blue.png"), named("red.png")])
    record["messages"][1]["content"] = [{"type": "text", "text": "it"}]
    rows = datasets.Dataset.from_list([{**record, "images": images}])
    path = tmp_path / ("a.parquet" if format == "parquet" else "set")
    rows.to_parquet(path) if format == "parquet" else rows.save_to_disk(path)
    assert question(VisionChatSource(path, format=format, **OPTIONS)) == "[blue][red]"


def test_F134_members_and_captions_that_would_be_lost_are_named(tmp_path):
    """A clip beside the pictures of a tar, two captions of a row, a list of boxes of COCO's."""
    path = tar_of(tmp_path / "a.tar", {"caption": "a"}, a="red")
    with tarfile.open(path, "a") as tar:
        tar.addfile(tarfile.TarInfo("d/0.mp4"), io.BytesIO())
    with rejects("mp4", "mp4", "not_read", InvalidSample, where="d/0"):
        VisionChatSource(path, format="webdataset", **OPTIONS)
    picture_files(tmp_path)
    (tmp_path / "metadata.csv").write_text(f"file_name,text,caption,id\n{RED},a,,7\n{BLUE},b,c,8\n")
    with rejects("caption", "c", "not_read", InvalidSample, where="record 1"):
        VisionChatSource(tmp_path, format="folder", **OPTIONS)
    source = VisionChatSource(tmp_path, format="folder", ignore_keys=["caption"], **OPTIONS)
    assert source.counted.unread == {"id": 2, "caption": 1}
    note = {"id": 3, "image_id": 0, "caption": "a", "captoin": "b"}
    value = {"images": [{"id": 0, "file_name": RED}], "annotations": [note]}
    (tmp_path / "coco.json").write_text(json.dumps(value))
    with rejects("captoin", "b", "misspelt", InvalidSample, where="annotation 0"):
        VisionChatSource(tmp_path / "coco.json", format="coco", **OPTIONS)


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_F134_a_mark_in_a_system_message_is_text(key, tmp_path):
    """Only questions have places of images; one without a mark has its images in front."""
    picture_files(tmp_path / "p")
    names = ("role", "content") if key == "messages" else ("from", "value")
    spoken = [("system", "Shown as <image>."), ("user", "what?"), ("assistant", "a cat")]
    if key == "conversations":
        spoken = [("system", spoken[0][1]), ("human", "what?"), ("gpt", "a cat")]
    value = {key: [dict(zip(names, each)) for each in spoken], "image": RED}
    (tmp_path / "a.jsonl").write_text(json.dumps(value) + "\n")
    format = "chat" if key == "messages" else "llava"
    (record,) = open_records(format, tmp_path / "a.jsonl")
    assert [m.parts for m in record.messages] == [("Shown as <image>.",), (0, "what?"), ("a cat",)]
