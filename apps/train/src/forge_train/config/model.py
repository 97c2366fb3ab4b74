"""[model] and [lora]: the built-in transformer with its mixtures of experts, with images, and models from outside."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from forge_core import TransformerConfig
from forge_core.lora import LoRAConfig
from forge_core.registry import Registry, installed
from forge_moe.model_section import MoESection
from forge_train._shared.fields import Checked, field
from forge_train._shared.problems import Problem, invalid, problems_of, raise_problems
from forge_train.errors import ConfigError, config_errors
from forge_vlm import VLMConfig

MODELS_GROUP = "forge.models"
MODELS = Registry("model.name", MODELS_GROUP, (), {})


@dataclass(frozen=True)
class BuiltInModelConfig(TransformerConfig):
    """The built-in transformer, dense or with mixtures of experts, as the [model] table of a job."""

    name: str = "transformer"
    """'transformer', 'vlm' (with images), an entry point of forge.models, or an import path 'my_lab.model:build'"""
    moe: MoESection = field(MoESection)
    """which feed-forwards are mixtures of experts"""

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_problems("", _mixture_problems(self))

    @property
    def is_built_in(self) -> bool:
        """True: its initial values are a function of the seed, and a user's parts in it declare theirs."""
        return True

    @property
    def moe_layers(self) -> list[int]:
        """Layers whose feed-forward is a mixture."""
        return [i for i in range(self.num_layers) if self.moe.is_mixture(i)]


def _mixture_problems(c: BuiltInModelConfig) -> Iterator[Problem]:
    num_experts = c.moe.num_experts
    if not num_experts:
        return
    if not c.moe_layers:
        rule = f"needs a layer: first_dense_layers {c.moe.first_dense_layers} leaves none of {c.num_layers}"
        yield Problem("moe.num_experts", "layers", num_experts, rule, "lower first_dense_layers")
    if c.mtp.num_modules:
        rule = f"must be 0 with moe.num_experts {num_experts}: its blocks are dense"
        yield Problem("mtp.num_modules", "excludes", c.mtp.num_modules, rule, "leave one out")
    if c.parametrization == "mup":
        rule = "has no rule in parametrization 'mup', which has rules for dense layers"
        fix = "use 0, or parametrization 'standard'"
        yield Problem("moe.num_experts", "mup", num_experts, rule, fix)


@dataclass(frozen=True)
class VLMModelConfig(VLMConfig, BuiltInModelConfig):
    """All keys of the built-in transformer, mixtures of experts among them, and what images need."""

    name: str = "vlm"
    """'vlm'"""

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_problems("", _vision_problems(self))


def _vision_problems(c: VLMModelConfig) -> Iterator[Problem]:
    if c.moe.num_experts and c.fusion.name != "joint_decoder":
        rule = f"must be 0 with fusion.name {c.fusion.name!r}, whose blocks are its own"
        fix = "use 0, or fusion.name = 'joint_decoder'"
        yield Problem("moe.num_experts", "fusion", c.moe.num_experts, rule, fix)
    if c.parametrization == "mup":
        rule = "has no rule for the learning rates of an encoder and an adapter"
        fix = "use 'standard' with model.name 'vlm'"
        yield Problem("parametrization", "vision", c.parametrization, rule, fix)


#: The [model] tables of our own models, by name.
BUILT_IN_MODELS: dict[str, type[BuiltInModelConfig]] = {
    "transformer": BuiltInModelConfig,
    "vlm": VLMModelConfig,
}


@dataclass(frozen=True)
class ImportedModelConfig(Checked):
    """A model from outside: `build(**args)` returns a module, which is called as
    `model(tokens, positions, document_ids)` on (B, S) integers and returns logits (B, S, V)."""

    name: str = ""
    """import path 'package.module:function' of the model's builder"""
    vocab_size: int = field(0, between=(0, 2**31 - 1))
    """number of token ids the model accepts (default: that of the data)"""
    args: dict[str, Any] = field(dict)
    """keyword arguments of the builder"""

    @property
    def is_built_in(self) -> bool:
        """False: without a table of its own its initial values are those of the builder."""
        return False

    def _problems(self) -> Iterator[Problem]:
        module, _, attr = self.name.partition(":")
        path = all(part.isidentifier() for part in [*module.split("."), attr])
        if not path and not installed(self.name, MODELS_GROUP):
            fix = f"use 'transformer', 'vlm', an entry point of {MODELS_GROUP} or 'package.module:attr'"
            yield Problem("name", "unknown", self.name, "is not a model", fix)


ModelSection = BuiltInModelConfig | ImportedModelConfig


def model_builder(section: ImportedModelConfig) -> Callable[[], Any]:
    """The builder that `model.name` names, with its arguments; ConfigError where it does not take them."""
    with config_errors():
        build = MODELS.find(section.name)

    def call(function: Callable[..., Any]) -> Any:
        try:
            return function(vocab_size=section.vocab_size, **section.args)
        except (TypeError, ValueError) as error:
            rule = f"does not fit {section.name}(vocab_size=..., **args): {error}"
            fix = "give the arguments that this builder takes"
            raise invalid(
                "model.args", "call", section.args, rule, fix, kind=ConfigError
            ) from error

    call(inspect.signature(build).bind)
    return lambda: call(build)


@dataclass(frozen=True)
class LoRASection(Checked):
    """Adapters of linear layers; with any, all other weights are frozen and saved once."""

    rank: int = 0
    """rank of the adapters; 0: none, all weights are trained"""
    alpha: float = field(LoRAConfig.alpha, range="a finite number above 0")
    """an adapter's output is multiplied by alpha / rank"""
    patterns: tuple[str, ...] = LoRAConfig().patterns
    """names of linear layers that get an adapter, as in fnmatch"""
    whole: tuple[str, ...] = ()
    """names of weights that are trained themselves next to the adapters, as in fnmatch: 'adapter.*' of a model with
    images"""
    base_dtype: Literal["bf16", "fp32"] = "bf16"
    """of the frozen weights, in memory and on disk; fp32 keeps what they were, exactly"""

    def _problems(self) -> Iterator[Problem]:
        if self.rank:
            try:
                LoRAConfig(self.patterns, self.rank, self.alpha)
            except ValueError as error:
                yield from problems_of(error)
            return
        for item in fields(self):
            if (value := getattr(self, item.name)) != item.default:
                rule, fix = "belongs to adapters, and rank is 0", "give rank = 8, or remove it"
                yield Problem(item.name, "requires", value, rule, fix)

    @property
    def adapters(self) -> LoRAConfig | None:
        """The configuration of the adapters; None without any."""
        return LoRAConfig(self.patterns, self.rank, self.alpha) if self.rank else None
