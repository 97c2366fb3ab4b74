"""Strict types: what TOML says is what the job gets, or a sentence that says why not."""

from __future__ import annotations

from typing import Any

import pytest

from forge_train.config.describe import key_rows
from forge_train.config.structure import structure

pytestmark = pytest.mark.lane("test")

GOOD: dict[str, Any] = {
    "model": {"vocab_size": 257, "dim": 16, "num_heads": 2},
    "data": {"sources": {"a": {"name": "builtin"}}},
    "train": {"steps": 3},
}


def problems(section: str, **keys: Any) -> list[str]:
    values = {**GOOD, section: {**GOOD.get(section, {}), **keys}}
    return structure(values)[1]


def test_a_good_job_has_no_problems() -> None:
    built, wrong = structure(GOOD)
    assert not wrong
    assert built["model"].dim == 16
    assert built["train"].steps == 3


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        ("model", "dim", 1.0, "model.dim: 1.0 (float) must be an integer"),
        ("model", "dim", True, "model.dim: True (bool) must be an integer"),
        ("model", "dim", "16", "model.dim: '16' (str) must be an integer"),
        ("model", "tie_embeddings", 1, "must be true or false"),
        ("model", "tie_embeddings", "true", "must be true or false"),
        ("optimizer", "lr", "1e-3", "optimizer.lr: '1e-3' (str) must be a number"),
        ("optimizer", "lr", True, "must be a number"),
        ("optimizer", "betas", [0.9], "list of 2 floats"),
        ("optimizer", "betas", 0.9, "list of 2 floats"),
        ("callbacks", "mine", {"name": 1}, "callbacks.mine.name: 1 (int) must be a string"),
        ("callbacks", "mine", {"name": "a:b", "every_steps": 0}, "every_steps 0 must be from 1"),
        ("callbacks", "mine", {}, "callbacks.mine.name is missing; it has no default"),
        ("callbacks", "mine", 3, "write it as a table"),
        ("run", "dir", 3, "run.dir: 3 (int) must be a string"),
        ("metrics", "console", "lively", "did you mean 'live'"),
    ],
)
def test_no_silent_coercion(section: str, key: str, value: Any, says: str) -> None:
    (problem,) = problems(section, **{key: value})
    assert says in problem


def test_an_integer_is_a_number() -> None:
    built, wrong = structure({**GOOD, "optimizer": {"lr": 1}})
    assert not wrong
    assert isinstance(built["optimizer"].lr, float)


def test_none_unsets_an_optional_value_and_nothing_else() -> None:
    built, wrong = structure({**GOOD, "train": {"steps": 3, "max_grad_norm": "none"}})
    assert not wrong
    assert built["train"].max_grad_norm is None
    assert problems("train", global_batch="none") == [
        "train.global_batch: 'none' (str) must be an integer"
    ]


def test_unknown_keys_name_the_nearest_one_at_every_depth() -> None:
    values = {**GOOD, "data": {"sources": {"a": {"nam": "builtin"}}}, "optimizr": {}}
    values["callbacks"] = {"mine": {"name": "a:b", "every_step": 3}}
    wrong = "\n".join(structure(values)[1])
    assert "data.sources.a.nam is not a known key; did you mean data.sources.a.name?" in wrong
    assert (
        "callbacks.mine.every_step is not a known key; did you mean callbacks.mine.every_s" in wrong
    )
    assert "optimizr is not a known key; did you mean optimizer?" in wrong


def test_every_key_has_a_type_a_default_and_a_meaning() -> None:
    for row in key_rows():
        assert row.type, row
        assert row.default, row
        assert len(row.meaning) > 8, row
