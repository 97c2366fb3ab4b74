"""Conversations as rows: each once an epoch, whole, alone in its document; rendered once; damage and changes are found."""

import gzip
import json
import os
import pickle

import numpy as np
import pytest

from forge_data import (
    DataConfig,
    InvalidData,
    Loader,
    SourceConfig,
    TrainingSourceConfig,
    batch_of,
    open_source,
    open_training,
)
from forge_data.chat.config import ChatConfig
from forge_data.chat.source import Conversations
from forge_data.chat.template import ChatTemplate
from forge_data.prepare import prepare
from forge_testing.chats import CHATML, TALKS, save_tokenizer, say, talk, write_talks

pytestmark = pytest.mark.lane("test")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


def many(count):
    """Conversations of many lengths."""
    return [talk(f"what {i}?", "the sky " * (i % 7) + f"yes {i}") for i in range(count)]


def of_row(batch, row):
    """(tokens, labels, positions) of each document of a row."""
    documents = batch.document_ids[row].numpy()
    assert (np.diff(documents[documents >= 0]) >= 0).all()
    assert (batch.tokens[row].numpy()[documents < 0] == 0).all()
    return [
        tuple(
            value[row].numpy()[documents == d].tolist()
            for value in (batch.tokens, batch.labels, batch.positions)
        )
        for d in range(documents.max() + 1)
    ]


def alone(ids, weights):
    """A conversation by itself, the slow way."""
    labels = [int(i) if w > 0 else -100 for i, w in zip(ids[1:], weights[1:])] + [-100]
    return ids.tolist(), labels, list(range(len(ids)))


def test_an_epoch_has_each_conversation_once_and_whole(tmp_path, folder):
    talks = many(40)
    config = ChatConfig(tokenizer=str(folder))
    source = Conversations(write_talks(tmp_path / "talks.jsonl", talks), config)
    stream, template = source.stream(96, seed=3), ChatTemplate(config)
    for epoch in (0, 1):
        batch = batch_of(stream, range(epoch * len(stream), (epoch + 1) * len(stream)))
        found = [part for row in range(len(batch)) for part in of_row(batch, row)]
        wanted = []
        for record in map(json.loads, (tmp_path / "talks.jsonl").read_text().splitlines()):
            out = template.tokenizer.apply_chat_template(record["messages"], return_dict=True)
            text = template.tokenizer.apply_chat_template(
                record["messages"][:1], add_generation_prompt=True, return_dict=True
            )
            ids = np.array(out["input_ids"])
            mask = np.arange(len(ids)) >= len(text["input_ids"])
            mask[-1] = False  # the line's end behind the end of the message
            wanted.append(alone(ids, mask))
        assert sorted(found) == sorted(wanted)
    assert 1 < len(stream) < 40
    assert stream.utilisation > 0.85
    assert batch.weights is None
    assert batch.label_weight == sum(sum(x >= 0 for x in w[1]) for w in wanted)


def test_weights_are_those_of_the_labels(tmp_path, folder):
    talks = [[say("user", "a"), say("assistant", "blue sky", weight=0.25)], talk("b", "c")]
    source = Conversations(
        write_talks(tmp_path / "t.jsonl", talks), ChatConfig(tokenizer=str(folder))
    )
    batch = batch_of(source.stream(64), [0])
    assert set(batch.weights[0][batch.labels[0] >= 0].tolist()) == {0.25, 1.0}
    quarter = int((batch.weights == 0.25).sum())
    one = int((batch.weights == 1.0).sum())
    assert batch.label_weight == 0.25 * quarter + one
    assert quarter > 0 < one


def test_rendered_once_and_again_where_the_cache_is_damaged(tmp_path, folder, cache, monkeypatch):
    path, config = write_talks(tmp_path / "t.jsonl"), ChatConfig(tokenizer=str(folder))
    calls = []
    encode = ChatTemplate.encode
    monkeypatch.setattr(ChatTemplate, "encode", lambda *a: calls.append(1) or encode(*a))
    first = Conversations(path, config)
    wanted = first.stream(96).arrays(np.arange(2))
    again = Conversations(path, config)
    assert len(calls) == len(TALKS)
    assert first.fingerprint() == again.fingerprint()
    copy = pickle.loads(pickle.dumps(first.stream(96)))  # as a worker gets it
    assert all((copy.arrays(np.arange(2))[k] == v).all() for k, v in wanted.items())
    assert len(pickle.dumps(first.stream(96))) < 1 << 16
    (made,) = (p for p in cache.iterdir() if p.is_dir())
    for name, damage in (
        ("weights.bin", b"\0\0\x80\x3f"), ("tokens.bin", b"\x07"), ("chat.json", b"{"), ("tokens.json", b"?"),
    ):  # fmt: skip
        before, count = (made / name).read_bytes(), len(calls)
        (made / name).write_bytes(
            damage + before[len(damage) :] if name.endswith("bin") else damage
        )
        assert (made / name).read_bytes() != before
        found = Conversations(path, config).stream(96).arrays(np.arange(2))
        assert len(calls) == count + len(TALKS), name
        assert all((found[k] == v).all() for k, v in wanted.items())
    assert not [p for p in cache.iterdir() if p.name.startswith(".")]
    if os.getuid():
        cache.chmod(0o500)
        with pytest.raises(InvalidData, match=r"set cache, or \$FORGE_CACHE"):
            Conversations(path, ChatConfig(tokenizer=str(folder), train_on="all"))


def test_too_long_conversations_are_refused_cut_or_left_out_and_counted(tmp_path, folder):
    talks = [
        *many(6),
        talk("what", "the sky is blue " * 30),
        *many(3),
        talk("the sky " * 60, "yes"),
    ]
    path = write_talks(tmp_path / "t.jsonl", talks)
    refused = Conversations(path, ChatConfig(tokenizer=str(folder)))
    message = r"t.jsonl line 7, .*t.jsonl line 11: 2 of 11 conversations must be of at most seq_len 64 tokens, the longest has \d+; raise"
    with pytest.raises(InvalidData, match=message):
        refused.stream(64)
    for policy, done, left in (("truncate", "cut to it", 11), ("skip", "left out", 9)):
        source = Conversations(path, ChatConfig(tokenizer=str(folder), too_long=policy))
        stream = source.stream(64)
        batch = batch_of(stream, range(len(stream)))
        assert sum(len(of_row(batch, row)) for row in range(len(batch))) == left
        assert source.remarks(64) == [
            f"2 of 11 conversations have more than seq_len 64 tokens and are {done}"
        ]
        assert stream.fingerprint()["source.too_long_conversations"] == 2
        assert source.remarks(4096) == []
    with pytest.raises(
        InvalidData, match="all 11 conversations have more than seq_len 4 tokens, and are skipped"
    ):
        source.stream(4)


def test_a_row_without_a_label_is_a_row(tmp_path, folder):
    talks = [[say("user", "hello")], [say("user", "a"), say("assistant", "b", weight=0)]]
    source = Conversations(
        write_talks(tmp_path / "t.jsonl", talks), ChatConfig(tokenizer=str(folder))
    )
    batch = batch_of(source.stream(64), [0])
    assert batch.label_weight == 0.0
    assert len(of_row(batch, 0)) == 2
    assert source.remarks(64) == ["2 of 2 conversations have nothing to learn"]
    talks = [talk("a<|im_end|>", "b"), talk("a", "b")]
    source = Conversations(
        write_talks(tmp_path / "s.jsonl", talks), ChatConfig(tokenizer=str(folder))
    )
    (told,) = source.stream(64).remarks
    assert told.startswith("1 of 2 conversations have special tokens in the text of a message")


def test_a_change_is_refused_at_a_resume_with_what_differs(tmp_path, folder):
    path = write_talks(tmp_path / "t.jsonl", many(12))
    other = save_tokenizer(tmp_path / "other", CHATML.replace("\\n", " "))
    assert other.chat_template != CHATML
    (tmp_path / "same.jinja").write_text(CHATML + "{# the same #}")

    def loader(**options):
        config = ChatConfig(**{"tokenizer": str(folder), **options})
        return Loader(Conversations(path, config).stream(96), global_batch=2)

    state = loader().state_dict()
    loader().load_state_dict(state)
    for options, keys in (
        ({"train_on": "last"}, ["train_on"]),
        ({"too_long": "skip"}, ["too_long"]),
        ({"tokenizer": str(tmp_path / "other")}, ["template", "tokens"]),
        ({"template": str(tmp_path / "same.jinja")}, ["template"]),
    ):
        with pytest.raises(InvalidData) as error:
            loader(**options).load_state_dict(state)
        assert all(f"  source.{key}: checkpoint " in str(error.value) for key in keys)
    write_talks(path, many(11))
    with pytest.raises(
        InvalidData,
        match=r"source.conversations: checkpoint 12, now 11\n(.*\n)*  source.content: checkpoint ",
    ):
        loader().load_state_dict(state)


def test_parquet_a_saved_set_and_a_folder_give_the_same_rows(tmp_path, folder):
    datasets, zstandard = map(pytest.importorskip, ("datasets", "zstandard"))
    config = ChatConfig(tokenizer=str(folder))
    talks = [*many(5), [say("system", "be short"), *talk("a", "b")]]
    write_talks(tmp_path / "t.jsonl", talks)
    saved = datasets.Dataset.from_list([{"messages": t} for t in talks])
    saved.to_parquet(str(tmp_path / "t.parquet"))
    saved.save_to_disk(str(tmp_path / "saved"))
    split = tmp_path / "split"
    for name, part in (("train", talks[:4]), ("validation", talks[4:])):
        (split / name).mkdir(parents=True)
        write_talks(split / name / "a.jsonl", part)
    wanted = Conversations(tmp_path / "t.jsonl", config).fingerprint()
    lines = (tmp_path / "t.jsonl").read_bytes()
    halves = [
        lines[: len(lines) // 2],
        lines[len(lines) // 2 :],
    ]  # members and frames may end inside of a line
    (tmp_path / "t.jsonl.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    packed = [zstandard.ZstdCompressor().compress(half) for half in halves]
    (tmp_path / "t.jsonl.zst").write_bytes(b"".join(packed))
    for name in ("t.parquet", "saved", "t.jsonl.gz", "t.jsonl.zst"):
        found = Conversations(tmp_path / name, config).fingerprint()
        assert [found[k] for k in ("tokens", "weights")] == [
            wanted[k] for k in ("tokens", "weights")
        ]
    assert Conversations(split, config).rendered.tokens.num_documents == 4
    assert Conversations(split, config, "validation").rendered.tokens.num_documents == 2
    for path, message in (
        (tmp_path / "none", "nothing is there"),
        (tmp_path / "t.jsonl", "for split validation"),
        (tmp_path / "cache", "must be a .jsonl .* or .parquet file, a folder of them"),
    ):
        with pytest.raises(InvalidData, match=message):
            Conversations(path, config, "validation" if path.suffix else "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"messages": []}\n', "line 1 must have at least one message"),
        (b'\n{"messages"\n', "line 2 must be JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "line 1 must be UTF-8"),
        (b"[" * 100000, "line 1 must be JSON of a few levels"),
        (b"\n\n", "t.jsonl must hold a conversation, and has none"),
    ],
)
def test_broken_files_name_the_line_and_leave_no_cache(tmp_path, folder, cache, content, message):
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(InvalidData, match=message) as error:
        Conversations(tmp_path / "t.jsonl", ChatConfig(tokenizer=str(folder)))
    assert "\n" not in str(error.value)
    assert not [p for p in cache.iterdir() if p.is_dir()]
    (tmp_path / "t.parquet").write_bytes(content)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(content))
    with pytest.raises(InvalidData, match=message.replace("jsonl", "jsonl.gz")):
        Conversations(tmp_path / "t.jsonl.gz", ChatConfig(tokenizer=str(folder)))
    if pytest.importorskip("pyarrow"):
        with pytest.raises(InvalidData, match="must be a parquet file"):
            Conversations(tmp_path / "t.parquet", ChatConfig(tokenizer=str(folder)))


def test_packed_files_that_end_early_or_are_no_such_are_named(tmp_path, folder, cache):
    lines = write_talks(tmp_path / "t.jsonl").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-5])
    (tmp_path / "b.jsonl.zst").write_bytes(gzip.compress(lines))
    for name, message in (("a.jsonl.gz", "ends after"), ("b.jsonl.zst", "must be whole zstd")):
        with pytest.raises(InvalidData, match=f"{name} {message}"):
            Conversations(tmp_path / name, ChatConfig(tokenizer=str(folder)))
    assert not [p for p in cache.iterdir() if p.is_dir()]


def test_chosen_by_name(tmp_path, folder):
    path = str(write_talks(tmp_path / "t.jsonl"))
    chat = ChatConfig(tokenizer=str(folder))
    assert isinstance(open_source(SourceConfig("chat", path, chat=chat)), Conversations)
    for settings, message in (
        ({"name": "builtin", "chat": chat}, r"chat.tokenizer '.*' is a key of name 'chat', and name is 'builtin'"),
        ({"name": "chat", "chat": chat}, "path None must name conversations"),
        ({"name": "chat", "path": path}, "chat.tokenizer must name a tokenizer"),
        ({"name": "chat", "path": path, "chat": chat, "verify": "full"}, "verify 'full' means nothing"),
        ({"name": "chat", "path": path, "chat": chat, "dtype": "uint8"}, "dtype 'uint8' means nothing"),
        ({"name": "chat", "path": path, "chat": chat, "options": {"a": 1}}, "options .* mean nothing"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            TrainingSourceConfig(**settings)
    for options, message in (
        ({"train_on": "user"}, "train_on 'user' must be one of assistant, last, all"),
        ({"too_long": "cut"}, "too_long 'cut' must be one of refuse, truncate, skip"),
        ({"messages_field": ""}, "messages_field '' must name a key"),
        ({"tokenizer": ""}, "tokenizer '' must name a path"),
    ):
        with pytest.raises(ValueError, match=message):
            ChatConfig(**options)


def test_conversations_mix_with_text_which_weighs_one(tmp_path, folder):
    prepared = tmp_path / "tokens"
    (tmp_path / "text.txt").write_text("the sky is blue\n" * 50)
    made = str(folder / "tokenizer.json")
    prepare(tmp_path / "text.txt", prepared, tokenizer=made, document="line")
    text = TrainingSourceConfig("tokens", str(prepared), weight=1.0)
    for weight in (1, 0.5):
        one = [say("user", "a"), say("assistant", "b", weight=weight)]
        talks = [*many(20), one, talk("what", "the sky is blue " * 30)]
        path = str(write_talks(tmp_path / f"{weight}.jsonl", talks))
        chat = ChatConfig(tokenizer=str(folder), too_long="skip")
        sources = {"text": text, "talks": TrainingSourceConfig("chat", path, chat=chat, weight=1.0)}
        stream = open_training(DataConfig(48, sources=sources))
        batch = batch_of(stream, range(2 * len(stream.streams[1])))
        assert (batch.source.bincount().diff() == 0).all()
        (remark,) = stream.remarks
        assert remark.startswith("talks: ")
        assert remark.endswith("conversations have more than seq_len 48 tokens and are left out")
        if weight == 1:
            assert batch.weights is None
            continue
        learnt = batch.labels >= 0
        assert (batch.weights[batch.source == 0] == 1).all()
        assert set(batch.weights[batch.source == 1][learnt[batch.source == 1]].tolist()) == {
            0.5,
            1.0,
        }
        assert batch.label_weight == float(batch.weights[learnt].double().sum())
