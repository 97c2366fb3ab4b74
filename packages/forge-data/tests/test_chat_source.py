"""Conversations as rows: each once an epoch, whole, alone in its document; rendered once; damage and changes are found."""

import gzip
import json
import os
import pickle
import re
import sys
from dataclasses import replace
from itertools import pairwise

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
from forge_data.chat.messages import Record, conversation_of, read_records
from forge_data.chat.source import Conversations, open_header
from forge_data.chat.template import ChatTemplate
from forge_data.kinds import ChatConfig
from forge_data.packing_config import PackingConfig
from forge_data.prepare import prepare
from forge_testing.chats import CHATML, DIALOGS, chat_message, dialog, save_tokenizer, write_dialogs
from forge_testing.interleave import interleave
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/tokens"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


def many(count):
    """Conversations of many lengths."""
    return [dialog(f"what {i}?", "the sky " * (i % 7) + f"yes {i}") for i in range(count)]


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


def test_an_epoch_has_each_conversation_once_and_complete(tmp_path, folder):
    talks = many(40)
    config = ChatConfig(tokenizer=str(folder))
    source = Conversations(write_dialogs(tmp_path / "talks.jsonl", talks), config)
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
    assert stream.utilization > 0.85
    assert batch.weights is None
    assert batch.label_weight == sum(sum(x >= 0 for x in w[1]) for w in wanted)


def test_F219_rows_are_those_of_their_epoch_while_another_thread_reads_another_epoch(
    tmp_path, folder
):
    path = write_dialogs(tmp_path / "talks.jsonl", many(40))
    source = Conversations(path, ChatConfig(tokenizer=str(folder)))
    count = len(source.stream(96))
    ids = [np.arange(3), np.arange(count, count + 3)]
    wanted = [source.stream(96).rows(each).tolist() for each in ids]
    stream = source.stream(96)
    interleave(stream, lambda: stream.rows(ids[1]))
    assert stream.rows(ids[0]).tolist() == wanted[0] != wanted[1]


def test_weights_are_those_of_the_labels(tmp_path, folder):
    talks = [
        [chat_message("user", "a"), chat_message("assistant", "blue sky", weight=0.25)],
        dialog("b", "c"),
    ]
    source = Conversations(
        write_dialogs(tmp_path / "t.jsonl", talks), ChatConfig(tokenizer=str(folder))
    )
    batch = batch_of(source.stream(64), [0])
    assert set(batch.weights[0][batch.labels[0] >= 0].tolist()) == {0.25, 1.0}
    quarter = int((batch.weights == 0.25).sum())
    one = int((batch.weights == 1.0).sum())
    assert batch.label_weight == 0.25 * quarter + one
    assert quarter > 0 < one


def test_rendered_once_and_again_where_the_cache_is_damaged(tmp_path, folder, cache, monkeypatch):
    path, config = write_dialogs(tmp_path / "t.jsonl"), ChatConfig(tokenizer=str(folder))
    calls = []
    encode = ChatTemplate.encode_answers

    def counted(template, talk):  # not the short ones that show how a template ends answers
        calls.extend([1] * talk.place.startswith(str(path)))
        return encode(template, talk)

    monkeypatch.setattr(ChatTemplate, "encode_answers", counted)
    first = Conversations(path, config)
    wanted = first.stream(96).arrays(np.arange(2))
    again = Conversations(path, config)
    assert len(calls) == len(DIALOGS)
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
        assert len(calls) == count + len(DIALOGS), name
        assert all((found[k] == v).all() for k, v in wanted.items())
    assert not [p for p in cache.iterdir() if p.name.startswith(".")]
    if os.getuid():
        cache.chmod(0o500)
        with rejects("cache", str(cache), "unwritable"):
            Conversations(path, ChatConfig(tokenizer=str(folder), train_on="all"))


def numbers(warnings):
    return [[int(number) for number in re.findall(r"\d+", warning)] for warning in warnings]


def test_too_long_conversations_are_rejected_truncated_or_left_out_and_counted(tmp_path, folder):
    talks = [
        *many(6),
        dialog("what", "the sky is blue " * 30),
        *many(3),
        dialog("the sky " * 60, "yes"),
    ]
    path = write_dialogs(tmp_path / "t.jsonl", talks)
    refused = Conversations(path, ChatConfig(tokenizer=str(folder)))
    places = ", ".join(f"{path} line {line}" for line in (7, 11))
    with rejects("seq_len", 64, "too_long", InvalidData, where=f" {places};"):
        refused.stream(64)
    for policy, left, more in (("truncate", 10, [[1, 11, 64]]), ("skip", 9, [])):
        source = Conversations(path, ChatConfig(tokenizer=str(folder), too_long=policy))
        stream = source.stream(64)
        batch = batch_of(stream, range(len(stream)))
        assert sum(len(of_row(batch, row)) for row in range(len(batch))) == left
        assert numbers(source.warnings(64)) == [[2, 11, 64], *more]
        assert stream.fingerprint()["source.too_long_conversations"] == 2
        assert source.warnings(4096) == []
    with rejects("seq_len", 4, "all_skipped", InvalidData):
        source.stream(4)


@pytest.mark.parametrize("policy", ["truncate", "skip"])
def test_F134_the_line_of_a_source_counts_what_its_rows_train(tmp_path, folder, policy):
    """Against the rows of an epoch."""
    talks = [
        dialog("the sky " * (3 * n), "yes " * (9 * n + 1), "and?", "the sky") for n in range(6)
    ]
    talks.append([chat_message("user", "a"), chat_message("assistant", "b", weight=0)])
    config = ChatConfig(tokenizer=str(folder), too_long=policy)
    path = write_dialogs(tmp_path / "t.jsonl", talks)
    for seq_len in (40, 64, 128, 4096):
        stream = Conversations(path, config).stream(seq_len)
        batch = batch_of(stream, range(len(stream)))
        parts = sum(len(of_row(batch, row)) for row in range(len(batch)))
        tokens, trained = int((batch.document_ids >= 0).sum()), int((batch.labels >= 0).sum())
        (line,) = stream.source_lines
        assert re.findall(r"[\d,]+\b", line) == [f"{n:,}" for n in (parts, tokens, trained)]
    header = open_header(SourceConfig("chat", str(path), chat=config)).summary()
    assert "seq_len" in header  # that of a whole file says that rows may have less
    assert line in header


def test_F154_conversations_that_are_truncated_to_no_label_are_left_out(tmp_path, folder):
    """Against the labels of each, by brute force, at each length."""
    talks = [dialog("the sky " * (3 * n), "yes " * 4) for n in range(6)]
    talks.append([chat_message("user", "a"), chat_message("assistant", "b", weight=0)])
    config = ChatConfig(tokenizer=str(folder), too_long="truncate")
    source = Conversations(write_dialogs(tmp_path / "t.jsonl", talks), config)
    template = ChatTemplate(config)
    encoded = [template.encode(conversation_of(Record("", {"messages": t}), config)) for t in talks]
    for seq_len in (24, 32, 64, 128):
        labels = [[w > 0 for w in weights[1:seq_len]] for _, weights in encoded]
        kept = [n for n, (ids, _) in enumerate(encoded) if len(ids) <= seq_len or any(labels[n])]
        stream = source.stream(seq_len)
        batch = batch_of(stream, range(len(stream)))
        rows = [part for row in range(len(batch)) for part in of_row(batch, row)]
        assert sorted(r[0] for r in rows) == sorted(encoded[n][0][:seq_len].tolist() for n in kept)
        said = [line for line in stream.warnings if "no label" in line]
        assert numbers(said) == ([[7 - len(kept), 7, seq_len]] if len(kept) < 7 else [])
    with rejects("seq_len", 4, "all_skipped", InvalidData):
        Conversations(write_dialogs(tmp_path / "u.jsonl", talks[:-1]), config).stream(4)


TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def with_tools(name, properties, arguments):
    parameters = {"type": "object", "properties": properties}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    said = [chat_message("user", "a"), chat_message("assistant", "", tool_calls=[call]), chat_message("tool", "c"), chat_message("assistant", "d")]  # fmt: skip
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    return {"messages": said, "tools": [tool]}


def test_F145_tables_give_the_tools_and_arguments_of_lines(tmp_path, folder):
    """A table gives each object the keys of all; the template of transformers is given what was said."""
    datasets = pytest.importorskip("datasets")
    talks = [
        with_tools("f", {"a": {"type": "string", "enum": ["x", "y"]}}, {"a": "x"}),
        with_tools("g", {"b": {"type": "integer", "minimum": 0}}, {"b": 1, "c": {"d": [2]}}),
        {"messages": dialog("hi", "yes"), "tools": None},
    ]
    (tmp_path / "t.jinja").write_text(TOOLS)
    config = ChatConfig(
        tokenizer=str(folder), template=str(tmp_path / "t.jinja"), tools_field="tools"
    )
    write_dialogs(tmp_path / "t.jsonl", talks)
    saved = datasets.Dataset.from_list(talks)
    saved.to_parquet(str(tmp_path / "t.parquet"))
    saved.save_to_disk(str(tmp_path / "saved"))
    tokenizer = ChatTemplate(config).tokenizer
    wanted = [
        tokenizer.apply_chat_template(t["messages"], tools=t["tools"], chat_template=TOOLS, return_dict=True)["input_ids"]
        for t in talks
    ]  # fmt: skip
    found = {}
    for name in ("t.jsonl", "t.parquet", "saved"):
        rendered = Conversations(tmp_path / name, config).rendered
        starts = [*rendered.tokens.documents, rendered.tokens.num_tokens]
        ids = [rendered.tokens.read(int(a), int(b)).tolist() for a, b in pairwise(starts)]
        assert ids == wanted, name
        found[name] = rendered.counts["sha256"]
    assert len(set(found.values())) == 1  # weights of labels
    said = with_tools("f", {}, {"a": None})
    record = next(read_records([write_dialogs(tmp_path / "n.jsonl", [said])]))
    assert record.content == said  # a null that JSONL has was written by somebody


def test_F134_keys_of_conversations_that_are_not_read(tmp_path, folder):
    """Content that a run of text would drop is refused; others are counted once, and from the cache."""
    config = ChatConfig(tokenizer=str(folder))
    lost = {
        "tools": [{"name": "f"}], "images": ["a.png"], "system": "be short", "weight": 0.5, "mesages": [1],
        "messages.images": ["a.png"], "messages.loss": False, "messages.wieght": 0,
    }  # fmt: skip
    for number, (name, value) in enumerate(lost.items()):
        record = {"messages": dialog("a", "b"), "id": 1}
        place = record["messages"][1] if "." in name else record
        place[name.rpartition(".")[2]] = value
        path = write_dialogs(tmp_path / f"{number}.jsonl", [dialog("a", "b"), record])
        code = "misspelt" if name in ("mesages", "messages.wieght") else "not_read"
        with rejects(name, value, code, InvalidData, where=f"{path} line 2"):
            Conversations(path, config)
        source = Conversations(path, replace(config, ignore_keys=[name]))
        assert source.rendered.counts["not_read"] == {name: 1, "id": 1}
    talks = [{"messages": dialog("a", "b"), "id": 1, "tools": []}, {"messages": dialog("c", "dd"), "score": 0, "id": 2}]  # fmt: skip
    path = write_dialogs(tmp_path / "t.jsonl", talks)
    for _ in range(2):
        stream = Conversations(path, config).stream(64)
        batch = batch_of(stream, [0])
        tokens, trained = int((batch.document_ids >= 0).sum()), int((batch.labels >= 0).sum())
        wanted = (
            f"2 conversations, {tokens} tokens, {trained} trained; keys not read: id (2), score (1)"
        )
        assert stream.source_lines == [wanted]
    with rejects("id", 1, "strict", InvalidData):
        Conversations(path, replace(config, strict=True))


REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


@pytest.mark.parametrize(
    ("key", "value", "read_by"),
    [
        ("tool_calls", CALL, TOOLS),
        ("reasoning_content", "so it is", REASONING),
        ("name", "Bo", "{% for m in messages %}{{ m | tojson }}{% endfor %}"),  # prose: a template
        *((key, False, None) for key in ("loss", "loss_mask", "mask", "train", "train_on_turn", "trainable", "training")),
    ],
)  # fmt: skip
def test_F134_keys_of_messages_that_the_template_does_not_read(
    tmp_path, folder, key, value, read_by
):
    """Content that a template passes over is refused, another key counted; one that it renders is read. Weights never are."""
    said = dialog("a", "b")
    said[1][key] = value
    path = write_dialogs(tmp_path / "t.jsonl", [dialog("a", "b"), {"messages": said}])
    plain = ChatConfig(tokenizer=str(folder), train_on="all")
    name, strict = f"messages.{key}", key == "name"
    with rejects(name, value, "strict" if strict else "not_read", InvalidData, where=f"{path} line 2 message 1"):  # fmt: skip
        Conversations(path, replace(plain, strict=strict))
    ignored = Conversations(path, replace(plain, ignore_keys=[] if strict else [key]))
    assert ignored.rendered.counts["not_read"] == {name: 1}
    everything = "{% for m in messages %}{{ m | tojson }}{% endfor %}"  # prose: a template
    (tmp_path / "t.jinja").write_text(read_by or everything)
    reads = replace(plain, template=str(tmp_path / "t.jinja"), strict=True)
    if read_by is None:
        with rejects(name, value, "not_read", InvalidData):
            Conversations(path, reads)
    else:
        assert Conversations(path, reads).rendered.counts["not_read"] == {}


def test_F134_earlier_reasoning_that_a_template_drops_is_read(tmp_path, folder):
    """Qwen3 leaves out what was thought before the last question; transformers gives reasoning under several names."""
    said = dialog("a", "b", "c", "d")
    for message in said[1::2]:
        message |= {"reasoning_content": "so", "reasoning": "so"}
    (tmp_path / "t.jinja").write_text(REASONING)
    config = ChatConfig(tokenizer=str(folder), template=str(tmp_path / "t.jinja"), train_on="last")
    source = Conversations(write_dialogs(tmp_path / "t.jsonl", [said]), config)
    text = ChatTemplate(config).tokenizer.decode(source.rendered.tokens.read(0, source.rendered.tokens.num_tokens))  # fmt: skip
    assert text.count("<think>so</think>") == 1
    assert not {"messages.reasoning_content"} & source.rendered.counts["not_read"].keys()


def test_a_row_without_a_label_is_a_row(tmp_path, folder):
    talks = [
        [chat_message("user", "hello")],
        [chat_message("user", "a"), chat_message("assistant", "b", weight=0)],
    ]
    source = Conversations(
        write_dialogs(tmp_path / "t.jsonl", talks), ChatConfig(tokenizer=str(folder))
    )
    batch = batch_of(source.stream(64), [0])
    assert batch.label_weight == 0.0
    assert len(of_row(batch, 0)) == 2
    assert numbers(source.warnings(64)) == [[2, 2]]
    talks = [dialog("a<|im_end|>", "b"), dialog("a", "b")]
    source = Conversations(
        write_dialogs(tmp_path / "s.jsonl", talks), ChatConfig(tokenizer=str(folder))
    )
    assert numbers(source.stream(64).warnings) == [[1, 2]]


def test_F202_answers_without_an_end_are_reported(tmp_path, folder):
    path = write_dialogs(tmp_path / "t.jsonl", [dialog("a", "b", "a", "c"), dialog("a", "d")])
    (tmp_path / "lines.jinja").write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    glm = "{% for m in messages %}{{ '<|head|>' if m.role == 'user' else '<|end|>' }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|end|>{% endif %}"  # fmt: skip
    (tmp_path / "glm.jinja").write_text(glm)
    for template, wanted in ((None, []), ("lines", [[3, 3]]), ("glm", [[2, 3]])):
        own = None if template is None else str(tmp_path / f"{template}.jinja")
        config = ChatConfig(tokenizer=str(folder), template=own)
        assert numbers(Conversations(path, config).stream(64).warnings) == wanted
        assert numbers(Conversations(path, config).warnings(64)) == wanted  # of the cache


def test_a_change_is_rejected_at_a_resume_with_the_difference(tmp_path, folder):
    path = write_dialogs(tmp_path / "t.jsonl", many(12))
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
        with rejects("fingerprint", code="mismatch", kind=InvalidData) as error:
            loader(**options).load_state_dict(state)
        assert all(f"  source.{key}: checkpoint " in str(error.value) for key in keys)
    write_dialogs(path, many(11))
    changed = "source.conversations: checkpoint 12, now 11"
    with rejects("fingerprint", code="mismatch", kind=InvalidData, where=changed):
        loader().load_state_dict(state)


def test_parquet_a_saved_set_and_a_folder_give_the_same_rows(tmp_path, folder):
    datasets, zstandard = map(pytest.importorskip, ("datasets", "zstandard"))
    config = ChatConfig(tokenizer=str(folder))
    talks = [*many(5), [chat_message("system", "be short"), *dialog("a", "b")]]
    write_dialogs(tmp_path / "t.jsonl", talks)
    saved = datasets.Dataset.from_list([{"messages": t} for t in talks])
    saved.to_parquet(str(tmp_path / "t.parquet"))
    saved.save_to_disk(str(tmp_path / "saved"))
    split = tmp_path / "split"
    for name, part in (("train", talks[:4]), ("validation", talks[4:])):
        (split / name).mkdir(parents=True)
        write_dialogs(split / name / "a.jsonl", part)
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
    for path, code in (
        (tmp_path / "none", "not_found"),
        (tmp_path / "t.jsonl", "no_splits"),
        (tmp_path / "cache", "no_files"),
    ):
        with rejects("path", str(path), code, InvalidData):
            Conversations(path, config, "validation" if path.suffix else "train")


@pytest.mark.parametrize(
    ("content", "problem", "line"),
    [
        (b'{"messages": []}\n', ("messages", ..., "empty"), " line 1"),
        (b'\n{"messages"\n', ("", ..., "not_json"), " line 2"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', ("", ..., "encoding"), " line 1"),
        (b"[" * 100000, ("", ..., "depth"), " line 1"),
        (b"\n\n", ("", ..., "empty"), ""),
    ],
)
def test_broken_files_name_the_line_and_leave_no_cache(
    tmp_path, folder, cache, content, problem, line
):
    (tmp_path / "t.jsonl").write_bytes(content)
    with rejects(*problem, InvalidData, where=f"t.jsonl{line}: ") as error:
        Conversations(tmp_path / "t.jsonl", ChatConfig(tokenizer=str(folder)))
    assert "\n" not in str(error.value)
    assert not [p for p in cache.glob("*") if p.is_dir()]
    (tmp_path / "t.parquet").write_bytes(content)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(content))
    with rejects(*problem, InvalidData, where=f"t.jsonl.gz{line}: "):
        Conversations(tmp_path / "t.jsonl.gz", ChatConfig(tokenizer=str(folder)))
    if pytest.importorskip("pyarrow"):
        with rejects("", ..., "damaged", InvalidData, where="t.parquet"):
            Conversations(tmp_path / "t.parquet", ChatConfig(tokenizer=str(folder)))


def test_F172_two_columns_of_one_name_are_rejected(tmp_path, folder, cache):
    arrow = pytest.importorskip("pyarrow")
    talk = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    columns = arrow.table([talk, talk], names=["messages", "messages"])
    pytest.importorskip("pyarrow.parquet").write_table(columns, tmp_path / "t.parquet")
    with rejects("", "messages", "duplicate", InvalidData, where="t.parquet"):
        Conversations(tmp_path / "t.parquet", ChatConfig(tokenizer=str(folder)))


def test_packed_files_that_end_early_or_are_no_such_are_named(tmp_path, folder, cache):
    lines = write_dialogs(tmp_path / "t.jsonl").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-5])
    (tmp_path / "b.jsonl.zst").write_bytes(gzip.compress(lines))
    for name, code in (("a.jsonl.gz", "truncated"), ("b.jsonl.zst", "damaged")):
        with rejects("", ..., code, InvalidData, where=name):
            Conversations(tmp_path / name, ChatConfig(tokenizer=str(folder)))
    assert not [p for p in cache.glob("*") if p.is_dir()]


def test_a_saved_set_that_is_damaged_or_cannot_be_read(tmp_path, folder, monkeypatch):
    pytest.importorskip("datasets")
    (tmp_path / "saved").mkdir()
    for name in ("dataset_info.json", "data.arrow"):
        (tmp_path / "saved" / name).write_text("?")
    config = ChatConfig(tokenizer=str(folder))
    with rejects("", ..., "truncated", InvalidData, where="data.arrow"):
        Conversations(tmp_path / "saved", config)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with rejects("path", str(tmp_path / "saved"), "requires"):
        Conversations(tmp_path / "saved", config)


def test_chosen_by_name(tmp_path, folder):
    path = str(write_dialogs(tmp_path / "t.jsonl"))
    chat = ChatConfig(tokenizer=str(folder))
    assert isinstance(open_source(SourceConfig("chat", path, chat=chat)), Conversations)
    given = {"name": "chat", "path": path, "chat": chat}
    for settings, *problem in (
        ({"name": "builtin", "chat": chat}, "chat.tokenizer", str(folder), "foreign"),
        ({"name": "chat", "chat": chat}, "path", None, "missing"),
        ({"name": "chat", "path": path}, "chat.tokenizer", ..., "missing"),
        ({**given, "verify": "full"}, "verify", "full", "excludes"),
        ({**given, "dtype": "uint8"}, "dtype", "uint8", "excludes"),
        ({**given, "options": {"a": 1}}, "options", {"a": 1}, "excludes"),
    ):
        with rejects(*problem):
            TrainingSourceConfig(**settings)
    for key, value, code in (
        ("train_on", "user", "unknown"),
        ("too_long", "cut", "unknown"),
        ("messages_field", "", "no_key"),
        ("tokenizer", "", "empty"),
    ):
        with rejects(key, value, code):
            ChatConfig(**{key: value})


def test_conversations_mix_with_text_of_weight_one(tmp_path, folder):
    prepared = tmp_path / "tokens"
    (tmp_path / "text.txt").write_text("the sky is blue\n" * 50)
    made = str(folder / "tokenizer.json")
    prepare(tmp_path / "text.txt", prepared, tokenizer=made, document="line")
    text = TrainingSourceConfig("tokens", str(prepared), weight=1.0)
    for weight in (1, 0.5):
        one = [chat_message("user", "a"), chat_message("assistant", "b", weight=weight)]
        talks = [*many(20), one, dialog("what", "the sky is blue " * 30)]
        path = str(write_dialogs(tmp_path / f"{weight}.jsonl", talks))
        chat = ChatConfig(tokenizer=str(folder), too_long="skip")
        sources = {"text": text, "talks": TrainingSourceConfig("chat", path, chat=chat, weight=1.0)}
        stream = open_training(DataConfig(48, sources=sources))
        only = {"talks": replace(sources["talks"], weight=None)}
        with rejects("packing.name", "best_fit", "excludes"):
            open_training(DataConfig(48, sources=only, packing=PackingConfig("best_fit")))
        batch = batch_of(stream, range(2 * len(stream.streams[1])))
        assert (batch.source.bincount().diff() == 0).all()
        (warning,) = stream.warnings
        assert warning.startswith("talks: ")
        assert numbers([warning])[0][2:] == [48]
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
