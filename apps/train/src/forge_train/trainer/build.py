"""From a resolved job to the parts of a run on one process: model, length, data."""

from __future__ import annotations

import hashlib
import math
import random

import numpy
import torch
from torch import nn

from forge_core import Transformer, flops_per_token, parameter_count
from forge_core.model import check_init_tables
from forge_core.optim import (
    check_parameters,
    check_something_trains,
    freeze_never_trained,
    stage_problems,
)
from forge_data import (
    Loader,
    SourceConfig,
    Stream,
    Tokenizer,
    load_tokenizer,
    open_source,
    open_stream,
    open_training,
)
from forge_parallel.compute import extra_problems
from forge_parallel.config import Layout
from forge_parallel.micro_batches import MicroBatches
from forge_resilience import Agreement
from forge_train.config.model_builder import model_builder
from forge_train.config.schema import BuiltInModelConfig, JobConfig, ModelSection
from forge_train.errors import ConfigError, config_errors, refuse
from forge_train.trainer.adapters import add_adapters
from forge_train.trainer.experts import feed_forward_factory
from forge_train.trainer.layout import micro_batches


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
        raise ConfigError([f"model.name {section.name!r} built a {type(model).__name__}, which must "
                           "be a torch.nn.Module; return the model"])  # fmt: skip
    return model


def build_trained(config: JobConfig) -> nn.Module:
    """The model that a job trains: that of `build_model`, frozen and with adapters where [lora] asks for them."""
    model = build_model(config.model, config.init_seed)
    add_adapters(model, config)
    return model


def _build_transformer(section: BuiltInModelConfig) -> nn.Module:
    """On the meta device. Checks that a user's parts declare initial values and operations."""
    with torch.device("meta"):
        model = Transformer(section, feed_forward=feed_forward_factory(section))
    check_init_tables(model)
    flops_per_token(model, 1)
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
        raise ConfigError(
            [f"model.name: ranks {mismatched} built other values than rank 0; a builder must give every "
             "rank the same: draw from torch, random or numpy, which are seeded alike before it runs"]
        )  # fmt: skip


def total_steps(config: JobConfig, model: nn.Module | None) -> int:
    """Length of the run in optimizer steps; a length in tokens is rounded up. `model` may be None unless the
    length is a multiple of its parameters."""
    if config.train.steps is not None:
        return config.train.steps
    tokens = config.train.tokens
    if tokens is None:
        assert model is not None
        tokens = math.ceil((config.train.tokens_per_parameter or 0) * parameter_count(model))
    return max(1, math.ceil(tokens / (config.train.global_batch * config.data.seq_len)))


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
) -> tuple[Loader, Stream | None]:
    """The loader of this rank's micro-batches, and the validation rows if the run has any.

    ConfigError where they lack extras that the model takes.
    """
    division = micro_batches(config, layout)
    with config_errors():
        loader = _loader(config, layout.coordinates(rank)["batch"], division)
        refuse(_end_problems(config, loader.stream, total_steps(config, model)))
        refuse(extra_problems(model, loader.filler(0), layout, "[data]"))
    stream = _validation_stream(config)
    if stream is not None:
        with config_errors():
            sample = Loader(stream, 1).filler(0)
        refuse(extra_problems(model, sample, layout, "[data.validation]"))
    return loader, stream


def _end_problems(config: JobConfig, stream: Stream, steps: int) -> list[str]:
    """Why a stream that ends is too short for so many steps."""
    end, batch = getattr(stream, "end", None), config.train.global_batch
    if end is None or steps * batch <= end:
        return []
    return [
        f"data.sources: max_epochs end the data after {end} rows, in step {end // batch + 1}, and the run has {steps} steps "
        f"of {batch}; raise one, leave one out, or train {end // batch} steps"
    ]


def _loader(config: JobConfig, reader: int, division: MicroBatches) -> Loader:
    """Shuffled batches of the training source: the micro-batches of one reader."""
    stream = open_training(config.data, config.data_seed)
    return Loader(
        stream,
        division.global_batch,
        reader,
        division.readers,
        config.data.num_workers,
        micro_batch=division.size,
        num_micro_batches=division.count,
    )


def _validation_stream(config: JobConfig) -> Stream | None:
    """Validation rows in an order that does not depend on the run's seed."""
    if config.data.validation is None or config.eval.every_steps == 0:
        return None
    return open_stream(config.data.validation, config.data.seq_len)


def run_tokenizer(config: JobConfig) -> Tokenizer:
    """The tokenizer of the training data, that of its first source; ValueError when it has none."""
    return tokenizer_of(next(iter(config.data.sources.values())))


def tokenizer_of(source: SourceConfig) -> Tokenizer:
    spec = open_source(source).tokenizer
    if spec is None:
        raise ValueError(f"source {source.path!r} has no tokenizer; prepare it with forge-data")
    return load_tokenizer(spec)
