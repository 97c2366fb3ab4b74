"""Entrances for code: a job from a TOML file, the model of a finished run, and that of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from forge_ckpt import Store
from forge_ckpt.frozen_base import FrozenBase
from forge_ckpt.stage_state import InDtypes, StageState, tensor_names
from forge_core import initialize
from forge_core.lora import frozen_names, lora, merge
from forge_data import Tokenizer, load_tokenizer
from forge_data.tokenizer_files import folder_ends
from forge_moe import expert_parallelize, recompute_contexts
from forge_moe.hooks import num_experts_by_layer
from forge_parallel import (
    Meshes,
    ParallelConfig,
    config_of_mesh,
    make_meshes,
    parallelize,
    store_parameters,
)
from forge_resilience import Agreement
from forge_train._shared.paths import user_path
from forge_train._shared.problems import invalid
from forge_train.build.begin_tokens import run_layers
from forge_train.build.build import build_model
from forge_train.build.data import run_tokenizer
from forge_train.build.hf_models import HFModel, read_model
from forge_train.build.resolve import ResolvedJob, resolve
from forge_train.build.run_directory import RunDirectory
from forge_train.config.layers import read_layers
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, StateError, config_errors, refuse, run_on_all_ranks
from forge_train.loop.assemble import shard
from forge_train.run.checkpoints import base_problems, store_errors


def load_job(
    path: str | Path, overrides: Mapping[str, Any] | None = None, *, with_data: bool = True
) -> ResolvedJob:
    """The checked job of a TOML file; `overrides` are dotted keys, as flags on the command line.

    With `with_data` False its token files need not exist (for a plan).

    Raises ConfigError or DataError with all problems.
    """
    layers = read_layers(path)
    for key, value in (overrides or {}).items():
        layers.set(key, value, "flag")
    return resolve(layers, with_data=with_data)


def load_trained(
    run_dir: str | Path, device: torch.device | str = "cpu"
) -> tuple[nn.Module, Tokenizer, int]:
    """(model, tokenizer, step) of a run's newest good checkpoint, otherwise as `load_model`."""
    model, config, step = load_model(run_dir, device)
    return model, run_tokenizer(config), step


def load_model(
    run_dir: str | Path,
    device: torch.device | str = "cpu",
    step: int | None = None,
    *,
    parallel: ParallelConfig | None = None,
    meshes: Meshes | None = None,
) -> tuple[nn.Module, JobConfig, int]:
    """(model in eval mode with fp32 weights, configuration, step) of a run's newest good checkpoint, or that of `step`.

        with launch(parallel := ParallelConfig(tp=2, precision="fp32")) as meshes:
            model, config, step = load_model("runs/mine", parallel=parallel, meshes=meshes)

    With `meshes`, those of `parallel`, every rank calls it and reads its own blocks, in any layout whatever the run
    was trained in; `device` is then that of the meshes. Adapters are added to the weights of one process, and stay beside
    them on several ranks. Reads only: a run that is still training is not disturbed.
    Raises ConfigError when `run_dir` is no run, its checkpoints are of another model or the model does not fit
    the layout, StateError when none of them can be used; on all ranks alike.
    """
    paths = RunDirectory(run_dir)
    if meshes is None:
        meshes, parallel = Meshes(torch.device(device)), None
    agreement = Agreement(meshes.host_group, alone=meshes.world_size == 1)
    half = parallel is not None and parallel.precision != "fp32"
    kernels = half or meshes.device.type == "cpu"
    model, config, dtypes = run_on_all_ranks(agreement, lambda: _build(paths, kernels))

    frozen = frozen_names(model) if config.lora.rank else set[str]()
    names = tensor_names(model)
    layout = replace(config, parallel=parallel or ParallelConfig(precision="fp32"))
    model = shard(model, layout, meshes, agreement)
    others = names - tensor_names(model)
    state: dict[str, Any] = {"model": StageState(InDtypes(model, dtypes), others)}
    base = None
    if frozen:
        base = FrozenBase(paths.base, model, frozen, names, meshes.host_group)
        state = base.objects()

    with (
        store_errors(paths.checkpoints, StateError),
        Store(paths.checkpoints, read_only=True, group=meshes.host_group) as store,
    ):
        steps = store.steps()
        if step is not None and step not in steps:
            rule = f"is not one of {steps}, the checkpoints of {run_dir}"
            raise invalid("step", "unknown", step, rule, "name one of them", kind=StateError)
        loaded = store.load(state, newest=step)

    if step is not None and loaded != step:
        rule, fix = f"has a damaged checkpoint in {run_dir}", f"name another of {steps}"
        raise invalid("step", "damaged", step, rule, fix, kind=StateError)
    if loaded is None:
        rule, fix = "holds no checkpoint", f"train first: forge-train run {paths.config}"
        raise invalid("run_dir", "empty", str(paths.checkpoints), rule, fix, kind=StateError)
    if base is not None:
        with store_errors(paths.base, StateError):
            base.load()
        if meshes.world_size == 1:
            merge(model)
    return model.eval(), config, loaded


def _build(
    paths: RunDirectory, kernels: bool
) -> tuple[nn.Module, JobConfig, dict[str, torch.dtype]]:
    """The whole model of a run, before its weights, its configuration, and dtypes of checkpoints that are not fp32.

    Without `kernels` its experts multiply by what there is: GPUs have grouped_mm and float8 in 16 bits alone.
    """
    paths.require_run()
    layers = run_layers(paths)
    layers.set("run.dir", str(paths.path), "flag")  # it may have been moved
    config = resolve(layers).config
    section: Any = config.model
    if not kernels and getattr(section, "moe", None) is not None:
        section = replace(section, moe=replace(section.moe, backend="auto"))
    model = build_model(section, config.init_seed)
    store_parameters(model, config.parallel.param_dtype)
    named = model.named_parameters(remove_duplicate=False)
    dtypes = {n: p.dtype for n, p in named if p.dtype == torch.bfloat16}
    if config.lora.adapters is not None:
        lora(model, config.lora.adapters, None, config.lora.whole)
    refuse(base_problems(config, paths))
    return model, config, dtypes


def from_pretrained(
    folder: str | Path,
    mesh: Any = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    parallel: ParallelConfig | None = None,
) -> nn.Module:
    """Return the model of a Hugging Face folder, in eval mode: any family that Forge has, mixtures of experts too.

        model = from_pretrained("Qwen3-30B-A3B", device="cuda", dtype=torch.bfloat16)
        model = from_pretrained("Qwen3-30B-A3B", mesh, parallel=ParallelConfig(ep=8))

    mesh: a `torch.distributed.DeviceMesh` with named dims (`forge_parallel.config_of_mesh`): the model is sharded as
    `parallelize` does, and each rank keeps its shards of the tensors that it reads. Collective.
    device, dtype: of one process, fp32 by default; in bf16 a module with a compute dtype of its own, such as a router,
    keeps that. With a mesh its own device, and the same dtype for compute.
    parallel: further options with a mesh, in place of dtype: ep, precision and param_dtype, recompute, compile.

    Raises ConfigError for a family or an option that Forge does not have, and for tensors that do not fit.
    """
    names: dict[torch.dtype | None, Literal["fp32", "bf16"]]
    names = {None: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16"}
    if dtype not in names:
        rule, fix = "must be torch.float32 or torch.bfloat16", "convert the model afterwards"
        raise invalid("dtype", "unsupported", dtype, rule, fix, kind=ConfigError)
    for key, given, wrong in (
        ("parallel", parallel, mesh is None),
        ("device", device, mesh is not None),
        ("dtype", dtype, parallel is not None),
    ):
        if given is not None and wrong:
            rule = "needs a mesh" if mesh is None else "is that of the mesh, or of parallel"
            raise invalid(key, "excludes", ..., rule, "leave it out", kind=ConfigError)

    found = read_model(user_path(folder))
    if mesh is None:
        return found.build(torch.get_default_device() if device is None else device, names[dtype])
    own = ParallelConfig(precision=names[dtype], param_dtype=names[dtype])
    with config_errors():
        return _load_sharded(found, mesh, config_of_mesh(mesh, parallel or own))


def _load_sharded(found: HFModel, mesh: Any, config: ParallelConfig) -> nn.Module:
    """The model of a folder over the ranks of a mesh. Collective."""
    if config.pp > 1:
        rule, fix = "must be 1, as a stage has a part of the tensors", "start a run from the folder"
        raise invalid("pp", "unsupported", config.pp, rule, fix, kind=ConfigError)
    meshes = make_meshes(config, mesh=mesh)
    model = build_model(found.section, 0)
    records = bool(num_experts_by_layer(model))
    if config.ep > 1:
        expert_parallelize(model, meshes.sparse["ep"])
    contexts = recompute_contexts if records else None
    model = parallelize(model, config, meshes, recompute_contexts=contexts)
    initialize(model, 0)  # buffers that the folder need not hold
    found.load(model)
    return model.eval()


def load_folder(
    folder: str | Path, device: torch.device | str = "cpu"
) -> tuple[nn.Module, Tokenizer]:
    """(model in eval mode with fp32 weights, tokenizer) of a folder as transformers' `save_pretrained` writes it.

    Raises ConfigError for a family or an option that Forge does not have, tensors that do not fit, and a folder
    without tokenizer.json.
    """
    found = read_model(user_path(folder))
    path = found.path / "tokenizer.json"
    if not path.is_file():
        rule, fix = f"has no {path.name}, which makes text of ids", "put the model's own there"
        raise invalid("folder", "tokenizer", str(folder), rule, fix, kind=ConfigError)
    model = found.build(device)
    with config_errors():
        tokenizer = load_tokenizer(str(path))
        ends = folder_ends(found.path)
    if ends:
        tokenizer.eos_id, tokenizer.end_ids = ends[0], ends
    return model, tokenizer
