"""The jobs of the layouts campaign hold every option that a device decides on, and are legal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from tests.null_gpu.jobs import JOBS, write_data

from forge_core.loss import LOSSES
from forge_core.model.block import BLOCKS, MIXERS
from forge_core.model.norm import NORMS
from forge_core.optim import OPTIMIZERS
from forge_train import load_job
from forge_train.build.layout import layout_problems
from forge_train.build.resolve import ResolvedJob
from forge_train.config.model import BUILT_IN_MODELS
from forge_train.config.structure import dotted_fields, section_types
from forge_vlm.adapters.config import NAMES as ADAPTERS
from forge_vlm.config import FUSIONS
from forge_vlm.vision.config import NAMES as ENCODERS

#: Sections whose options change what a device does.
SECTIONS = (
    "parallel",
    "model",
    "lora",
    "train",
    "optimizer",
    "checkpoint",
    "metrics",
    "profile",
    "resilience",
    "health",
)
#: Choices that no job makes, and why.
LEFT_OUT = {
    ("parallel.device", "auto"): "the same device, found instead of named",
    ("parallel.device", "cpu"): "no CUDA",
    ("parallel.async_tp", "True"): "needs memory that GPUs read from one another",
    ("parallel.sdpa", "cudnn"): "cuDNN plans attention with the device at hand, and there is none",
    ("resilience.watch.action", "off"): "of the launcher's process, which uses no device",
    ("resilience.watch.action", "restart"): "of the launcher's process, which uses no device",
    ("metrics.console", "auto"): "text on the host",
    ("metrics.console", "live"): "text on the host",
    ("metrics.console", "off"): "text on the host",
    ("metrics.tensorboard", "True"): "numbers on the host",
    ("metrics.flat_names", "True"): "names on the host",
}  # fmt: skip
#: Keys whose values are names in a registry, with those that Forge has.
REGISTRIES = {
    "optimizer.name": OPTIMIZERS.built_in,
    "model.norm": NORMS.built_in,
    "model.mixer": MIXERS.built_in,
    "model.block": BLOCKS.built_in,
    "train.loss": LOSSES.built_in,
    "model.adapter.name": ADAPTERS,
    "model.fusion.name": FUSIONS,
    "model.vision.name": ENCODERS,
    "model.moe.router": ("softmax_topk", "sigmoid_topk", "expert_choice"),
    "data.packing.name": ("concatenate", "first_fit", "best_fit"),
}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ResolvedJob]:
    """Every job as the runner reads it."""
    folder = tmp_path_factory.mktemp("jobs")
    write_data(folder)
    found = {}
    with contextlib.chdir(folder):
        for number, (name, job) in enumerate(JOBS.items()):
            path = folder / f"{number}.toml"
            path.write_text(job.toml())
            found[name] = load_job(path)
    return found


@pytest.mark.slow
def test_every_job_fits_its_ranks(resolved: dict[str, ResolvedJob]) -> None:
    for name, job in resolved.items():
        problems = layout_problems(job.config, JOBS[name].ranks)
        # schedules that need a newer torch are refused by name
        newer = [p for p in problems if (p.key, p.code) == ("parallel.pp_schedule", "requires")]
        assert problems == newer, name
    assert {job.ranks for job in JOBS.values()} == {1, 2, 4, 8}


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_every_choice_occurs_in_a_job(resolved: dict[str, ResolvedJob]) -> None:
    made = {(key, str(value)) for job in resolved.values() for key, value in job.values().items()}
    wanted = {(key, str(choice)) for key, choices in _choices() for choice in choices}
    wanted |= {(key, name) for key, names in REGISTRIES.items() for name in names}
    assert sorted(wanted - made - set(LEFT_OUT)) == []
    assert sorted(set(LEFT_OUT) - (wanted - made)) == []  # an exclusion that is none


def _choices() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Keys with named choices, and switches."""
    for section, table in section_types({}).items():
        if section not in SECTIONS:
            continue
        for model in BUILT_IN_MODELS.values() if section == "model" else [table]:
            for key, kind, *_ in dotted_fields(model, section):
                kinds = [kind, *get_args(kind)]
                literal = [k for k in kinds if get_origin(k) is Literal]
                if "<name>" not in key and (literal or kind is bool):
                    yield key, get_args(literal[0]) if literal else (True, False)
