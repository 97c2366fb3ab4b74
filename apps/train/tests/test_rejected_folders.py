"""What imports, exports, reports and harnesses reject, without a run and without a model of other packages."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forge_ckpt.hf import compare, hf_families
from forge_moe.model_section import MoESection
from forge_parallel import ParallelConfig
from forge_resilience.sinks import WandbSink
from forge_testing.problems import rejects
from forge_train import ConfigError, JobError, plan
from forge_train.build import hf_models
from forge_train.build.run_directory import RunDirectory
from forge_train.config.model import BuiltInModelConfig, LoRASection, VLMModelConfig
from forge_train.hf import exporting, importing
from forge_vlm import ModalityConfig

pytestmark = pytest.mark.lane("test")

TINY: Any = {"vocab_size": 8, "dim": 8, "num_layers": 1, "num_heads": 2, "max_seq_len": 8}


def write(path: Path, table: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))
    return path


def test_adapters_that_cannot_leave_a_run(tmp_path: Path) -> None:
    def run(**lora: Any) -> Any:
        return exporting._Run(RunDirectory(tmp_path), BuiltInModelConfig(**TINY), None, LoRASection(**lora))  # fmt: skip

    with rejects("--adapter", ..., "whole", ConfigError, where="['norm.*']"):
        exporting._require_adapters(run(rank=2, whole=("norm.*",)), check=False)
    with rejects("--check", ..., "excludes", ConfigError):
        exporting._require_adapters(run(rank=2), check=True)
    with rejects("--adapter", ..., "requires", ConfigError):
        exporting._require_adapters(run(), check=False)


def test_checkpoints_that_cannot_be_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "checkpoints/step-00000002"
    with rejects("--step", 2, "excludes", ConfigError):
        exporting._find(step, 2)
    with rejects("source", str(step), "damaged", ConfigError):
        exporting._find(step, None)
    with rejects("source", str(tmp_path), "not_found", ConfigError):
        exporting._find(tmp_path, None)

    for number in (2, 4):
        write(tmp_path / f"checkpoints/step-{number:08d}/manifest.json", {})
    with rejects("--step", 3, "unknown", ConfigError, where="[2, 4]"):
        exporting._find(tmp_path, 3)
    run = RunDirectory(tmp_path)
    with rejects("source", str(tmp_path), "model", ConfigError):
        exporting._read_run(run)
    run.config.write_text('[model]\nname = "forge_testing.models:bigram"\n')
    with rejects("model.name", "forge_testing.models:bigram", "unsupported", ConfigError):
        exporting._read_run(run)
    run.config.write_text("[model]\nvocab_size = 8\ndim = 0\n")
    with rejects("model.dim", 0, "range", ConfigError, where=run.config):
        exporting._read_run(run)
    given = exporting._Run(run, BuiltInModelConfig(**TINY), None, LoRASection())
    with rejects("--family", "chameleon", "requires"):
        exporting._model(given, hf_families()["chameleon"], {}, "fp32", None)


def test_models_that_no_family_holds() -> None:
    section = BuiltInModelConfig(**TINY)
    assert hf_models.family_of(section, None).name == "llama"
    with rejects("--family", "nope", "unknown"):
        hf_models.family_of(section, "nope")
    with rejects("model.moe.num_experts", 0, "family", where="mixtral"):
        hf_models.family_of(section, "mixtral")
    with rejects("model", ..., "no_family") as caught:
        other = BuiltInModelConfig(**TINY, mixer="forge_testing.extensions:RunningMean")
        hf_models.family_of(other, None)
    assert len({p.origin for p in caught.value.problems[1:]}) == 1
    places = {"image": ModalityConfig(first_id=3)}
    images = VLMModelConfig(**TINY, modalities=places, moe=MoESection(num_experts=4))
    with rejects("model.moe.num_experts", 4, "images"):
        hf_models.family_of(images, "llava")


def test_folders_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = write(tmp_path / "forge.json", {"format": 2})
    with rejects("", ..., "version", where=sidecar):
        hf_models._sidecar(sidecar)

    def full(*_: Any) -> None:
        raise OSError(28, "full")

    tensors: Any = SimpleNamespace(problems=lambda state: [], meta={})
    model = SimpleNamespace(
        section=SimpleNamespace(vocab_size=9),
        family=SimpleNamespace(name="llama"),
        tensors=lambda: tensors,
        files=dict,
        write=full,
    )
    monkeypatch.setattr(importing, "read_model", lambda *_: model)
    monkeypatch.setattr(importing, "build_model", lambda section, seed: nn.Module())
    monkeypatch.setattr(importing, "store_hf", lambda *_, **__: None)
    with rejects("run.dir", str(tmp_path / "run"), "write", JobError):
        importing.import_folder(tmp_path, tmp_path / "run", check=False)
    (tmp_path / "run/config.toml").touch()
    with rejects("run.dir", str(tmp_path / "run"), "exists", ConfigError):
        importing.import_folder(tmp_path, tmp_path / "run", check=False)


def test_copies_that_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = SimpleNamespace(section=BuiltInModelConfig(**TINY), path=tmp_path)
    monkeypatch.setattr(importing, "compare_logits", lambda *given: (math.nan, "nan"))
    with rejects("difference", math.nan, "range", JobError, where=tmp_path):
        importing.check_logits(nn.Module(), found)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with rejects("--check", ..., "requires", ConfigError):
        importing.check_logits(nn.Module(), found)


def test_F137_an_import_compares_unless_it_cannot_or_shall_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check` was an option that had to be known."""
    meta = {"weight": torch.empty(1000, device="meta")}
    tensors: Any = SimpleNamespace(problems=lambda state: [], meta=meta, ignored=[])
    section = BuiltInModelConfig(**TINY)
    model = SimpleNamespace(
        section=section,
        family=SimpleNamespace(name="llama"),
        tensors=lambda: tensors,
        files=dict,
        write=lambda *_: None,
    )
    model.untied = False
    monkeypatch.setattr(importing, "read_model", lambda *_: model)
    monkeypatch.setattr(importing, "store_hf", lambda *_, **__: None)
    compared: list[Path] = []
    monkeypatch.setattr(importing, "check_folder", compared.append)

    importing.import_folder(tmp_path, tmp_path / "a")
    importing.import_folder(tmp_path, tmp_path / "b", check=False)
    assert compared == [tmp_path]
    monkeypatch.setattr(compare, "_free_memory", lambda: 1e3)
    importing.import_folder(tmp_path, tmp_path / "c")
    assert "0.0 GB" in capsys.readouterr().out  # free
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    importing.import_folder(tmp_path, tmp_path / "d")
    assert "transformers" in capsys.readouterr().out
    assert compared == [tmp_path]


def test_machines_that_cannot_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    job: Any = SimpleNamespace(parallel=ParallelConfig(), train=SimpleNamespace(micro_batch=1))
    candidate = SimpleNamespace(config=job.parallel)
    large = SimpleNamespace(candidate=candidate, fits=False, peak=9e9, to_dict=dict)
    space = SimpleNamespace(hardware=SimpleNamespace(limit=8e9, name="h100"))
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_estimated", lambda config, flags: (large, space, []))
        patch.setattr(plan.planner, "search", lambda space: [])
        patch.setattr(plan, "replace", lambda space, **__: space)
        patch.setattr(plan, "_what_fits", lambda *_: "more GPUs")
        patch.setattr(plan.planner, "describe", lambda candidate: "dp_shard 8")
        with rejects("parallel", "dp_shard 8", "memory", ConfigError, where="9 GB"):
            plan.show_plan(job, plan.PlanFlags(gpus=8, json=True))
    with rejects("--gpus", 0, "range", ConfigError):
        plan._estimated(job, plan.PlanFlags(gpus=0))
    with rejects("--nodes", 3, "divides", ConfigError):
        plan._estimated(job, plan.PlanFlags(gpus=8, nodes=3))
    with rejects("--gpu", "h999", "unknown", ConfigError):
        plan._estimated(job, plan.PlanFlags(gpus=8, gpu="h999"))


def test_a_tracker_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = ModuleType("wandb")
    wandb.login = lambda prompt: False
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "online")
    with rejects("mode", "online", "requires"):
        WandbSink(tmp_path, 0)
