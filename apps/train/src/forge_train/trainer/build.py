"""From a resolved job to the parts of a run: model, optimizer, data. Nothing here knows of steps."""

from __future__ import annotations

import hashlib
import math
import random

import numpy
import torch
from torch import nn

from forge_core import Transformer, flops_per_token, parameter_count
from forge_core.model import check_init_tables
from forge_data import (
    Loader,
    SourceConfig,
    Stream,
    Tokenizer,
    load_tokenizer,
    open_source,
    open_stream,
)
from forge_parallel.micro_batches import MicroBatches
from forge_resilience import Agreement
from forge_train.config.names import model_builder
from forge_train.config.schema import DenseModelConfig, JobConfig, ModelSection
from forge_train.errors import ConfigError, as_config_error
from forge_train.trainer.mixtures import feed_forward_factory


def build_model(section: ModelSection, seed: int) -> nn.Module:
    """The model: ours on the meta device (shapes only), an imported one as its builder makes it.

    Somebody else's buffers and initial values exist only where their code computed them, so it runs
    for real, on the CPU, after the generators of torch, Python and numpy were seeded alike on all ranks.
    """
    if isinstance(section, DenseModelConfig):
        return as_config_error(lambda: _build_transformer(section))
    build = model_builder(section)
    seed_process(seed, 0)
    model = build()
    if not isinstance(model, nn.Module):
        raise ConfigError([f"model.name {section.name!r} built a {type(model).__name__}, which must "
                           "be a torch.nn.Module; return the model"])  # fmt: skip
    return model


def _build_transformer(section: DenseModelConfig) -> nn.Module:
    """Parts of somebody else must say how their parameters begin and what they cost."""
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
    """ConfigError on all ranks unless each built the same values; sharding would mix them silently.

    Ours cannot differ; somebody else's builder may read a file or a generator of its own.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    told = agreement.exchange(digest.hexdigest())
    strangers = [rank for rank, other in enumerate(told) if other != told[0]]
    if strangers:
        raise ConfigError(
            [f"model.name: ranks {strangers} built other values than rank 0; a builder must give every "
             "rank the same: draw from torch, random or numpy, which are seeded alike before it runs"]
        )  # fmt: skip


def total_steps(config: JobConfig, model: nn.Module | None) -> int:
    """Length of the run in optimizer steps; a length in tokens is rounded up. The model is asked for
    its size where the length is a multiple of that."""
    if config.train.steps is not None:
        return config.train.steps
    tokens = config.train.tokens
    if tokens is None:
        assert model is not None
        tokens = math.ceil((config.train.tokens_per_parameter or 0) * parameter_count(model))
    return max(1, math.ceil(tokens / (config.train.global_batch * config.data.seq_len)))


def build_loader(config: JobConfig, reader: int, division: MicroBatches) -> Loader:
    """Shuffled batches of the training source: the micro-batches of one reader."""
    (source,) = config.data.sources.values()
    stream = open_stream(source, config.data.seq_len, seed=config.run.seed)
    return Loader(
        stream,
        division.global_batch,
        reader,
        division.readers,
        config.data.num_workers,
        micro_batch=division.size,
        num_micro_batches=division.count,
    )


def validation_stream(config: JobConfig) -> Stream | None:
    """Validation rows in an order that does not depend on the run's seed."""
    if config.data.validation is None or config.eval.every_steps == 0:
        return None
    return open_stream(config.data.validation, config.data.seq_len)


def run_tokenizer(config: JobConfig) -> Tokenizer:
    """The tokenizer of the training data; ValueError when it has none."""
    (source,) = config.data.sources.values()
    return tokenizer_of(source)


def tokenizer_of(source: SourceConfig) -> Tokenizer:
    spec = open_source(source).tokenizer
    if spec is None:
        raise ValueError(f"source {source.path!r} has no tokenizer; prepare it with forge-data")
    return load_tokenizer(spec)
