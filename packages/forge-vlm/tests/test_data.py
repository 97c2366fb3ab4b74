"""Conversations with pictures: formats, labels, packing, damage."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from forge_testing.interleave import interleave
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from data_files import (  # noqa: E402
    COLOURS,
    EOS,
    IMAGE,
    NAMES,
    OPTIONS,
    chat,
    coco,
    dataset,
    folder_of_csv,
    folder_of_lines,
    llava,
    parquet,
    webdataset,
)

from forge_vlm import VLM, FusionConfig, ModalityConfig, VisionConfig, VLMConfig  # noqa: E402
from forge_vlm.data import InvalidSample, VisionChatSource, open_source  # noqa: E402
from forge_vlm.fusion import PARTING  # noqa: E402
from forge_vlm.vision import ViTConfig  # noqa: E402

CAPTIONS = {
    "llava": llava,
    "coco": coco,
    "folder": folder_of_csv,
    "folder lines": folder_of_lines,
    "parquet": parquet,
    "dataset": dataset,
    "webdataset": webdataset,
}


def pixels_of(arrays, row):
    images = arrays["images"]
    return images.values[images.row_offsets[row] : images.row_offsets[row + 1]]


@pytest.mark.parametrize("name", CAPTIONS)
def test_every_format_gives_each_answer_with_its_image(name, tmp_path):
    path = CAPTIONS[name](tmp_path / "d")
    talks = VisionChatSource(path, format=name.split()[0], template="plain", pack=False, **OPTIONS)
    stream = talks.stream(seq_len=16, seed=3)
    assert len(stream) == 4
    arrays = stream.arrays(np.arange(8))  # two epochs
    seen = []
    for row in range(8):
        tokens, labels = arrays["tokens"][row], arrays["labels"][row]
        answer = bytes(int(i) for i in labels if 0 <= i < 256).decode()
        assert labels[labels >= 0][-1] == EOS
        assert (tokens == IMAGE).sum() == 4
        assert labels[3] == ord(answer[0])  # the picture's last token predicts the first letter
        (pixels,) = pixels_of(arrays, row)
        assert tuple(int(c) for c in pixels[:, 0, 0]) == COLOURS[answer]
        seen.append(answer)
    assert sorted(seen[:4]) == sorted(seen[4:]) == sorted(NAMES)
    assert seen[:4] != seen[4:] or len(set(seen)) == 1
    one = stream.arrays(np.array([5]))
    assert np.array_equal(one["tokens"][0], arrays["tokens"][5])


def test_F219_rows_are_those_of_their_epoch_while_another_thread_reads_another_epoch(tmp_path):
    talks = VisionChatSource(
        llava(tmp_path), format="llava", template="plain", pack=False, **OPTIONS
    )
    stream = talks.stream(16, 3)
    epochs = [[int(stream.samples_of(i)[0]) for i in range(at, at + 4)] for at in (0, 4)]
    stream = talks.stream(16, 3)
    interleave(stream, lambda: stream.samples_of(4))
    assert [int(stream.samples_of(i)[0]) for i in range(4)] == epochs[0] != epochs[1]


def test_F74_only_answers_and_their_ends_are_trained(tmp_path):
    """Position t has the token behind it as its target."""
    talks = VisionChatSource(chat(tmp_path), **OPTIONS)
    sample = talks.sample(0)
    text = "<|im_start|>user\n{}what?#\n<|im_start|>assistant\nred#\n"
    text += "<|im_start|>user\nsure?#\n<|im_start|>assistant\nyes#\n"
    before, after = text.split("{}")
    wanted = [*before.encode(), *[IMAGE] * 4, *after.encode()]
    assert sample.tokens.tolist() == [EOS if i == ord("#") else i for i in wanted]
    learnt = [t for t, label in enumerate(sample.labels) if label != -100]
    assert all(sample.labels[t] == sample.tokens[t + 1] for t in learnt)
    assert [int(sample.labels[t]) for t in learnt] == [*b"red", EOS, *b"yes", EOS]


@pytest.mark.parametrize("weigh", ["token", "sample", "sqrt", "message"])
def test_weights_of_labels(weigh, tmp_path):
    sample = VisionChatSource(chat(tmp_path), weigh=weigh, **OPTIONS).sample(0)
    weights = sample.weights[sample.labels != -100]
    sizes = [len("red#"), len("yes#")]
    total = sum(sizes)
    wanted = {
        "token": [1.0] * total,
        "sample": [1 / total] * total,
        "sqrt": [total**-0.5] * total,
        "message": [1 / n for n in sizes for _ in range(n)],
    }[weigh]
    assert np.allclose(weights, wanted)


def test_marks_in_the_text_of_users_are_text(tmp_path):
    """Nobody can put a picture's token into a row by writing it."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "a": 1, "b": 2, "<image>": 3, "</s>": 4, "<": 5, "image": 6, ">": 7}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Whitespace()]
    )
    made.add_special_tokens(["<image>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    messages = [{"role": "user", "content": "a <image> b"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": messages}))
    talks = VisionChatSource(
        tmp_path / "t.jsonl",
        tokenizer=str(tmp_path / "tokenizer.json"),
        template="vicuna",
        **OPTIONS,
    )
    assert 3 not in talks.sample(0).tokens
    assert talks.sample(0).tokens[-1] == 4
    assert talks.sample(0).pictures == ()


def rows(talks, seq_len, seed=0, count=None):
    stream = talks.stream(seq_len, seed)
    return stream.arrays(np.arange(count or len(stream)))


def test_packed_sequences_hold_every_sample_once_and_complete(tmp_path):
    talks = VisionChatSource(chat(tmp_path), **OPTIONS)
    arrays = rows(talks, 400)
    found = []
    for row in range(len(arrays["tokens"])):
        documents = arrays["document_ids"][row]
        for document in range(documents.max() + 1):
            here = documents == document
            assert arrays["positions"][row][here].tolist() == list(range(here.sum()))
            found.append(arrays["tokens"][row][here].tolist())
    wanted = [talks.sample(i).tokens.tolist() for i in range(3)]
    assert sorted(found) == sorted(wanted)
    stream = talks.stream(400)
    assert stream.utilization == talks.lengths.sum() / (len(stream) * 400)


def model(fusion):
    vit = ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    return VLM(
        VLMConfig(
            **{"vocab_size": 258, "dim": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 512},
            vision=VisionConfig(vit=vit),
            modalities={"image": ModalityConfig(IMAGE)},
            fusion=FusionConfig(fusion),
        )
    )


@pytest.mark.parametrize("fusion", ["joint_decoder", "cross_attention", *PARTING])
def test_packed_rows_equal_samples_apart(fusion, tmp_path):
    """Logits of every token, the weighted loss and gradients of a model; no document sees another."""
    path, outs = chat(tmp_path), []
    net = model(fusion)
    for name, gate in net.named_parameters():
        if name.endswith("_gate"):  # open, or no picture matters
            torch.nn.init.constant_(gate, 0.7)
    places = {"tokens_per_tile": 1} if fusion == "cross_attention" else {}
    for pack in (True, False):
        talks = VisionChatSource(path, pack=pack, weigh="sqrt", **{**OPTIONS, **places})
        arrays = rows(talks, 400)
        names = ("tokens", "labels", "document_ids", "positions", "weights")
        tokens, labels, documents, positions, weights = (torch.from_numpy(arrays[n]) for n in names)
        net.zero_grad()
        logits = net(tokens, positions, documents, images=arrays["images"])
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none"
        )
        loss = (losses * weights.flatten()).sum()
        loss.backward()
        by_sample = {}
        for row, documents_of in enumerate(documents):
            for document in range(int(documents_of.max()) + 1):
                here = documents_of == document
                by_sample[tuple(tokens[row][here].tolist())] = logits[row][here].detach()
        gradients = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        outs.append((float(loss.detach()), by_sample, gradients, len(tokens)))
    packed, apart = outs
    assert packed[3] < apart[3] == 3
    assert packed[0] == pytest.approx(apart[0], rel=1e-5)
    for part in (1, 2):
        assert packed[part].keys() == apart[part].keys()
        for name, value in packed[part].items():
            other = apart[part][name]
            assert (value - other).abs().max() <= 1e-5 * other.abs().max() + 1e-9, name


@pytest.mark.parametrize("damage", ["bytes", "truncated", "missing"])
def test_F76_damaged_images(damage, tmp_path, capfd):
    """Raise ends the run with the name; mask learns nothing from the sample; skip leaves out what it can see."""
    path = llava(tmp_path)
    bad = tmp_path / "p/green.png"
    if damage == "missing":
        bad.unlink()
    else:
        bad.write_bytes(b"no picture" if damage == "bytes" else bad.read_bytes()[:45])
    common = dict(format="llava", template="plain", pack=False, **OPTIONS)
    code = "unreadable" if damage == "missing" else "damaged"
    with rejects("", ..., code, InvalidSample, where="green.png"):
        rows(VisionChatSource(path, **common), 16)
    talks = VisionChatSource(path, corrupt="mask", **common)
    stream = talks.stream(16)
    arrays = stream.arrays(np.arange(4))
    learnt = (arrays["labels"] != -100).any(1)
    assert learnt.sum() == 3
    assert talks.masked == 1
    assert "green.png" in capfd.readouterr().err
    kept = VisionChatSource(path, corrupt="skip", **common)
    assert len(kept.stream(16)) == (4 if damage == "truncated" else 3)
    assert bool(kept.stream(16).warnings) == (damage != "truncated")
    rows(kept, 16)


def talk(*parts, role="user", **more):
    return json.dumps({"messages": [{"role": role, "content": [*parts]}], **more})


@pytest.mark.parametrize(
    ("line", "key", "value", "code"),
    [
        ("{", "", ..., "not_json"),
        ("[1]", "messages", None, "type"),
        (talk(branches=1), "branches", 1, "type"),
        (talk({"type": "video"}), "content", {"type": "video"}, "no_value"),
        (talk({"type": "image"}), "content", {"type": "image"}, "no_value"),
        ('{"messages": []}', "messages", [], "type"),
        (talk(role="bot"), "role", "bot", "unknown"),
        ('{"messages": [{"role": "user", "content": 1}]}', "content", 1, "type"),
        (talk({"type": "text", "text": "a"}), "messages", ..., "no_answer"),
        (talk({"type": "image", "base64": ""}, role="assistant"), "messages", ..., "picture"),
        (talk({"type": "audio"}, role="assistant"), "type", "audio", "unknown"),
        (talk({"type": "image", "image": "../x"}), "path", "../x", "outside"),
        (talk({"type": "image", "image": "data:,%"}), "path", ..., "base64"),
    ],
)
def test_wrong_records_are_named(line, key, value, code, tmp_path):
    (tmp_path / "a.jsonl").write_text(line)
    with rejects(key, value, code, InvalidSample, where="a.jsonl, record 0"):
        VisionChatSource(tmp_path / "a.jsonl", **OPTIONS)


@pytest.mark.parametrize(
    ("value", "key", "found", "code"),
    [
        ({}, "", ..., "not_list"),
        ([{"conversations": 1}], "conversations", 1, "type"),
        ([{"conversations": [{"from": "bot"}]}], "conversations", {"from": "bot"}, "turn"),
        (
            [{"conversations": [{"from": "human", "value": "<image>"}]}],
            "conversations",
            1,
            "number",
        ),
    ],
)
def test_wrong_records_of_llava_are_named(value, key, found, code, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(value))
    with rejects(key, found, code, InvalidSample, where="a.json"):
        VisionChatSource(tmp_path / "a.json", format="llava", **OPTIONS)


@pytest.mark.parametrize(
    ("format", "name", "content", "key", "code"),
    [
        ("coco", "a.json", b"[]", "", "not_coco"),
        ("folder", "a", None, "", "no_metadata"),
        ("folder", "a/metadata.csv", b"file_name,text\na.png,one, two\n", "", "columns"),
        ("folder", "a/metadata.csv", b"file_name,text,text\na.png,,one\n", "", "duplicate"),
        ("folder", "a/metadata.csv", b"file_name\na.png", "caption", "type"),
        ("parquet", "a", None, "", "no_parquet"),
        ("dataset", "a", None, "", "not_saved"),
        ("webdataset", "a", None, "", "no_tar"),
        ("chat", "b", None, "path", "not_found"),
        ("chat", "a.jsonl", b"", "", "empty"),
    ],
)
def test_files_of_another_format_are_named(format, name, content, key, code, tmp_path):
    file = tmp_path / name
    path = file if content is None or file.parent == tmp_path else file.parent
    (tmp_path / "a").mkdir()
    if content is not None:
        file.write_bytes(content)
    with rejects(key, code=code, kind=InvalidSample, where=path):
        VisionChatSource(path, format=format, **OPTIONS)


def test_options_that_cannot_be_are_rejected(tmp_path):
    path = chat(tmp_path)
    none = str(tmp_path / "none.json")
    for options, key, value, code in (
        ({"format": "x"}, "format", "x", "unknown"),
        ({"weigh": "x"}, "weigh", "x", "unknown"),
        ({"tokens_per_tile": None}, "tokens_per_tile", None, "size"),
        ({"resolution": {"fixes": {}}}, "resolution.fixes", {}, "unknown_key"),
        ({"resolution": {"fixed": {"sizes": 8}}}, "resolution.fixed.sizes", 8, "unknown_key"),
        ({"resolution": {"fixed": {"size": 0}}}, "resolution.fixed.size", 0, "size"),
        ({"resolution": {"name": "x"}}, "resolution.name", "x", "unknown"),
        ({"resolution": {"name": "budget"}}, "tokens_per_tile", 4, "foreign"),
        (
            {"resolution": {"name": "budget", "budget": {"multiple": 9}}, "tokens_per_tile": None},
            *("resolution.budget.multiple", 9, "divides"),
        ),
        (
            {"resolution": {"name": "budget"}, "tokens_per_tile": None, "image_masks": True},
            *("image_masks", True, "excludes"),
        ),
        ({"merge": 1}, "merge", 1, "foreign"),
        ({"merge": 0}, "merge", 0, "size"),
        ({"mean": (2, 0, 0)}, "mean", (2, 0, 0), "range"),
        ({"positions": "mrope", "tokens_per_tile": 6}, "tokens_per_tile", 6, "square"),
        ({"tokenizer": none}, "tokenizer", none, "unreadable"),
    ):
        with rejects(key, value, code):
            VisionChatSource(path, **{**OPTIONS, **options})
    with rejects("tokens", code="too_long", kind=InvalidSample) as caught:
        VisionChatSource(path, **OPTIONS).stream(20)
    assert re.findall("[0-9]+", caught.value.problems[0].rule) == ["20", "2"]
    with rejects("seq_len", 20, "too_short", InvalidSample, where=path):
        VisionChatSource(path, too_long="skip", **OPTIONS).stream(20)
    assert len(VisionChatSource(path, too_long="skip", pack=False, **OPTIONS).stream(100)) == 2


@pytest.mark.parametrize(
    ("config", "options", "key", "value", "code"),
    [
        ({"path": ""}, {}, "path", ..., "missing"),
        ({"path": "a", "split": "test"}, {}, "split", "test", "unsupported"),
        ({"path": "a"}, {"streamed": True}, "streamed", True, "unknown_key"),
    ],
)
def test_sources_that_cannot_be_are_rejected(config, options, key, value, code):
    with rejects(key, value, code):
        open_source(SimpleNamespace(**config), **options)


def test_another_content_is_another_fingerprint(tmp_path):
    path = chat(tmp_path)
    first = VisionChatSource(path, **OPTIONS).stream(400).fingerprint()
    assert VisionChatSource(path, **OPTIONS).stream(400).fingerprint() == first
    for options in ({"template": "vicuna"}, {"mean": (0, 0, 0)}, {"weigh": "sqrt"}):
        assert VisionChatSource(path, **{**OPTIONS, **options}).stream(400).fingerprint() != first
    path.write_text(path.read_text().replace("hello", "hallo"))
    assert VisionChatSource(path, **OPTIONS).stream(400).fingerprint() != first
