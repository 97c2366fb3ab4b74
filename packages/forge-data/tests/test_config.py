"""Configs report all their problems at once."""

import pytest

import forge_data
from forge_data import DataConfig, PhaseConfig, TrainingSourceConfig
from forge_data.kinds import HuggingFaceConfig, TextConfig
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

TEXT = {"docs": TrainingSourceConfig()}


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        (TextConfig, {"eos": "<e>"}, ("eos", "<e>", "excludes")),
        (TextConfig, {"document": "page"}, ("document", "page", "unknown")),
        (TextConfig, {"validation_every": 1}, ("validation_every", 1, "range")),
        (TextConfig, {"cache": ""}, ("cache", "", "empty")),
        (TextConfig, {"tokenizer": ""}, ("tokenizer", "", "empty")),
        (TextConfig, {"tokenizer": "a\0b"}, ("tokenizer", "a\x00b", "file_name")),
        (HuggingFaceConfig, {"text_field": ""}, ("text_field", "", "empty")),
        (HuggingFaceConfig, {"split": ""}, ("split", "", "empty")),
    ],
)
def test_rules_of_the_tables_of_kinds(kind, settings, problem):
    with rejects(*problem):
        kind(**settings)


TWO = {name: TrainingSourceConfig() for name in "ab"}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"name": "token"},
            ("name", "token", "unknown"),
        ),
        (
            {"text": TextConfig(document="line")},
            ("text.document", "line", "foreign"),
        ),
        (
            {"name": "text", "path": "a", "huggingface": HuggingFaceConfig(split="x")},
            ("huggingface.split", "x", "foreign"),
        ),
        ({"name": "text"}, ("path", None, "missing")),
        ({"name": "text", "path": "a", "dtype": "uint8"}, ("dtype", "uint8", "excludes")),
        (
            {
                "name": "huggingface",
                "path": "a",
                "split": "validation",
                "huggingface": HuggingFaceConfig(split="x"),
            },
            ("split", "validation", "excludes"),
        ),
        ({"name": "tokens"}, ("path", None, "missing")),
        ({"path": "x"}, ("path", "x", "excludes")),
        ({"dtype": "uint16"}, ("dtype", "uint16", "excludes")),
        ({"name": "tokens", "path": "x", "dtype": "int8"}, ("dtype", "int8", "unknown")),
        ({"split": "test"}, ("split", "test", "unknown")),
    ],
)
def test_source_rules(settings, problem):
    with rejects(*problem) as error:
        TrainingSourceConfig(**settings)
    assert "; " in str(error.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"seq_len": 0}, ("seq_len", 0, "range")),
        ({"seq_len": 1.5}, ("seq_len", 1.5, "range")),
        ({"seq_len": True}, ("seq_len", True, "range")),
        ({"num_workers": -1}, ("num_workers", -1, "range")),
        ({"worker_timeout_seconds": -1.0}, ("worker_timeout_seconds", -1.0, "range")),
        ({"seed": -1}, ("seed", -1, "range")),
        ({"sources": {}}, ("sources", {}, "missing")),
        ({"sources": [TEXT]}, ("sources", [TEXT], "table")),
        ({"phases": [PhaseConfig(4)]}, ("phases", [PhaseConfig(4)], "table")),
        (
            {"sources": {"a": TrainingSourceConfig(weight=2.0)}},
            ("sources.a.weight", 2.0, "only_source"),
        ),
        (
            {"sources": {"a": TrainingSourceConfig(weight=2.0), "b": TrainingSourceConfig()}},
            ("sources.b.weight", ..., "missing"),
        ),
        (
            {"sources": {n: TrainingSourceConfig(weight=0.0) for n in "ab"}},
            ("sources", ..., "zero_weights"),
        ),
        ({"temperature": 2.0}, ("temperature", 2.0, "only_source")),
        ({"temperature": 0.0, "sources": TWO}, ("temperature", 0.0, "range")),
        (
            {"sources": TWO, "phases": {"end": PhaseConfig(10, {"c": 1.0})}},
            ("phases.end.weights", "c", "unknown"),
        ),
        (
            {"phases": {"end": PhaseConfig(10, {"docs": 1.0})}},
            ("phases.end.weights", {"docs": 1.0}, "only_source"),
        ),
        (
            {"phases": {n: PhaseConfig(10, lr_multiplier=0.5) for n in "xy"}},
            ("phases.y", ..., "no_change"),
        ),
    ],
)
def test_data_rules(settings, problem):
    with rejects(*problem):
        DataConfig(**{"sources": TEXT, **settings})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"start_tokens": 0, "lr_multiplier": 0.5}, ("start_tokens", 0, "range")),
        ({"start_tokens": 5, "lr_multiplier": 0.0}, ("lr_multiplier", 0.0, "range")),
        ({"start_tokens": 5, "weights": {"a": -1.0}}, ("weights.a", -1.0, "range")),
        ({"start_tokens": 5, "weights": {"a": 0.0}}, ("weights", {"a": 0.0}, "zero_weights")),
    ],
)
def test_phase_rules(settings, problem):
    with rejects(*problem):
        PhaseConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"weight": float("nan")}, ("weight", float("nan"), "range")),
        ({"max_epochs": 0}, ("max_epochs", 0, "range")),
    ],
)
def test_wrong_shares_are_rejected(settings, problem):
    with rejects(*problem):
        TrainingSourceConfig(**settings)


def test_all_problems_in_one_message():
    with rejects("seq_len", 0, "range") as error:
        DataConfig(seq_len=0, num_workers=-2)
    assert len(str(error.value).splitlines()) == 3


def test_legal_configs():
    config = DataConfig(sources=TEXT, validation=TrainingSourceConfig(split="validation"))
    assert (config.seq_len, config.num_workers) == (256, 0)
    TrainingSourceConfig(name="tokens", path="x.bin", dtype="uint16")
    TrainingSourceConfig(name="my_lab.data:Source.open", path="anything")


def test_public_names():
    assert len(forge_data.__all__) <= 30
    assert all(getattr(forge_data, name).__doc__ for name in forge_data.__all__)
