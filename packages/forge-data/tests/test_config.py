"""Configs report all their problems at once."""

import dataclasses

import pytest

import forge_data
from forge_data import DataConfig, SourceConfig

TEXT = {"docs": SourceConfig()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "token"},
            'name \'token\' must be "builtin", "tokens", an entry point of forge.sources or an import path',
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
        SourceConfig(**settings)
    assert "; " in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 0}, "seq_len 0 must be"),
        ({"seq_len": 1.5}, "seq_len 1.5 must be"),
        ({"seq_len": True}, "seq_len True must be"),
        ({"num_workers": -1}, "num_workers -1 must be"),
        ({"sources": {}}, r"sources \(none\) must have one entry"),
        ({"sources": {**TEXT, "more": SourceConfig()}}, r"sources \(docs, more\).*mixing"),
    ],
)
def test_data_rules(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"sources": TEXT, **settings})


def test_all_problems_in_one_message():
    with pytest.raises(ValueError, match="seq_len") as error:
        DataConfig(seq_len=0, num_workers=-2)
    assert len(str(error.value).splitlines()) == 3


def test_legal_configs():
    config = DataConfig(sources=TEXT, validation=SourceConfig(split="validation"))
    assert (config.seq_len, config.num_workers) == (256, 0)
    SourceConfig(name="tokens", path="x.bin", dtype="uint16")
    SourceConfig(name="my_lab.data:Source.open", path="anything")


def test_every_field_has_a_help():
    for config in (SourceConfig, DataConfig):
        assert all(f.metadata["help"] for f in dataclasses.fields(config))


def test_public_names():
    assert len(forge_data.__all__) <= 25
    assert all(getattr(forge_data, name).__doc__ for name in forge_data.__all__)
