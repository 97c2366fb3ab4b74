"""Runs of versions without a begin token: they resume, and are evaluated, as their data was tokenized (F142)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from forge_data import open_header
from forge_train._shared.problems import Problem
from forge_train.build.data import sources_by_key
from forge_train.build.resolve import ResolvedJob
from forge_train.build.run_directory import RunDirectory
from forge_train.config.evaluation import KINDS
from forge_train.config.layers import Layers, read_layers
from forge_train.errors import ConfigError, config_errors
from forge_vlm.data import is_prepared

#: The table with the key `bos`, by the kind of a source that is tokenized when a run begins.
_TABLES = {"text": "text", "huggingface": "huggingface", **dict.fromkeys(KINDS, "options")}


def run_layers(run: RunDirectory) -> Layers:
    """config.toml of a run, with `bos = ""` for what was tokenized before there was that key."""
    layers = run.layers()
    begin_texts_as(layers, layers)
    return layers


def begin_texts_as(run: Layers, layers: Layers) -> None:
    """Let texts that `layers` names begin as a run of the resolved file `run` began its own."""
    if began_texts_without(run):
        begin_texts_without(layers)


def began_texts_without(layers: Layers) -> bool:
    """Whether a version without `bos` wrote this resolved file: each source has the keys of all kinds."""
    texts = [source.get("text") for source in _tables(layers.at("data.sources")).values()]
    return any(isinstance(t, dict) and "eos" in t and "bos" not in t for t in texts)


def is_older(run: RunDirectory) -> bool:
    """Whether a version without `bos` wrote the checkpoints of a run, as far as its config.toml tells."""
    with contextlib.suppress(ConfigError):  # `RunDirectory.changes` reports it
        return run.has_checkpoints() and began_texts_without(read_layers(run.config))
    return False


def begin_texts_without(layers: Layers) -> None:
    """Set `bos = ""` where sources and held-out sets leave it to the files of their tokenizer."""
    tables = {f"data.sources.{n}": t for n, t in _tables(layers.at("data.sources")).items()}
    tables |= {f"eval.sets.{n}": t for n, t in _tables(layers.at("eval.sets")).items()}
    tables |= _tables({"data.validation": layers.at("data.validation")})
    for key, table in tables.items():
        if bos := _open_key(table):
            layers.set(f"{key}.{bos}", "", "as the run was tokenized")


def begin_problems(job: ResolvedJob, run: RunDirectory) -> list[Problem]:
    """Why a job cannot go on from the checkpoints of a run: its texts began with no token, and would begin with one."""
    config = job.config
    if config.data.accept_change or not is_older(run):
        return []

    sources = sources_by_key(config)
    if job.origin("data.validation.name").startswith("derived"):  # follows its source
        sources.pop("data.validation", None)

    problems = []
    for key, source in sources.items():
        bos = _open_key(asdict(source))
        if not bos:
            continue
        with config_errors(key):
            spec: Mapping[str, Any] = open_header(source).tokenizer or {}
        if names := spec.get("bos"):
            rule = f"is not set, so texts begin with {' '.join(names)}, and those that {run.path} has read did not"
            fix = 'set bos = "" there to go on with the same tokens, or data.accept_change = true'
            problems.append(Problem(f"{key}.{bos}", "older", ..., rule, fix))
    return problems


def _open_key(table: Mapping[str, Any]) -> str:
    """The key `bos` of a source whose first token the files of its tokenizer decide; "" of other sources."""
    kind = _TABLES.get(str(table.get("name")), "")
    own = _tables(table).get(kind, {})
    if own.get("tokenizer", "byte") == "byte" or own.get("bos") not in (None, "none"):
        return ""
    # a folder that was prepared keeps its own
    return "" if kind == "options" and is_prepared(str(table.get("path"))) else f"{kind}.bos"


def _tables(group: Any) -> dict[str, dict[str, Any]]:
    """The members of a table that are tables; none of "none"."""
    found = group.items() if isinstance(group, Mapping) else ()
    return {name: table for name, table in found if isinstance(table, dict)}
