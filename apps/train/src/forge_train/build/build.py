"""The model of a job on one process, and the length of its run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from forge_ckpt.rng import seed_process
from forge_core import Transformer, build_schedule, optim, parameter_count
from forge_core.lora import lora
from forge_core.model import build_feed_forward, check_init_tables
from forge_data.phase_schedule import PhaseSchedule
from forge_data.phases import PhaseSegment
from forge_moe import MoE, MoEConfig, SortedExperts
from forge_train._shared.problems import invalid
from forge_train.config.model import BuiltInModelConfig, ModelSection, VLMModelConfig, model_builder
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, config_errors
from forge_vlm import VLM

#: Feed-forwards whose experts are stacks, which `parallel.ep` shards.
EXPERT_ACTIVATIONS = ("swiglu", "gelu")


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
    """The model that a job trains: that of `build_model`, frozen and with adapters where [lora] is given. ConfigError."""
    model = build_model(config.model, config.init_seed)
    if config.lora.adapters is not None:
        base_dtype = torch.bfloat16 if config.lora.base_dtype == "bf16" else None
        with config_errors():
            lora(model, config.lora.adapters, base_dtype, config.lora.whole)
            optim.check_groups_train(model, config.optimizer.groups)
    return model


def _build_transformer(section: BuiltInModelConfig) -> Transformer:
    """On the meta device. Checks that a user's parts declare initial values."""
    feed_forward = feed_forward_factory(section)
    with torch.device("meta"):
        if isinstance(section, VLMModelConfig):
            experts = _group_expert_factory(section)
            model: Transformer = VLM(section, feed_forward=feed_forward, experts=experts)
        else:
            model = Transformer(section, feed_forward=feed_forward)
    check_init_tables(model)
    return model


def feed_forward_factory(config: BuiltInModelConfig) -> Callable[[int], nn.Module] | None:
    """Makes the feed-forward of each layer, a mixture where [model.moe] asks for one; None for a dense model."""
    if not config.moe.num_experts:
        return None

    def make(layer: int) -> nn.Module:
        if config.moe.is_mixture(layer):
            return MoE(config.moe.layer_config(config.dim, config.resolved_hidden_dim))
        return build_feed_forward(config, layer)

    return make


def _group_expert_factory(config: VLMModelConfig) -> Callable[[str, int], nn.Module] | None:
    """Makes the experts of MoMa's groups; None for other fusions, and for activations that forge_moe does not have."""
    if config.fusion.name != "moma" or config.feed_forward not in EXPERT_ACTIVATIONS:
        return None
    hidden = config.fusion.moma.hidden_dim or config.resolved_hidden_dim

    def make(group: str, num: int) -> nn.Module:
        return SortedExperts(
            MoEConfig(
                dim=config.dim,
                hidden_dim=hidden,
                num_experts=num,
                top_k=1,  # the router is not its own
                normalize="before_top_k",
                activation=config.feed_forward,  # type: ignore[arg-type]
                bias=config.feed_forward_bias,
            )
        )

    return make


class Course(PhaseSchedule):
    """The phases of a job."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        super().__init__(config.data, config.train.global_batch)

    def config_of(self, segment: PhaseSegment) -> JobConfig:
        """The job as it would be if all of it were this segment."""
        data = replace(self._config.data, seq_len=segment.seq_len, phases={})
        train = replace(self._config.train, global_batch=self.batch_of(segment))
        return replace(self._config, data=data, train=train)


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
    length = total_steps(config, model)
    with config_errors():
        optim.freeze_groups(model, config.optimizer, config.train.stages, length)
