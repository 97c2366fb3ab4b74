"""Configs report all their problems at once."""

import dataclasses
import re

import pytest

import forge_data
from forge_data import DataConfig, PhaseConfig, TrainingSourceConfig
from forge_data.kinds import HuggingFaceConfig, TextConfig

pytestmark = pytest.mark.lane("test")

TEXT = {"docs": TrainingSourceConfig()}


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (TextConfig, {"eos": "<e>"}, "eos '<e>' means nothing to the byte tokenizer"),
        (TextConfig, {"document": "page"}, "document 'page' must be one of file, line, blank_line"),
        (TextConfig, {"validation_every": 1}, "validation_every 1 must be 0"),
        (TextConfig, {"cache": ""}, "cache '' must name a folder"),
        (TextConfig, {"tokenizer": "a\0b"}, "tokenizer 'a\\x00b' must be a file name"),
        (HuggingFaceConfig, {"text_field": ""}, "text_field '' must name a column"),
        (HuggingFaceConfig, {"split": ""}, "split '' must name a split"),
    ],
)
def test_rules_of_the_tables_of_kinds(kind, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**settings)


TWO = {name: TrainingSourceConfig() for name in "ab"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "token"},
            "name 'token' must be one of builtin, tokens, megatron, huggingface, text, chat, nanogpt, npy, an entry point of forge.sources or an",
        ),
        (
            {"text": TextConfig(document="line")},
            "text.document 'line' is a key of name 'text', and name is 'builtin'",
        ),
        (
            {"name": "text", "path": "a", "huggingface": HuggingFaceConfig(split="x")},
            "huggingface.split 'x' is a key of name 'huggingface', and name is 'text'; remove it",
        ),
        ({"name": "text"}, "path None must name text files when name is 'text'; set path"),
        ({"name": "text", "path": "a", "dtype": "uint8"}, "dtype 'uint8' means nothing"),
        (
            {
                "name": "huggingface",
                "path": "a",
                "split": "validation",
                "huggingface": HuggingFaceConfig(split="x"),
            },
            "split 'validation' means nothing beside huggingface.split 'x'",
        ),
        ({"name": "tokens"}, "path None must name token files"),
        ({"path": "x"}, "path 'x' means nothing"),
        ({"dtype": "uint16"}, "dtype 'uint16' means nothing"),
        ({"name": "tokens", "path": "x", "dtype": "int8"}, "dtype 'int8' must be one of"),
        ({"split": "test"}, "split 'test' must be"),
    ],
)
def test_source_rules(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        TrainingSourceConfig(**settings)
    assert "; " in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 0}, "seq_len 0 must be"),
        ({"seq_len": 1.5}, "seq_len 1.5 must be"),
        ({"seq_len": True}, "seq_len True must be"),
        ({"num_workers": -1}, "num_workers -1 must be"),
        ({"sources": {}}, r"sources \(none\) must have one entry"),
        (
            {"sources": {"a": TrainingSourceConfig(weight=2.0)}},
            r"sources.a.weight means nothing for the only",
        ),
        (
            {"sources": {"a": TrainingSourceConfig(weight=2.0), "b": TrainingSourceConfig()}},
            "sources.b.weight must be given, as a has one",
        ),
        (
            {"sources": {n: TrainingSourceConfig(weight=0.0) for n in "ab"}},
            r"sources \(a, b\) must have one with a weight above 0",
        ),
        ({"temperature": 2.0}, "temperature 2.0 means nothing for the only source"),
        ({"temperature": 0.0, "sources": TWO}, "temperature 0.0 must be a finite number above 0"),
        (
            {"sources": TWO, "phases": {"end": PhaseConfig(10, {"c": 1.0})}},
            "phases.end.weights 'c' must be one of the sources, a, b",
        ),
        (
            {"phases": {"end": PhaseConfig(10, {"docs": 1.0})}},
            "phases.end.weights mean nothing for the only source",
        ),
        (
            {"phases": {n: PhaseConfig(10, lr_multiplier=0.5) for n in "xy"}},
            "phases.y and phases.x begin with the same row, 1",
        ),
    ],
)
def test_data_rules(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"sources": TEXT, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start_tokens": 0, "lr_multiplier": 0.5}, "start_tokens 0 must be"),
        ({"start_tokens": 5, "lr_multiplier": 0.0}, "lr_multiplier 0.0 must be"),
        ({"start_tokens": 5, "weights": {"a": -1.0}}, "weights.a -1.0 must be"),
        ({"start_tokens": 5, "weights": {"a": 0.0}}, "must have one above 0"),
    ],
)
def test_phase_rules(settings, message):
    with pytest.raises(ValueError, match=message):
        PhaseConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"weight": float("nan")}, "weight nan must be"), ({"max_epochs": 0}, "max_epochs 0 must be")],
)
def test_share_rules(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainingSourceConfig(**settings)


def test_all_problems_in_one_message():
    with pytest.raises(ValueError, match="seq_len") as error:
        DataConfig(seq_len=0, num_workers=-2)
    assert len(str(error.value).splitlines()) == 3


def test_legal_configs():
    config = DataConfig(sources=TEXT, validation=TrainingSourceConfig(split="validation"))
    assert (config.seq_len, config.num_workers) == (256, 0)
    TrainingSourceConfig(name="tokens", path="x.bin", dtype="uint16")
    TrainingSourceConfig(name="my_lab.data:Source.open", path="anything")


def test_every_field_has_a_help():
    for config in (TrainingSourceConfig, DataConfig):
        assert all(f.metadata["help"] for f in dataclasses.fields(config))


def test_public_names():
    assert len(forge_data.__all__) <= 25
    assert all(getattr(forge_data, name).__doc__ for name in forge_data.__all__)
