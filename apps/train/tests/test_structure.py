"""Strict types: what TOML says is what the job gets, or a problem that names the rule."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forge_testing.problems import ANY, assert_problem
from forge_train._shared.problems import Problem
from forge_train.config.structure import structure
from forge_train.errors import ConfigError
from forge_train.report.describe import key_rows

pytestmark = pytest.mark.lane("test")

GOOD: dict[str, Any] = {
    "model": {"vocab_size": 257, "dim": 16, "num_heads": 2},
    "data": {"sources": {"a": {"name": "builtin"}}},
    "train": {"steps": 3},
}

VISION = {"name": "vlm", "modalities": {"image": {"first_id": 256}}}


def problems(section: str, **keys: Any) -> list[Problem]:
    values = {**GOOD, section: {**GOOD.get(section, {}), **keys}}
    return structure(values)[1]


def test_a_good_job_has_no_problems() -> None:
    built, wrong = structure(GOOD)
    assert not wrong
    assert built["model"].dim == 16
    assert built["train"].steps == 3


@pytest.mark.parametrize(
    ("section", "key", "value", "code"),
    [
        ("model", "dim", 1.0, "type"),
        ("model", "dim", True, "type"),
        ("model", "dim", "16", "type"),
        ("model", "dim", 2**64, "range"),
        ("model", "tie_embeddings", 1, "type"),
        ("model", "tie_embeddings", "true", "type"),
        ("optimizer", "lr", "1e-3", "type"),
        ("optimizer", "lr", True, "type"),
        ("optimizer", "lr", math.inf, "finite"),
        ("optimizer", "betas", [0.9], "length"),
        ("optimizer", "betas", 0.9, "type"),
        ("parallel", "dp_shard", True, "type"),
        ("callbacks", "mine", 3, "table"),
        ("model", "norm_options", 3, "table"),
        ("run", "dir", 3, "type"),
        ("run", "dir", "a\0", "not_utf8"),
        ("run", "dir", "\udcff", "not_utf8"),
        ("metrics", "console", "lively", "unknown"),
    ],
)
def test_no_silent_coercion(section: str, key: str, value: Any, code: str) -> None:
    (problem,) = problems(section, **{key: value})
    assert_problem(ConfigError([problem]), f"{section}.{key}", value, code)


def test_the_nearest_choice_is_the_fix() -> None:
    (problem,) = problems("metrics", console="lively")
    assert "'live'" in problem.fix


#: section, keys, key at fault, its value, code
RULES: list[tuple[str, dict[str, Any], str, Any, str]] = [
    ("run", {"dir": " "}, "dir", " ", "missing"),
    ("run", {"seed": -1}, "seed", -1, "range"),
    ("init", {"seed": -1}, "seed", -1, "range"),
    ("init", {"keep": ["weights", "optimizer"]}, "keep", ["weights", "optimizer"], "requires"),
    ("init", {"patterns": ["a"]}, "patterns", ["a"], "requires"),
    ("init", {"from": "/ "}, "from", "/ ", "missing"),
    ("init", {"from": "a", "keep": ["optimizer"]}, "keep", ["optimizer"], "weights"),
    ("init", {"from": "a", "keep": ["weights"] * 2}, "keep", ["weights"] * 2, "weights"),
    (
        "init",
        {"from": "a", "keep": ["weights", "cursor"]},
        "keep",
        ["weights", "cursor"],
        "moments",
    ),
    (
        *("init", {"from": "a", "keep": ["weights", "optimizer"], "patterns": ["a"]}),
        *("patterns", ["a"], "excludes"),
    ),
    ("model", {"name": "mine"}, "name", "mine", "unknown"),
    ("model", {"name": "a:b", "vocab_size": -1}, "vocab_size", -1, "range"),
    ("model", {"moe": {"num_experts": -1}}, "moe.num_experts", -1, "range"),
    ("model", {"moe": {"every_n_layers": 0}}, "moe.every_n_layers", 0, "range"),
    ("model", {"moe": {"dispatch_chunks": 0}}, "moe.dispatch_chunks", 0, "range"),
    ("model", {"moe": {"first_dense_layers": -1}}, "moe.first_dense_layers", -1, "range"),
    ("model", {"moe": {"width_multiplier": 0.0}}, "moe.width_multiplier", 0.0, "range"),
    ("model", {"moe": {"num_experts": 2, "top_k": 3}}, "moe.top_k", 3, "above_experts"),
    (
        *("model", {"moe": {"num_experts": 2, "first_dense_layers": 99}}),
        *("moe.num_experts", 2, "layers"),
    ),
    (
        *("model", {"moe": {"num_experts": 2}, "mtp": {"num_modules": 1}}),
        *("mtp.num_modules", 1, "excludes"),
    ),
    (
        *("model", {"moe": {"num_experts": 2}, "parametrization": "mup"}),
        *("moe.num_experts", 2, "mup"),
    ),
    (
        *("model", {**VISION, "fusion": {"name": "moma"}, "moe": {"num_experts": 2}}),
        *("moe.num_experts", 2, "fusion"),
    ),
    ("model", {**VISION, "parametrization": "mup"}, "parametrization", "mup", "vision"),
    ("lora", {"alpha": 3.0}, "alpha", 3.0, "requires"),
    ("lora", {"rank": -1}, "rank", -1, "range"),
    ("train", {"steps": 0}, "steps", 0, "range"),
    ("train", {"steps": "none"}, "steps", ..., "one_length"),
    ("train", {"tokens": 5}, "steps", ..., "one_length"),
    ("train", {"steps": "none", "tokens": 0}, "tokens", 0, "range"),
    (
        *("train", {"steps": "none", "tokens_per_parameter": 0.0}),
        *("tokens_per_parameter", 0.0, "range"),
    ),
    ("train", {"global_batch": 0}, "global_batch", 0, "range"),
    ("train", {"global_batch": 4, "micro_batch": 3}, "global_batch", 4, "divides"),
    (
        *("train", {"cross_entropy": {"z_loss": 0.5}, "loss": "fused_cross_entropy"}),
        *("cross_entropy.z_loss", 0.5, "foreign"),
    ),
    (
        *("train", {"fused_cross_entropy": {"label_smoothing": 0.5}}),
        *("fused_cross_entropy.label_smoothing", 0.5, "foreign"),
    ),
    ("train", {"objective": "a:b", "loss": "c:d"}, "objective", "a:b", "excludes"),
    ("train", {"objective_options": {"a": 1}}, "objective_options", {"a": 1}, "requires"),
    ("train", {"max_grad_norm": 0.0}, "max_grad_norm", 0.0, "range"),
    ("eval", {"every_steps": -1}, "every_steps", -1, "range"),
    ("eval", {"sequences": 0}, "sequences", 0, "range"),
    ("eval", {"sets": {"a": {"sequences": 0}}}, "sets.a.sequences", 0, "range"),
    ("eval", {"sets": {"a": {"every_steps": -1}}}, "sets.a.every_steps", -1, "range"),
    ("eval", {"sets": {"validation": {}}}, "sets.validation", ..., "validation"),
    ("eval", {"sets": {"a": {}}, "choices": {"a": {"path": "b"}}}, "sets.a", ..., "duplicate"),
    ("eval", {"choices": {"a": {}}}, "choices.a.path", None, "missing"),
    ("eval", {"choices": {"a": {"path": "b", "samples": 0}}}, "choices.a.samples", 0, "range"),
    ("eval", {"exact_match": {"path": "a", "rows": 0}}, "exact_match.rows", 0, "range"),
    ("eval", {"exact_match": {"samples": 5}}, "exact_match.samples", 5, "requires"),
    ("checkpoint", {"every_steps": -1}, "every_steps", -1, "range"),
    ("checkpoint", {"keep_every": -1}, "keep_every", -1, "range"),
    ("checkpoint", {"keep_last": 0}, "keep_last", 0, "range"),
    ("checkpoint", {"max_failed_saves": 0}, "max_failed_saves", 0, "range"),
    ("checkpoint", {"staging_gib": 0.0}, "staging_gib", 0.0, "range"),
    ("metrics", {"every_steps": 0}, "every_steps", 0, "range"),
    ("metrics", {"gradients_every_steps": -1}, "gradients_every_steps", -1, "range"),
    ("profile", {"num_steps": 1, "ranks": []}, "ranks", [], "range"),
    ("sample", {"max_new_tokens": -1}, "max_new_tokens", -1, "range"),
    ("sample", {"temperature": math.nextafter(100, 101)}, "temperature", ANY, "range"),
    ("resilience", {"save_limit_seconds": 0.0}, "save_limit_seconds", 0.0, "range"),
    ("callbacks", {"mine": {"name": "a:b", "every_steps": 0}}, "mine.every_steps", 0, "range"),
    ("callbacks", {"mine": {"name": 1}}, "mine.name", 1, "type"),
    ("callbacks", {"mine": {}}, "mine.name", ..., "missing"),
    ("data", {"sources": {"my-text": {"name": "builtin"}}}, "sources", "my-text", "name"),
    ("data", {"sources": {"class": {"name": "builtin"}}}, "sources", "class", "name"),
]


@pytest.mark.parametrize(("section", "keys", "key", "value", "code"), RULES)
def test_a_rule_of_a_section_names_key_and_value(
    section: str, keys: dict[str, Any], key: str, value: Any, code: str
) -> None:
    assert_problem(ConfigError(problems(section, **keys)), f"{section}.{key}", value, code)


def test_an_integer_is_a_number() -> None:
    built, wrong = structure({**GOOD, "optimizer": {"lr": 1}})
    assert not wrong
    assert isinstance(built["optimizer"].lr, float)


def test_none_unsets_an_optional_value_and_no_other() -> None:
    built, wrong = structure({**GOOD, "train": {"steps": 3, "max_grad_norm": "none"}})
    assert not wrong
    assert built["train"].max_grad_norm is None
    (problem,) = problems("train", global_batch="none")
    assert_problem(ConfigError([problem]), "train.global_batch", "none", "type")


def test_a_section_is_a_table() -> None:
    assert_problem(ConfigError(structure({**GOOD, "eval": 3})[1]), "eval", 3, "table")


def test_unknown_keys_name_the_nearest_one_at_every_depth() -> None:
    values = {**GOOD, "data": {"sources": {"a": {"nam": "builtin"}}}, "optimizr": {}}
    values["callbacks"] = {"mine": {"name": "a:b", "every_step": 3}}
    wrong = structure(values)[1]
    assert_problem(ConfigError(wrong), "optimizr", ..., "unknown_key")
    fixes = {p.key: p.fix for p in wrong}
    assert "data.sources.a.name" in fixes["data.sources.a.nam"]
    assert "callbacks.mine.every_steps" in fixes["callbacks.mine.every_step"]
    assert "optimizer" in fixes["optimizr"]


def test_of_thousands_of_unknown_keys_some_are_named() -> None:
    wrong = structure({**GOOD, **{f"{'a' * 300}{i}": 1 for i in range(23)}})[1]
    assert_problem(ConfigError(wrong), "", 3, "unknown_keys")
    assert max(len(problem.key) for problem in wrong) < 210


def test_every_key_has_a_type_a_default_and_a_meaning_and_every_number_a_range() -> None:
    for row in key_rows():
        number = {"int", "float"} & set(row.type.split(" or "))
        assert bool(row.range) == bool(number), row
        assert row.type, row
        assert row.default, row
        assert len(row.meaning) > 8, row
