"""[model] of name "vlm": the built-in transformer with an encoder of images, an adapter and a fusion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from forge_train._shared.problems import Problem, raise_problems
from forge_train.config.exact_match import KINDS
from forge_train.config.schema import BuiltInModelConfig, JobConfig
from forge_vlm import VLMConfig


@dataclass(frozen=True)
class VLMModelConfig(VLMConfig, BuiltInModelConfig):
    """All keys of the built-in transformer, mixtures of experts among them, and what images need."""

    name: str = field(default="vlm", metadata={"help": "'vlm'"})

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_problems("", _problems(self))


def _problems(c: VLMModelConfig) -> Iterator[Problem]:
    if c.moe.num_experts and c.fusion.name != "joint_decoder":
        rule = f"must be 0 with fusion.name {c.fusion.name!r}, whose blocks are its own"
        fix = "use 0, or fusion.name = 'joint_decoder'"
        yield Problem("moe.num_experts", "fusion", c.moe.num_experts, rule, fix)
    if c.parametrization == "mup":
        rule = "has no rule for the learning rates of an encoder and an adapter"
        fix = "use 'standard' with model.name 'vlm'"
        yield Problem("parametrization", "vision", c.parametrization, rule, fix)


def chosen_by_experts(model: object) -> bool:
    """Whether experts choose their tokens among those of a whole row, which is for training alone."""
    fusion = model.fusion if isinstance(model, VLMModelConfig) else None
    return fusion is not None and fusion.name == "moma" and fusion.moma.router == "expert_choice"


def exact_match_problems(config: JobConfig) -> Iterator[Problem]:
    """Why a job cannot answer questions with pictures at its evaluations; nothing where it asks none."""
    asked, path = config.eval.exact_match, "eval.exact_match.path"
    if asked.path is None:
        return
    remove = "or remove the table"
    if not isinstance(config.model, VLMModelConfig):
        rule = f"names questions about images, and model.name is {config.model.name!r}"
        yield Problem(path, "model", asked.path, rule, f"use 'vlm', {remove}")
    if config.eval.every_steps == 0:
        rule, fix = "is given but eval.every_steps 0 never reads it", "set eval.every_steps = 100"
        yield Problem(path, "never_read", asked.path, rule, f"{fix}, {remove}")
    known = [name for name, source in config.data.sources.items() if source.name in KINDS]
    if asked.source is not None and asked.source not in known:
        rule = (
            f"must be one of [data.sources] with name 'vlm', which are {', '.join(known) or 'none'}"
        )
        yield Problem("eval.exact_match.source", "unknown", asked.source, rule, "correct it")
    elif not known:
        rule = "needs a source of name 'vlm', whose template and resolution prompts have"
        yield Problem(path, "requires", asked.path, rule, "give one in [data.sources]")
