"""Rotary keys of a Hugging Face `config.json`: `rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of 5."""

from collections.abc import Mapping
from typing import Any

from forge_core._shared.problems import Problem, show
from forge_core.model.rope import ROPE_NAMES, RopeScaling

#: The tables, in the order in which transformers looks for one that is not empty.
TABLES = ("rope_scaling", "rope_parameters")

ROPE_SIZE = "original_max_position_embeddings"
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", *_YARN)
ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *(ROPE_SIZE, *ROPE_NUMBERS, "truncate"),
}
#: Keys that a scaling needs.
_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ROPE_SIZE),
    "yarn": ("factor", ROPE_SIZE),
}


def table_entries(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the rotary tables, by dotted name."""
    return {
        f"{where}.{key}": value
        for where in TABLES
        if isinstance(table := hf.get(where), Mapping)
        for key, value in table.items()
    }


def rope_table(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary keys in one flat table, with `rope_type`, `rope_theta` and `partial_rotary_factor`.

    As in transformers, it is the first table that is not empty, with the keys outside of it as defaults.
    """
    return _flat(hf, next((hf[where] for where in TABLES if hf.get(where)), {}))


def _flat(hf: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """A table in the spelling of transformers 5; null is a key that is left out."""
    outside = {key: hf.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    given = {k: v for k, v in {**outside, **table}.items() if v is not None}
    kind = given.pop("type", "default")
    return {"rope_theta": 1e4, "partial_rotary_factor": 1.0, "rope_type": kind, **given}


def rope_problems(hf: Mapping[str, Any], partial_rotary: bool, latent: bool) -> list[Problem]:
    """Return the problems of rotary keys: options that Forge does not have, and two tables that disagree."""
    problems, rope = _conflict(hf), rope_table(hf)
    kind, partial = rope["rope_type"], rope["partial_rotary_factor"]
    if kind not in ("default", *ROPE_NAMES):
        fix = f"use 'default', {' or '.join(map(repr, ROPE_NAMES))}"
        problems.append(Problem("rope_type", "unsupported", kind, "is not supported", fix))
    for key in (key for key in _NEEDS.get(kind, ()) if key not in rope):
        problems.append(Problem("rope_type", "requires", kind, f"needs {key}", "give it"))
    if partial != 1.0 and not partial_rotary:
        key = "partial_rotary_factor"
        problems.append(Problem(key, "unsupported", partial, "is not supported", "use 1"))
    # transformers scales the scores by it under any type but default
    if latent and rope.get("mscale_all_dim") and kind not in ("default", "yarn"):
        rule, fix = f"is not supported with rope_type {kind!r}", "use 'yarn', or remove the key"
        problems.append(Problem("mscale_all_dim", "unsupported", rope["mscale_all_dim"], rule, fix))
    return problems


def _conflict(hf: Mapping[str, Any]) -> list[Problem]:
    """The problem of two tables that disagree; model cards may add a scaling next to a plain table of the same base."""
    if not all(hf.get(where) for where in TABLES):
        return []
    read, other = (_flat(hf, hf[where]) for where in TABLES)
    same = {**other, "rope_type": read["rope_type"]} if other["rope_type"] == "default" else other
    if read == other or (same.items() <= read.items()):
        return []
    rule = f"contradicts rope_scaling {show(hf['rope_scaling'])}; transformers reads rope_scaling, with rope_theta {read['rope_theta']}"
    fix = "remove one of the tables, or give both the same values"
    return [Problem("rope_parameters", "conflict", hf["rope_parameters"], rule, fix)]


def read_scaling(rope: Mapping[str, Any], latent: bool) -> RopeScaling | None:
    """Return the scaling of a table of `rope_table`, if it has one."""
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] == "linear":
        return RopeScaling(factor=rope["factor"], name="linear")
    if rope["rope_type"] == "yarn":
        return _yarn(rope, latent)
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position=rope["original_max_position_embeddings"],
    )


def _yarn(rope: Mapping[str, Any], latent: bool) -> RopeScaling:
    """Return a YaRN scaling with the keys that transformers reads.

    A 0 counts as absent. mscale counts only with mscale_all_dim and without attention_factor. Scores of `latent` attention
    grow by mscale_all_dim in any case.
    """
    read = {key: rope[key] for key in _YARN if rope.get(key) is not None}
    given = {key: value for key, value in read.items() if value or key == "attention_factor"}
    if "attention_factor" in given or "mscale_all_dim" not in given:
        given.pop("mscale", None)
    if "mscale" not in given and not latent:
        given.pop("mscale_all_dim", None)
    return RopeScaling(
        factor=rope["factor"],
        original_max_position=rope[ROPE_SIZE],
        truncate=rope.get("truncate", True),
        name="yarn",
        **given,
    )


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return the rotary table of a scaling, without its base."""
    if scaling is None:
        return None
    if scaling.name == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.name == "yarn":
        given: dict[str, Any] = {key: getattr(scaling, key) for key in (*_YARN, "truncate")}
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            ROPE_SIZE: scaling.original_max_position,
            **{key: value for key, value in given.items() if value is not None},
        }

    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
