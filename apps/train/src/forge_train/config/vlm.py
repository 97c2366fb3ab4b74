"""[model] of name "vlm": the built-in transformer with an encoder of images, an adapter and a fusion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from forge_train.config.exact_match import KINDS
from forge_train.config.schema import BuiltInModelConfig, JobConfig
from forge_vlm import VLMConfig


@dataclass(frozen=True)
class VLMModelConfig(VLMConfig, BuiltInModelConfig):
    """All keys of the built-in transformer, mixtures of experts among them, and what images need."""

    name: str = field(default="vlm", metadata={"help": "'vlm'"})

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = list(_problems(self))
        if problems:
            raise ValueError("\n".join(problems))


def _problems(c: VLMModelConfig) -> Iterator[str]:
    if c.moe.num_experts and c.fusion.name != "joint_decoder":
        yield (
            f"moe.num_experts {c.moe.num_experts} must be 0 with fusion.name {c.fusion.name!r}, whose blocks "
            "are its own; use 0, or fusion.name = 'joint_decoder'"
        )
    if c.parametrization == "mup":
        yield (
            "parametrization 'mup' has no rule for the rates of an encoder and an adapter; use 'standard' with "
            "model.name 'vlm'"
        )


def chosen_by_experts(model: object) -> bool:
    """Whether experts choose their tokens among those of a whole row, which is for training alone."""
    fusion = model.fusion if isinstance(model, VLMModelConfig) else None
    return fusion is not None and fusion.name == "moma" and fusion.moma.router == "expert_choice"


def exact_match_problems(config: JobConfig) -> Iterator[str]:
    """Why a job cannot answer questions with pictures at its evaluations; nothing where it asks none."""
    asked, key = config.eval.exact_match, "eval.exact_match"
    if asked.path is None:
        return
    if not isinstance(config.model, VLMModelConfig):
        yield (
            f"{key}.path asks about pictures, and model.name is {config.model.name!r}; use 'vlm', or remove the table"
        )
    if config.eval.every_steps == 0:
        yield f"{key}.path is given but eval.every_steps 0 never asks; set eval.every_steps = 100, or remove the table"
    known = [name for name, source in config.data.sources.items() if source.name in KINDS]
    if asked.source is not None and asked.source not in known:
        yield (
            f"{key}.source {asked.source!r} must be one of [data.sources] with name 'vlm', which are "
            f"{', '.join(known) or 'none'}; correct it"
        )
    elif not known:
        yield (
            f"{key}.path needs a source of name 'vlm', whose template and resolution prompts have; give one in "
            "[data.sources]"
        )
