"""From a resolved job to the parts of a run on one process: model, length, data."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import torch
from torch import nn

from forge_core import Transformer, build_schedule, parameter_count
from forge_core.model import check_init_tables
from forge_core.optim import (
    check_parameters,
    check_something_trains,
    freeze_never_trained,
    stage_problems,
)
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
from forge_parallel.compute import extra_problems
from forge_parallel.config import Layout
from forge_parallel.micro_batches import MicroBatches
from forge_resilience import Agreement
from forge_train._shared.problems import Problem, invalid
from forge_train.config.evaluation import VALIDATION
from forge_train.config.model_builder import model_builder
from forge_train.config.schema import BuiltInModelConfig, JobConfig, ModelSection
from forge_train.config.tokenizer import ends_of_weights
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import ConfigError, DataError, config_errors, problems_under, refuse
from forge_train.trainer.adapters import add_adapters
from forge_train.trainer.course import Course
from forge_train.trainer.experts import feed_forward_factory, group_expert_factory
from forge_train.trainer.fitting_data import (
    GuardedLoader,
    fitting_problems,
    refuse_without_labels,
)
from forge_train.trainer.layout import micro_batches
from forge_vlm import VLM

_VALIDATION = f"data.{VALIDATION}"


def build_model(section: ModelSection, seed: int) -> nn.Module:
    """The model: ours on the meta device (shapes only), an imported one as its builder makes it.

    Buffers and initial values of an imported model exist only where its code computes them, so it runs
    for real, on the CPU, after the generators of torch, Python and numpy were seeded alike on all ranks.
    """
    if isinstance(section, BuiltInModelConfig):
        with config_errors():
            return _build_transformer(section)
    build = model_builder(section)
    seed_process(seed, 0)
    model = build()
    if not isinstance(model, nn.Module):
        rule = f"must build a torch.nn.Module, and built a {type(model).__name__}"
        raise invalid(
            "model.name", "type", section.name, rule, "return the model", kind=ConfigError
        )
    return model


def build_trained(config: JobConfig) -> nn.Module:
    """The model that a job trains: that of `build_model`, frozen and with adapters where [lora] asks for them."""
    model = build_model(config.model, config.init_seed)
    add_adapters(model, config)
    return model


def _build_transformer(section: BuiltInModelConfig) -> nn.Module:
    """On the meta device. Checks that a user's parts declare initial values."""
    feed_forward = feed_forward_factory(section)
    with torch.device("meta"):
        if isinstance(section, VLMModelConfig):
            model: Transformer = VLM(
                section, feed_forward=feed_forward, experts=group_expert_factory(section)
            )
        else:
            model = Transformer(section, feed_forward=feed_forward)
    check_init_tables(model)
    return model


def seed_process(seed: int, rank: int) -> None:
    """Begin this process's random streams, torch's, Python's and numpy's: a function of (seed, rank)."""
    digest = hashlib.sha256(f"{seed}:{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    random.seed(digest)
    numpy.random.seed(numpy.frombuffer(digest, numpy.uint32))


def refuse_other_model(model: nn.Module, agreement: Agreement) -> None:
    """Raise ConfigError on all ranks unless each built the same values: sharding would mix them silently.

    For imported models: their builder may read a file or a generator of its own, which ours never does.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    digests = agreement.exchange(digest.hexdigest())
    mismatched = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if mismatched:
        rule = (
            f"must build the same values on every rank, and ranks {mismatched} differ from rank 0"
        )
        fix = "draw from torch, random or numpy, which are seeded alike before it runs"
        raise invalid("model.name", "mismatch", ..., rule, fix, kind=ConfigError)


def total_steps(config: JobConfig, model: nn.Module | None) -> int:
    """Length of the run in optimizer steps; a length in tokens is rounded up. `model` may be None unless the
    length is a multiple of its parameters."""
    tokens = total_tokens(config, model)
    if tokens is None:
        assert config.train.steps is not None
        return config.train.steps
    return Course(config).steps_of(tokens)


def total_tokens(config: JobConfig, model: nn.Module | None) -> int | None:
    """Length of the run in tokens; None where it is given in steps."""
    if config.train.steps is not None or config.train.tokens is not None:
        return config.train.tokens
    assert model is not None
    return math.ceil((config.train.tokens_per_parameter or 0) * parameter_count(model))


def run_schedule(config: JobConfig, total_steps: int) -> Callable[[int], float]:
    """The schedule of the learning rate, of what `Course.scheduled` counts. ValueError for one that does not fit."""
    return build_schedule(config.schedule, Course(config).scheduled_steps(total_steps))


def freeze_groups(model: nn.Module, config: JobConfig) -> None:
    """Check optimizer, groups and stages on the whole model, and freeze the groups that the run never trains.

    ConfigError for what does not fit."""
    with config_errors():
        check_parameters(model, config.optimizer)
    if not config.optimizer.groups:
        return
    stages = config.train.stages
    refuse(stage_problems(config.optimizer, stages, total_steps(config, model)))
    with config_errors():
        check_something_trains(model, config.optimizer, stages)
    freeze_never_trained(model, config.optimizer, stages)


def open_data(
    config: JobConfig, model: nn.Module, layout: Layout, rank: int
) -> tuple[Loader, dict[str, Stream]]:
    """The loader of this rank's micro-batches, and held-out rows by name: [data.validation] as "validation", [eval.sets].

    ConfigError where they lack extras that the model takes, DataError for what is damaged.
    """
    division = micro_batches(config, layout)
    tokenize(config)
    key = f"data.sources.{next(iter(config.data.sources))}"
    with _data_errors(key if len(config.data.sources) == 1 else "data.sources"):
        loader = _loader(config, layout.coordinates(rank)["batch"], division)
        refuse(_end_problems(config, loader.stream, total_steps(config, model)))
        refuse(extra_problems(model, loader.filler(0), layout, "[data]"))
        refuse(_axes_problems(config, loader.filler(0), "[data]"))
    rows = Course(config).rows_of(total_steps(config, model))
    refuse_without_labels(config, "data.sources", loader.stream, rows)
    streams = open_held_out(config, model, layout)
    refuse(fitting_problems(config, model, loader.stream, streams))
    return loader, streams


def open_held_out(config: JobConfig, model: nn.Module, layout: Layout) -> dict[str, Stream]:
    """The rows that a run evaluates, by the keys of their tables, in an order that does not depend on its seed."""
    streams = {}
    for key, table in held_out(config).items():
        with _data_errors(key):
            stream = open_stream(table, config.data.seq_len, packing=config.data.packing)
            sample = Loader(stream, 1).filler(0)
        refuse(extra_problems(model, sample, layout, f"[{key}]"))
        refuse(_axes_problems(config, sample, f"[{key}]"))
        own = config.eval.sets.get(key.rpartition(".")[2]) if key != _VALIDATION else None
        rows = (own.sequences if own else None) or config.eval.sequences
        refuse_without_labels(config, key, stream, rows)
        streams[key] = stream
    return streams


def held_out(config: JobConfig) -> dict[str, SourceConfig]:
    """The sources that a run evaluates, by the keys of their tables; none where it never evaluates."""
    if config.eval.every_steps == 0:
        return {}
    tables = {_VALIDATION: config.data.validation, **_sets(config)}
    return {key: table for key, table in tables.items() if table is not None}


def _sets(config: JobConfig) -> dict[str, SourceConfig]:
    """[eval.sets] as sources alone, without the keys that say when they are read."""
    keys = [f.name for f in dataclasses.fields(SourceConfig)]
    return {
        f"eval.sets.{name}": SourceConfig(**{key: getattr(own, key) for key in keys})
        for name, own in config.eval.sets.items()
    }


def _axes_problems(config: JobConfig, batch: Batch, data: str) -> list[Problem]:
    """Of rows whose positions have three axes and a model whose have one; text has one in any model."""
    if batch.positions.dim() == 2 or not isinstance(config.model, BuiltInModelConfig):
        return []
    if config.model.mrope is not None:
        return []
    rule = f"must be set: sequences of {data} have positions of three axes, and the model one"
    fix = "set model.positions = 'mrope' and [model.mrope], or have the source give one"
    return [Problem("model.mrope", "missing", ..., rule, fix)]


@contextmanager
def _data_errors(key: str) -> Iterator[None]:
    """`config_errors`, and what is wrong with the data of `key` as a DataError."""
    with config_errors():
        try:
            yield
        except InvalidData as error:
            raise DataError(problems_under(error, key)) from error


def tokenize(config: JobConfig) -> None:
    """Tokenize what the run reads and is not in a cache yet: long before ranks wait for one another. DataError with all
    problems, also of sources that have no rows of data.seq_len or that of a phase."""
    tables: dict[str, SourceConfig] = {
        f"data.sources.{name}": s for name, s in config.data.sources.items()
    }
    tables |= held_out(config)
    tables = {key: table for key, table in tables.items() if table.name in CACHED}
    for ask in (_missing, _unfit):  # all is looked at before the first is tokenized for hours
        problems = [p for key, table in tables.items() for p in ask(key, table, config)]
        if problems:
            raise DataError(problems)


def _missing(key: str, table: SourceConfig, config: JobConfig) -> Iterator[Problem]:
    """What a source lacks, as far as can be seen without reading its text."""
    try:
        open_header(table, check=True)
    except (ValueError, OSError) as error:
        also = "; or set eval.every_steps = 0" if key == _VALIDATION else ""
        yield from (
            dataclasses.replace(p, fix=f"{p.fix}{also}".removeprefix("; "))
            for p in problems_under(error, key)
        )


def _unfit(key: str, table: SourceConfig, config: JobConfig) -> Iterator[Problem]:
    """What is wrong with a source's text, or with its rows."""
    try:
        ask = getattr(open_source(table), "row_problems", None)
    except (ValueError, OSError) as error:
        yield from problems_under(error, key)
        return
    if ask is None:
        return
    training = {segment.seq_len for segment in Course(config).segments}
    for length in sorted(training) if key.startswith("data.sources.") else [config.data.seq_len]:
        yield from (problem.under(key) for problem in ask(length))


def _end_problems(config: JobConfig, stream: Stream, steps: int) -> list[Problem]:
    """Why a stream that ends is too short for so many steps."""
    end, course = getattr(stream, "end", None), Course(config)
    if end is None or course.rows_of(steps) <= end:
        return []
    last = bisect_right(range(1, steps + 1), end, key=course.rows_of)  # whole steps before the end
    rule = (
        f"with max_epochs end after {end} sequences, in step {last + 1}, and the run has {steps} steps with "
        f"{course.rows_of(steps)} sequences"
    )
    fix = "raise one or leave one out" + (f", or train {last} steps" if last else "")
    return [Problem("data.sources", "length", ..., rule, fix)]


def _loader(config: JobConfig, reader: int, division: MicroBatches) -> Loader:
    """Shuffled batches of the training source: the micro-batches of one reader."""
    stream = open_training(config.data, config.data_seed)
    kind = GuardedLoader if isinstance(config.model, VLMModelConfig) else Loader
    return kind(
        stream,
        division.global_batch,
        reader,
        division.readers,
        config.data.num_workers,
        micro_batch=division.size,
        num_micro_batches=division.count,
        prefetch=config.data.prefetch,
        worker_timeout_seconds=config.data.worker_timeout_seconds,
        worker_restarts=config.data.worker_restarts,
        accept_change=config.data.accept_change,
    )


def run_tokenizer(config: JobConfig) -> Tokenizer:
    """The tokenizer of the training data, that of its first source; ValueError when it has none.

    What ends answers of other sources with the same tokenizer ends a text, too, and the end tokens of the folder that the
    weights are from.
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
        raise invalid(
            "source", "tokenizer", source.path, "has no tokenizer", "prepare it with forge-data"
        )
    return load_tokenizer(spec)
