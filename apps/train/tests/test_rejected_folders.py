"""What imports, exports, reports and harnesses reject, without a run and without a model of other packages."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forge_core.lora import LoRAConfig
from forge_parallel import ParallelConfig
from forge_resilience.sinks import WandbSink
from forge_testing.problems import ANY, assert_problem, rejects
from forge_train import ConfigError, JobError, plan
from forge_train.config.lora import LoRASection
from forge_train.config.schema import BuiltInModelConfig
from forge_train.hf import (
    adapters,
    check_inputs,
    compare,
    exporting,
    families,
    folder,
    importing,
)
from forge_train.trainer.run_directory import RunDirectory

pytestmark = pytest.mark.lane("test")

TINY: dict[str, Any] = {
    "vocab_size": 8,
    "dim": 8,
    "num_layers": 1,
    "num_heads": 2,
    "max_seq_len": 8,
}


def write(path: Path, table: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))
    return path


def test_adapters_that_cannot_leave_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: Any = SimpleNamespace(layers=["a", "b"])
    with rejects("--adapter", ["a", "b"], "fused"):
        adapters.peft_files(tensors, [], LoRASection(rank=2).adapters, None, str)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def saved(path: Path) -> Any:
        yield SimpleNamespace(read_object=lambda name: {"digest": "one"}, digest="other")

    monkeypatch.setattr(adapters, "SavedTensors", saved)
    with rejects("", "runs/a/base", "base"):
        adapters.MergedTensors(tmp_path, Path("runs/a/base"), 1.0)
    run = RunDirectory(tmp_path)
    with rejects("--adapter", ..., "whole", ConfigError, where="['norm.*']"):
        exporting._refuse_adapter(LoRASection(rank=2, whole=("norm.*",)), check=False)
    with rejects("--check", ..., "excludes", ConfigError):
        exporting._refuse_adapter(None, check=True)
    with rejects("--adapter", ..., "requires", ConfigError):
        exporting._export_adapter(run, tmp_path, tmp_path, None, None, None, torch.float32, {})  # type: ignore[arg-type]
    monkeypatch.setattr(families, "VLMModelConfig", SimpleNamespace)
    with rejects("--family", "chameleon", "adapter"):
        families.modules_of(SimpleNamespace(), "chameleon")  # type: ignore[arg-type]


def test_F210_an_adapter_names_the_revision_of_its_base() -> None:
    """`adapter_config.json` named a folder of the hub's cache, which another machine does not have."""
    tensors: Any = SimpleNamespace(layers=["q"])
    commit = "0123456789abcdef" * 2 + "01234567"
    cached = f"/home/a/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/{commit}"
    for base, name, revision in (
        (cached, "Qwen/Qwen3-0.6B", commit),
        ("/data/Qwen3-0.6B", "/data/Qwen3-0.6B", None),
        (None, None, None),
    ):
        files, _ = adapters.peft_files(tensors, [("q.weight", "q.weight", ())], LoRAConfig(rank=2), base, str)  # fmt: skip
        settings = json.loads(files["adapter_config.json"])
        assert (settings["base_model_name_or_path"], settings["revision"]) == (name, revision)


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

    @contextlib.contextmanager
    def store(path: Path, read_only: bool) -> Any:
        yield SimpleNamespace(steps=lambda: [2, 4])

    monkeypatch.setattr(exporting, "Store", store)
    write(step / "manifest.json", {})
    with rejects("--step", 3, "unknown", ConfigError, where="[2, 4]"):
        exporting._find(tmp_path, 3)
    run = RunDirectory(tmp_path)
    with rejects("source", str(tmp_path), "model", ConfigError):
        exporting._sections(run)
    run.config.write_text('[model]\nname = "forge_testing.models:bigram"\n')
    with rejects("model.name", "forge_testing.models:bigram", "unsupported", ConfigError):
        exporting._sections(run)
    run.config.write_text("[model]\nvocab_size = 8\ndim = 0\n")
    with rejects("model.dim", 0, "range", ConfigError, where=run.config):
        exporting._sections(run)
    with rejects("--family", "chameleon", "requires"):
        exporting._rows_beside(run, ["a.*"], "chameleon")


def test_models_that_no_family_holds() -> None:
    section = BuiltInModelConfig(**TINY)
    assert families.find_family(section, None) == "llama"
    with rejects("--family", "nope", "unknown"):
        families.find_family(section, "nope")
    with rejects("model.moe.num_experts", 0, "family", where="mixtral"):
        families.find_family(section, "mixtral")
    with rejects("model.moe.num_experts", 0, "family", where="mixtral"):
        families.section_to_hf(section, "mixtral")
    with rejects("model", ..., "no_family") as caught:
        families.find_family(
            BuiltInModelConfig(**TINY, mixer="forge_testing.parts:RunningMean"), None
        )
    assert len({p.origin for p in caught.value.problems[1:]}) == 1
    images: Any = SimpleNamespace(moe=SimpleNamespace(num_experts=4))
    _, (problem,) = families._write_vlm(images, images, "llava")
    error = exporting.ConfigError([problem])
    assert_problem(error, "model.moe.num_experts", 4, "images")
    layers: Any = SimpleNamespace(num_layers=6)
    with rejects("mlp_only_layers", [0, 2, 3], "pattern"):
        families._moe_section(layers, (0, 2, 3), layers)


def test_folders_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = write(tmp_path / "forge.json", {"format": 2})
    with rejects("", ..., "version", where=sidecar):
        folder._sidecar(sidecar)
    monkeypatch.setattr(folder, "_MAX_BYTES", 1)
    large = write(tmp_path / "config.json", {})
    with rejects("", ..., "size", ConfigError, where=large):
        folder.files_in(tmp_path, ["*.json"])

    def full(*_: Any) -> None:
        raise OSError(28, "full")

    tensors: Any = SimpleNamespace(problems=lambda state: [], meta={})
    model = SimpleNamespace(
        section=SimpleNamespace(vocab_size=9),
        family="llama",
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
    section = BuiltInModelConfig(**TINY)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with rejects("--check", ..., "requires", ConfigError):
        compare.compare(section, [], tmp_path)

    class Theirs:
        config = SimpleNamespace(model_type="llama")

        def eval(self) -> Theirs:
            return self

        def __call__(self, tokens: torch.Tensor) -> Any:
            return SimpleNamespace(logits=torch.full((*tokens.shape, 8), 1e6))

    def load(path: Path, dtype: Any) -> Theirs:
        if path != tmp_path:
            raise OSError("no config.json")
        return Theirs()

    fake: Any = ModuleType("transformers")
    fake.utils = SimpleNamespace(logging=SimpleNamespace(disable_progress_bar=lambda: None))
    fake.AutoModelForCausalLM = SimpleNamespace(from_pretrained=load)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with rejects("--check", "none", "unsupported", ConfigError):
        compare.compare(section, [], Path("none"))
    with rejects("difference", ANY, "range", JobError, where=tmp_path):
        compare.compare(section, [], tmp_path)
    images = torch.zeros(1, 3, 2, 2)
    vision = type(
        "Vision",
        (),
        {"extra_inputs": ("images",), "dummy": lambda self, device: {"images": images}},
    )
    vision.__call__ = lambda self, images: images  # type: ignore[assignment]
    model: Any = SimpleNamespace(vision=vision(), adapter=lambda features: torch.zeros(1, 8, 4))
    monkeypatch.setattr(check_inputs, "VLMModelConfig", SimpleNamespace)
    places = {"image": SimpleNamespace(first_id=0)}
    short: Any = SimpleNamespace(placeholders=places, vocab_size=8, max_seq_len=8)
    with rejects("--check", ..., "length", ConfigError):
        check_inputs.inputs_of(model, short, Theirs())


def test_F137_an_import_compares_unless_it_cannot_or_shall_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check` was an option that had to be known."""
    tensors: Any = SimpleNamespace(problems=lambda state: [], meta={}, ignored=[])
    section = BuiltInModelConfig(**TINY)
    model = SimpleNamespace(
        section=section, family="llama", tensors=lambda: tensors, files=dict, write=lambda *_: None
    )
    model.untied = False
    monkeypatch.setattr(importing, "read_model", lambda *_: model)
    monkeypatch.setattr(importing, "store_hf", lambda *_, **__: None)
    compared: list[Path] = []
    monkeypatch.setattr(importing, "compare", lambda *given: compared.append(given[2]))

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
        plan._machine(job, plan.PlanFlags(gpus=0))
    with rejects("--nodes", 3, "divides", ConfigError):
        plan._machine(job, plan.PlanFlags(gpus=8, nodes=3))
    with rejects("--gpu", "h999", "unknown", ConfigError):
        plan._machine(job, plan.PlanFlags(gpus=8, gpu="h999"))


def test_a_tracker_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = ModuleType("wandb")
    wandb.login = lambda prompt: False
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "online")
    with rejects("mode", "online", "requires"):
        WandbSink(tmp_path, 0)
