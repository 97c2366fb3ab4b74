"""From a resolved job to the parts of a run: model, optimizer, data. Nothing here knows of steps."""

from __future__ import annotations

import inspect
import math

import torch
from torch import nn

from forge_core import Transformer, parameter_count
from forge_data import Loader, PackedStream, SourceConfig, Tokenizer, load_tokenizer, open_source
from forge_train.config.schema import DenseModelConfig, JobConfig, ModelSection
from forge_train.errors import ConfigError
from forge_train.trainer.callbacks import import_attribute


def build_model(section: ModelSection, seed: int) -> nn.Module:
    """The model: ours on the meta device (shapes only), an imported one as its builder makes it.

    Somebody else's buffers and initial values exist only where their code computed them, so it runs
    for real, on the CPU, after `torch.manual_seed(seed)`.
    """
    if isinstance(section, DenseModelConfig):
        with torch.device("meta"):
            return Transformer(section)
    build = import_attribute(section.name, "model.name")
    try:
        inspect.signature(build).bind(vocab_size=section.vocab_size, **section.args)
        torch.manual_seed(seed)
        model = build(vocab_size=section.vocab_size, **section.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            [f"model.args {section.args}: {section.name}(vocab_size=..., **args): {error}; "
             "give the arguments that this builder takes"]
        ) from error  # fmt: skip
    if not isinstance(model, nn.Module):
        raise ConfigError([f"model.name {section.name!r} built a {type(model).__name__}, which must "
                           "be a torch.nn.Module; return the model"])  # fmt: skip
    return model


def total_steps(config: JobConfig, model: nn.Module) -> int:
    """Length of the run in optimizer steps; a length in tokens is rounded up."""
    if config.train.steps is not None:
        return config.train.steps
    tokens = config.train.tokens
    if tokens is None:
        tokens = math.ceil((config.train.tokens_per_parameter or 0) * parameter_count(model))
    return max(1, math.ceil(tokens / (config.train.global_batch * config.data.seq_len)))


def build_loader(config: JobConfig) -> Loader:
    """Shuffled batches of the training source."""
    (source,) = config.data.sources.values()
    stream = PackedStream(open_source(source), config.data.seq_len, seed=config.run.seed)
    return Loader(stream, config.train.global_batch, num_workers=config.data.num_workers)


def validation_stream(config: JobConfig) -> PackedStream | None:
    """Validation rows in an order that does not depend on the run's seed."""
    if config.data.validation is None or config.eval.every_steps == 0:
        return None
    return PackedStream(open_source(config.data.validation), config.data.seq_len, seed=0)


def run_tokenizer(config: JobConfig) -> Tokenizer:
    """The tokenizer of the training data; ValueError when it has none."""
    (source,) = config.data.sources.values()
    return tokenizer_of(source)


def tokenizer_of(source: SourceConfig) -> Tokenizer:
    spec = open_source(source).tokenizer
    if spec is None:
        raise ValueError(f"source {source.path!r} has no tokenizer; prepare it with forge-data")
    return load_tokenizer(spec)
