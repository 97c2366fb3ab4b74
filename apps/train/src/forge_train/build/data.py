"""The data of a job: its loader, what it evaluates, its tokenizer, and whether they fit model and run."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    load_tokenizer,
    open_header,
    open_source,
    open_stream,
    open_training,
)
from forge_data.chat.template import ChatTemplate
from forge_data.kinds import CACHED
from forge_data.label_checks import GuardedLoader, has_label
from forge_data.mixed_stream import MixedStream
from forge_data.phased_stream import parts_of
from forge_data.places import num_shards_of
from forge_parallel.compute import extra_problems
from forge_parallel.config import Layout
from forge_train._shared.problems import Problem, invalid, raise_problems
from forge_train.build.build import Course, total_steps
from forge_train.build.layout import micro_batches
from forge_train.config.evaluation import VALIDATION
from forge_train.config.schema import BuiltInModelConfig, JobConfig
from forge_train.config.tokenizer import ends_of_weights
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import DataError, config_errors, problems_under, refuse
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
    names, data = list(config.data.sources), config.data
    # rows of text have the labels of their packing; a source with images makes its own
    guarded = partial(GuardedLoader, check=check_labels, key=_SOURCES)
    kind = guarded if isinstance(config.model, VLMModelConfig) else Loader

    with _data_errors(f"{_SOURCES}.{names[0]}" if len(names) == 1 else _SOURCES):
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

        refuse(_end_problems(config, loader.stream, steps))
        refuse(_batch_problems(config, model, loader.filler(0), layout, "[data]"))
    _refuse_without_labels(config, _SOURCES, loader.stream, Course(config).rows_of(steps))
    streams = open_held_out(config, model, layout)
    refuse(_model_problems(config, model, loader.stream, streams))
    return loader, streams


def open_held_out(config: JobConfig, model: nn.Module, layout: Layout) -> dict[str, Stream]:
    """The rows that a run evaluates, by the keys of their tables, in an order that does not depend on its seed."""
    streams = {}
    for key, table in held_out(config).items():
        with _data_errors(key):
            stream = open_stream(table, config.data.seq_len, packing=config.data.packing)
            sample = Loader(stream, 1).filler(0)
        refuse(_batch_problems(config, model, sample, layout, f"[{key}]"))
        own = config.eval.sets.get(key.rpartition(".")[2]) if key != _VALIDATION else None
        rows = (own.sequences if own else None) or config.eval.sequences
        _refuse_without_labels(config, key, stream, rows)
        streams[key] = stream
    return streams


def held_out(config: JobConfig) -> dict[str, SourceConfig]:
    """The sources that a run evaluates, by the keys of their tables; none where it never evaluates."""
    if config.eval.every_steps == 0:
        return {}
    found = {} if config.data.validation is None else {_VALIDATION: config.data.validation}
    keys = [f.name for f in dataclasses.fields(SourceConfig)]  # not when and how much is read
    for name, own in config.eval.sets.items():
        found[f"eval.sets.{name}"] = SourceConfig(**{key: getattr(own, key) for key in keys})
    return found


def tokenize(config: JobConfig) -> None:
    """Tokenize what the run reads and is not in a cache yet: long before ranks wait for one another.

    DataError with all problems, also of sources that have no rows of data.seq_len or of the length of a phase.
    """
    tables = {f"{_SOURCES}.{name}": source for name, source in config.data.sources.items()}
    cached = {k: t for k, t in {**tables, **held_out(config)}.items() if t.name in CACHED}
    for check in (_missing, _unfit):  # all is looked at before the first is tokenized for hours
        problems = [p for key, table in cached.items() for p in check(key, table, config)]
        raise_problems("", problems, DataError)


def _missing(key: str, table: SourceConfig, config: JobConfig) -> Iterator[Problem]:
    """What a source lacks, as far as can be seen without reading its text."""
    try:
        open_header(table, check=True)
    except (ValueError, OSError) as error:
        also = "; or set eval.every_steps = 0" if key == _VALIDATION else ""
        for problem in problems_under(error, key):
            fix = f"{problem.fix}{also}".removeprefix("; ")
            yield dataclasses.replace(problem, fix=fix)


def _unfit(key: str, table: SourceConfig, config: JobConfig) -> Iterator[Problem]:
    """What is wrong with a source's text, or with its rows."""
    try:
        check = getattr(open_source(table), "row_problems", lambda length: ())
    except (ValueError, OSError) as error:
        yield from problems_under(error, key)
        return
    lengths = {config.data.seq_len}
    if key.startswith(_SOURCES):
        lengths = {segment.seq_len for segment in Course(config).segments}
    for length in sorted(lengths):
        yield from (problem.under(key) for problem in check(length))


@contextmanager
def _data_errors(key: str) -> Iterator[None]:
    """`config_errors`, and what is wrong with the data of `key` as a DataError."""
    with config_errors():
        try:
            yield
        except InvalidData as error:
            raise DataError(problems_under(error, key)) from error


def _refuse_without_labels(config: JobConfig, key: str, stream: Stream, rows: int) -> None:
    """Raise DataError if none of the first rows has a label: the loss would be a mean over nothing.

    Streams that are read from front to back are left to the run, and an objective counts for itself.
    """
    if config.train.objective is not None or num_shards_of(stream):
        return
    rows = min(rows, len(stream))
    if rows and not has_label(stream, rows):
        rule = "must have a label: all would be padding, masked or of weight 0"
        fix = "train on answers that fit into data.seq_len, with weights above 0"
        raise invalid(key, "no_labels", f"{rows} sequences", rule, fix, kind=DataError)


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
    streams: list[tuple[str, Any]] = []
    for part in parts_of(stream):
        own = part.stream.streams if isinstance(part.stream, MixedStream) else (part.stream,)
        streams += [(f"{_SOURCES}.{n}.options", s) for n, s in zip(config.data.sources, own)]
    streams += [(f"{key}.options", own) for key, own in held_out.items()]
    found: dict[str, Problem] = {}
    for where, each in streams:
        check = getattr(each, "model_problems", None)
        problems = [*(check(model, where) if check else ())]
        if where.startswith(_SOURCES):
            problems += _group_problems(config, each, where)
        found |= {str(problem): problem for problem in problems}
    return list(found.values())


def _group_problems(config: JobConfig, stream: Stream, where: str) -> Iterator[Problem]:
    """Of a stream whose batches are drawn together (`group`): they must be the batches of the run."""
    group, batch = getattr(stream, "group", None), config.train.global_batch
    if group is not None and len(config.data.sources) > 1:
        rule = f"draws batches of one source, and there are {len(config.data.sources)}"
        yield Problem(f"{where}.group", "sources", group, rule, "remove it")
    elif group not in (None, batch):
        rule = f"must be train.global_batch {batch}"
        yield Problem(f"{where}.group", "mismatch", group, rule, f"use {batch}")


def _end_problems(config: JobConfig, stream: Stream, steps: int) -> list[Problem]:
    """Why a stream that ends is too short for so many steps."""
    end, course = getattr(stream, "end", None), Course(config)
    if end is None or course.rows_of(steps) <= end:
        return []
    last = bisect_right(range(1, steps + 1), end, key=course.rows_of)  # full steps before the end
    rule = (
        f"with max_epochs end after {end} sequences, in step {last + 1}, and the run has {steps} steps with "
        f"{course.rows_of(steps)} sequences"
    )
    fix = "raise one or leave one out" + (f", or train {last} steps" if last else "")
    return [Problem(_SOURCES, "length", ..., rule, fix)]


def run_tokenizer(config: JobConfig) -> Tokenizer:
    """The tokenizer of the training data, that of its first source; ValueError when it has none.

    A text also ends with the end tokens of answers of other sources with the same tokenizer, and with those of the
    folder that the weights are from.
    """
    first, *others = config.data.sources.values()
    tokenizer = tokenizer_of(first)
    ends = [tokenizer.end_ids, ends_of_weights(tokenizer.spec(), config.init, Path(config.run.dir))]
    for source in others:
        if source.name == "chat":
            other = load_tokenizer(ChatTemplate(source.chat).spec())
            ends += [other.end_ids] if other.fingerprint == tokenizer.fingerprint else []
    tokenizer.end_ids = tuple(dict.fromkeys(end for found in ends for end in found))
    return tokenizer


def tokenizer_of(source: SourceConfig) -> Tokenizer:
    """The tokenizer that made the tokens of a source. Raises ValueError for one without a tokenizer."""
    spec = open_header(source).tokenizer
    if spec is None:
        rule, fix = "has no tokenizer", "prepare it with forge-data"
        raise invalid("source", "tokenizer", source.path, rule, fix)
    return load_tokenizer(spec)
