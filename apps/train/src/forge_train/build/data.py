"""The data of a job: its loader, what it evaluates, its tokenizer, and whether they fit model and run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from forge_data import (
    Batch,
    InvalidData,
    Loader,
    SourceConfig,
    Stream,
    Tokenizer,
    open_stream,
    open_training,
)
from forge_data.run_checks import (
    GuardedLoader,
    group_problems,
    label_problem,
    streams_by_source,
    tokenize_sources,
    training_tokenizer,
)
from forge_parallel.check_model import extra_problems
from forge_parallel.config import Layout
from forge_train._shared.problems import Problem
from forge_train.build.build import Course, total_steps
from forge_train.build.layout import micro_batches
from forge_train.config.evaluation import VALIDATION
from forge_train.config.init import ends_of_weights
from forge_train.config.model import BuiltInModelConfig, VLMModelConfig
from forge_train.config.schema import JobConfig
from forge_train.errors import DataError, config_errors, data_errors, refuse
from forge_vlm.data import check_labels

_SOURCES = "data.sources"
_VALIDATION = f"data.{VALIDATION}"


def open_data(
    config: JobConfig, model: nn.Module, layout: Layout, rank: int
) -> tuple[Loader, dict[str, Stream]]:
    """The loader of this rank's micro-batches, and held-out rows by the keys of their tables.

    ConfigError where they lack extras that the model takes, DataError for what is damaged.
    """
    division, steps = micro_batches(config, layout), total_steps(config, model)
    tokenize(config)
    names, data, course = list(config.data.sources), config.data, Course(config)
    # rows of text have the labels of their packing; a source with images makes its own
    guarded = partial(GuardedLoader, check=check_labels, key=_SOURCES)
    kind = guarded if isinstance(config.model, VLMModelConfig) else Loader

    table = f"{_SOURCES}.{names[0]}" if len(names) == 1 else _SOURCES
    with config_errors(), data_errors(table, InvalidData):
        loader = kind(
            open_training(data, config.data_seed),
            division.global_batch,
            layout.coordinates(rank)["batch"],
            division.readers,
            data.num_workers,
            micro_batch=division.size,
            num_micro_batches=division.count,
            prefetch=data.prefetch,
            worker_timeout_seconds=data.worker_timeout_seconds,
            worker_restarts=data.worker_restarts,
            accept_change=data.accept_change,
        )

        refuse(filter(None, [course.end_problem(loader.stream, steps, _SOURCES)]))
        refuse(_batch_problems(config, model, loader.filler(0), layout, "[data]"))
    _require_labels(config, _SOURCES, loader.stream, course.rows_of(steps))
    streams = open_held_out(config, model, layout)
    refuse(_model_problems(config, model, loader.stream, streams))
    return loader, streams


def open_held_out(config: JobConfig, model: nn.Module, layout: Layout) -> dict[str, Stream]:
    """The rows that a run evaluates, by the keys of their tables, in an order that does not depend on its seed."""
    streams = {}
    for key, table in held_out(config).items():
        with config_errors(), data_errors(key, InvalidData):
            stream = open_stream(table, config.data.seq_len, packing=config.data.packing)
            sample = Loader(stream, 1).filler(0)
        refuse(_batch_problems(config, model, sample, layout, f"[{key}]"))
        own = config.eval.sets.get(key.rpartition(".")[2]) if key != _VALIDATION else None
        rows = (own.sequences if own else None) or config.eval.sequences
        _require_labels(config, key, stream, rows)
        streams[key] = stream
    return streams


def held_out(config: JobConfig) -> dict[str, SourceConfig]:
    """The sources that a run evaluates, by the keys of their tables; none where it never evaluates."""
    if config.eval.every_steps == 0:
        return {}
    found = {} if config.data.validation is None else {_VALIDATION: config.data.validation}
    return found | {f"eval.sets.{name}": own.as_source() for name, own in config.eval.sets.items()}


def sources_by_key(config: JobConfig) -> dict[str, SourceConfig]:
    """The sources that a run trains on and evaluates, by the keys of their tables."""
    trained = {f"{_SOURCES}.{name}": source for name, source in config.data.sources.items()}
    return {**trained, **held_out(config)}


def tokenize(config: JobConfig) -> None:
    """Tokenize what the run reads and is not in a cache yet: long before ranks wait for one another.

    DataError with all problems, also of sources that have no rows of data.seq_len or of the length of a phase.
    """
    lengths, usual = {s.seq_len for s in Course(config).segments}, {config.data.seq_len}
    tables = {
        key: (source, lengths if key.startswith(_SOURCES) else usual)
        for key, source in sources_by_key(config).items()
    }
    with data_errors("", InvalidData):
        tokenize_sources(tables, {_VALIDATION: "set eval.every_steps = 0"})


def _require_labels(config: JobConfig, key: str, stream: Stream, rows: int) -> None:
    """Raise DataError if none of the first rows has a label; an objective counts for itself."""
    problem = None if config.train.objective else label_problem(key, stream, rows)
    if problem is not None:
        raise DataError([problem])


def _batch_problems(
    config: JobConfig, model: nn.Module, batch: Batch, layout: Layout, data: str
) -> list[Problem]:
    """Why the model cannot take the extras and the positions of batches of `data`."""
    problems: list[Any] = extra_problems(model, batch, layout, data)
    section = config.model
    if (
        batch.positions.dim() == 3
        and isinstance(section, BuiltInModelConfig)
        and section.mrope is None
    ):
        rule = f"must be set: sequences of {data} have positions of three axes, and the model one"
        fix = "set model.positions = 'mrope' and [model.mrope], or have the source give one"
        problems.append(Problem("model.mrope", "missing", ..., rule, fix))
    return problems


def _model_problems(
    config: JobConfig, model: nn.Module, stream: Stream, held_out: Mapping[str, Stream]
) -> list[Problem]:
    """Problems of streams whose sources depend on the model (`model_problems(model, where)`), or on the batch (`group`)."""
    names, found = list(config.data.sources), dict[str, Problem]()
    streams = [(f"{_SOURCES}.{n}.options", s) for n, s in streams_by_source(stream, names)]
    for where, each in [*streams, *((f"{key}.options", own) for key, own in held_out.items())]:
        check = getattr(each, "model_problems", None)
        problems = [*(check(model, where) if check else ())]
        if where.startswith(_SOURCES):
            problems += group_problems(each, where, config.train.global_batch, len(names))
        found |= {str(problem): problem for problem in problems}
    return list(found.values())


def run_tokenizer(config: JobConfig) -> Tokenizer:
    """The tokenizer of the training data, that of its first source; ValueError when it has none.

    A text also ends with the end tokens of answers of other sources with the same tokenizer, and with those of the
    folder that the weights are from.
    """
    tokenizer = training_tokenizer(config.data.sources.values())
    ends = ends_of_weights(tokenizer.spec(), config.init, Path(config.run.dir))
    tokenizer.end_ids = tuple(dict.fromkeys((*tokenizer.end_ids, *ends)))
    return tokenizer
