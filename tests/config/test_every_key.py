"""No key is parsed and ignored: each is set to another legal value, and what changes is looked at."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch

import forge_data
from forge_core import Transformer, TransformerConfig, flops_per_token
from forge_data.prepare import prepare
from forge_moe import MoE
from forge_moe.grouped_mm import choose_backend
from forge_moe.model_section import MoESection
from forge_parallel import (
    ParallelConfig,
    end_process_group,
    find_world,
    launch,
    make_meshes,
    parallelize,
)
from forge_parallel.pipeline import Pipeline, stages_of
from forge_resilience.console import console_mode
from forge_resilience.heartbeat import HeartbeatRecord
from forge_resilience.slurm import JobFacts, batch_script, orchestrator_command, small_job
from forge_resilience.supervise import Watch, supervise
from forge_testing import run_on_ranks, vlm_jobs, write_job
from forge_testing.chats import CHATML, HEADERS, dialog, save_tokenizer, write_dialogs
from forge_testing.disk import Disk
from forge_testing.models import Counting
from forge_testing.probes import wrong_results
from forge_testing.problems import assert_problem, rejects
from forge_train import Callback, ConfigError, DataError, Extension, Trainer, load_job, read_run
from forge_train.build.build import feed_forward_factory
from forge_train.build.run_directory import RunDirectory
from forge_train.config.evaluation import ChoicesConfig, ExactMatchConfig
from forge_train.config.model import BuiltInModelConfig
from forge_train.errors import HardwareError, JobError, NumericsError
from forge_train.loop.assemble import shard_experts
from forge_train.plan import with_layout
from forge_train.report.describe import key_rows

pytestmark = pytest.mark.lane("test")


class Probe(NamedTuple):
    """`other` is set; `look` must see a difference. `also` holds in both runs."""

    other: Any
    look: Callable[[Trainer], Any]
    also: dict[str, Any] = {}  # noqa: RUF012 - never changed


# ---- ways to look


def shapes(t: Trainer) -> Any:
    return {n: tuple(p.shape) for n, p in t.model.named_parameters()}


def operations(t: Trainer) -> Any:
    return [flops_per_token(t.model, s.seq_len) for s in t.run.course.segments]


def dtypes(t: Trainer) -> Any:
    return {n: p.dtype for n, p in t.model.named_parameters()}


def logits(t: Trainer) -> Any:
    """Output of the freshly initialised model, wide enough for every position to matter."""
    t.prepare()
    for p in t.model.parameters():
        torch.nn.init.uniform_(p, 0.1, 1.0, generator=torch.Generator().manual_seed(p.numel()))
    with torch.no_grad():
        return t.model(torch.arange(200)[None]).double().sum().item()


def seen(t: Trainer) -> Any:
    """The loss of the first batch with images, or why there is none."""
    t.prepare()
    try:
        return float(t.run.compute.losses(next(t.loader)))
    except ValueError as error:
        return str(error)


def initial(t: Trainer) -> Any:
    t.prepare()
    return sum(p.double().abs().sum().item() for p in t.model.parameters())


def of_source(t: Trainer) -> Any:
    """Source of each of the first rows."""
    return [next(t.loader).source.tolist() for _ in range(6)]


def rows(t: Trainer) -> Any:
    return next(t.loader).tokens.tolist()


def read_ahead(t: Trainer) -> Any:
    """The instances are the same, and the kind of what read them."""
    ids = next(t.loader).instance_ids.tolist()
    kind = type(t.loader._ahead).__name__
    t.loader.close()
    return ids, kind


def survives_a_dead_worker(t: Trainer) -> Any:
    """A data worker that is killed, as for lack of memory."""

    class Kill(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.progress.step == 1:
                os.kill(trainer.loader._ahead._workers[0].pid, signal.SIGKILL)

    t = Trainer(t.job, [Kill()])
    try:
        code = t.fit().exit_code
    except JobError as error:
        code = error.exit_code
    return code, [e["cause"] for e in read_run(t.paths.path).events if "data_w" in e["event"]]


def goes_on_with_another_seed(t: Trainer) -> Any:
    state = t.loader.state_dict() | {"fingerprint": {"order.seed": -1}}
    try:
        t.loader.load_state_dict(state)
    except ValueError:
        return "refused"
    return sorted(t.loader.changed)


def trained(t: Trainer) -> Any:
    t.fit()
    return sum(p.double().abs().sum().item() for p in t.model.parameters())


def tags(t: Trainer) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    t.fit()
    return EventAccumulator(str(t.paths.path / "tensorboard")).Reload().Tags()["scalars"]


def files(t: Trainer) -> Any:
    t.fit()
    steps = sorted(f.name for f in t.paths.checkpoints.glob("step-*"))
    return sorted(f.name for f in t.paths.path.iterdir()), steps


def profiled(t: Trainer) -> Any:
    """Files of profiles, and whether they tell of memory."""
    t.fit()
    found = sorted(t.paths.profile.rglob("*.json"))
    return [(f.parent.name, f.name, "memory" in json.loads(f.read_text())) for f in found]


def logged(t: Trainer) -> Any:
    t.fit()
    return read_run(t.paths.path).metrics["step"]


def columns(t: Trainer) -> Any:
    t.fit()
    return list(read_run(t.paths.path).metrics)


def loads(t: Trainer) -> Any:
    """Loads of each expert; their mean is 1."""
    t.fit()
    found = read_run(t.paths.path).metrics.get("moe.0.load")
    return found and [sum(row) for row in found]


def evaluations(t: Trainer) -> Any:
    t.fit()
    events = read_run(t.paths.path).events
    return [(e["step"], round(e["val_loss"], 9)) for e in events if e["event"] == "evaluation"]


def forwards(t: Trainer) -> Any:
    calls: list[tuple[int, ...]] = []
    t.prepare()
    t.model.register_forward_pre_hook(lambda m, args: calls.append(tuple(args[0].shape)))
    t.run.compute.gradients(next(t.loader), lambda: 1.0)
    return calls


def sample(t: Trainer) -> Any:
    from forge_train.report.summary import sample_text

    t.prepare()
    return sample_text(t) if t.paths.create() is None else None


def survives_a_bad_step(t: Trainer) -> Any:
    """One gradient that is not finite."""

    class Poison(Callback):
        def on_start(self, trainer: Trainer) -> None:
            first = next(iter(trainer.model.parameters()))
            first.register_hook(lambda g: g / 0 if trainer.progress.step == 1 else g)

    t = Trainer(t.job, [Poison()])
    try:
        return t.fit().step
    except NumericsError as error:
        return error.exit_code


def survives_a_flipped_bit(t: Trainer) -> Any:
    """Memory that changes after each step, before the next forward."""

    class Flip(Extension):
        def start(self, run: Any) -> None:
            self.run = run

        def before_batch(self, step: int) -> None:
            next(self.run.model.parameters()).detach().view(torch.uint8).view(-1)[0] ^= step > 1

    t = Trainer(t.job, [Flip()])
    try:
        return t.fit().step
    except HardwareError as error:
        return error.exit_code


class Poison(Callback):
    """The gradients of step 7 times `factor`, until the run went back twice."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_start(self, trainer: Trainer) -> None:
        def poison(gradient: torch.Tensor) -> torch.Tensor:
            bad = trainer.progress.step == 6 and trainer.progress.policy.rollbacks < 2
            return gradient * self.factor if bad else gradient

        for parameter in trainer.model.parameters():
            parameter.register_hook(poison)


def answers(t: Trainer) -> Any:
    """What became of a spike of the gradient, with the rates of all steps."""
    return _answers(t, 30.0)


def rollbacks(t: Trainer) -> Any:
    """The same of gradients that are not finite."""
    return _answers(t, float("nan"))


def _answers(t: Trainer, factor: float) -> Any:
    t = Trainer(t.job, [Poison(factor)])
    code = None
    try:
        t.fit()
    except NumericsError as error:
        code = error.exit_code
    found = read_run(t.paths.path)
    kinds = ("skip", "spike", "rollback")
    names = ("event", "step", "to_step", "skipped_instances")
    events = [[e.get(n) for n in names] for e in found.events if e["event"] in kinds]
    return code, events, found.metrics["lr"]


def probed(t: Trainer) -> Any:
    """How often a device that computes wrong is looked at, how, and the end of the run."""
    with wrong_results(lambda: True) as asked:
        try:
            return t.fit().step, asked
        except HardwareError as error:
            return error.exit_code, asked


def alerts_that_failed(t: Trainer) -> Any:
    t.fit()
    failed = [e for e in read_run(t.paths.path).events if e["event"] == "alert_failed"]
    return [(e["of"], e["way"], e["cause"], e["attempts"]) for e in failed]


def layout(options: dict[str, Any]) -> Any:
    """What FSDP2 made of the keys, on one rank of several."""
    config = ParallelConfig(device="cpu", **options)
    with torch.device("meta"):
        model = Transformer(TransformerConfig(vocab_size=8, dim=8, num_layers=1, num_heads=1))
    parallelize(model, config, make_meshes(config))
    (block,) = model.blocks()
    group = block._get_fsdp_state()._fsdp_param_group
    policy = group.fsdp_params[0].mp_policy if torch.__version__ >= "2.15" else group.mp_policy
    return (
        str(model.embedding.weight.placements),
        group._reshard_after_forward,
        type(group.offload_policy).__name__ if hasattr(group, "offload_policy")
        else group.fsdp_params[0].offload_to_cpu,
        str(policy.reduce_dtype),
        str(model.embedding.weight.dtype),
    )  # fmt: skip


FUSED = {"train.loss": "fused_cross_entropy"}
PARTS = "forge_testing.extensions"
COUNTING = "forge_testing.models:Counting"
ROPE = {
    "model.rope_scaling.factor": 4.0,
    "model.rope_scaling.low_freq_factor": 1.0,
    "model.rope_scaling.high_freq_factor": 4.0,
    "model.rope_scaling.original_max_position": 100,
}
YARN = {
    "model.rope_scaling.name": "yarn",
    "model.rope_scaling.factor": 4.0,
    "model.rope_scaling.original_max_position": 100,
}
MSCALE = {**YARN, "model.rope_scaling.mscale_all_dim": 1.0}
YARN_KEYS = {
    "beta_fast": Probe(2.0, logits, {**YARN, "model.rope_scaling.truncate": False}),
    "beta_slow": Probe(0.2, logits, {**YARN, "model.rope_scaling.truncate": False}),
    "mscale": Probe(2.0, logits, {**MSCALE, "model.rope_scaling.mscale": 1.0}),
    "mscale_all_dim": Probe(2.0, logits, {**MSCALE, "model.rope_scaling.mscale": 1.0}),
    "attention_factor": Probe(2.0, logits, YARN),
    "truncate": Probe(False, logits, YARN),
}
LOCAL = {
    "model.num_layers": 2,
    "model.layer_pattern": ["text", "global"],
    "model.layer_types.<name>.window": 3,
}
LATENT = {
    "model.mixer": "mla",
    "model.mla.kv_lora_rank": 8,
    "model.mla.qk_nope_head_dim": 4,
    "model.mla.qk_rope_head_dim": 4,
    "model.mla.v_head_dim": 4,
}
LORA = {"lora.rank": 2}
MIXED = {
    "data.sources.<name>.weight": 1.0,
    "data.sources.more.name": "builtin",
    "data.sources.more.weight": 1.0,
}
ENDING = {
    **MIXED,
    "data.phases.<name>.start_tokens": 64,
    "data.phases.<name>.weights": {"text": 1.0},
}
MUP = {"model.parametrization": "mup"}
WIDTHS = {
    "q_lora_rank": Probe(8, shapes, LATENT),
    "kv_lora_rank": Probe(12, shapes, LATENT),
    "qk_nope_head_dim": Probe(6, shapes, LATENT),
    "qk_rope_head_dim": Probe(6, shapes, LATENT),
    "v_head_dim": Probe(6, shapes, LATENT),
    "rope_interleave": Probe(True, logits, LATENT),
}

MOE = {"model.moe.num_experts": 4, "model.num_layers": 2}
VLM = {
    "model.name": "vlm",
    "model.dim": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.init_std": 0.2,
    "model.vision.vit.image_size": 8,
    "model.vision.vit.patch_size": 4,
    "model.vision.vit.dim": 16,
    "model.vision.vit.num_layers": 1,
    "model.vision.vit.num_heads": 2,
    "model.modalities.image.first_id": 2,
    "data.sources.<name>.name": "forge_testing.squares:Squares",
    "data.seq_len": 8,
    "eval.every_steps": 0,
    "sample.max_new_tokens": 0,
}
FLAT = {
    **{k: v for k, v in VLM.items() if ".vit." not in k},
    "model.vision.name": "forge_testing.squares:FlatEncoder",
}
CLIP = {
    **FLAT,
    "model.vision.name": "transformers",
    "model.vision.transformers": vlm_jobs.CLIP,
    "model.vision.select_feature": "patch",
}
AXES = {
    **VLM,
    "data.sources.<name>.options": {"axes": 3},
    "model.dim": 32,
    "model.positions": "mrope",
    "model.mrope.sections": [4, 2, 2],
}
TOWERS = {**VLM, "model.fusion.name": "mixture_of_transformers"}
DRAWN = {"model.modalities.<name>.first_id": 1, "model.modalities.<name>.discrete": True}
VIDEO = {"model.modalities.video.first_id": 9}
MOMA = {**VLM, "model.fusion.name": "moma"}
CHOOSING = {**MOMA, "model.fusion.moma.router": "expert_choice"}
SHUFFLE = {**VLM, "model.adapter.name": "pixel_shuffle", "model.vision.vit.patch_size": 2}
CROSS = {**VLM, "model.num_layers": 2, "model.fusion.name": "cross_attention"}
ADAPTERS = {"resampler": {"model.adapter.resampler.num_latents": 4}}
VISION = "forge_testing.squares"
SIGHT = {
    "model.vision.name": Probe(
        "forge_testing.squares:FlatEncoder", shapes, {**FLAT, "model.vision.name": "vit"}
    ),
    **{
        f"model.vision.vit.{key}": Probe(other, shapes, VLM)
        for key, other in (
            ("image_size", 12),
            ("patch_size", 2),
            ("dim", 8),
            ("num_layers", 2),
            ("hidden_dim", 24),
        )
    },
    "model.vision.vit.num_heads": Probe(4, seen, VLM),
    "model.vision.transformers": Probe({**vlm_jobs.CLIP, "num_hidden_layers": 1}, shapes, CLIP),
    "model.vision.options": Probe({"width": 12}, shapes, FLAT),
    "model.vision.select_layer": Probe([0], seen, VLM),
    "model.vision.select_feature": Probe("cls_patch", seen, CLIP),
    "model.vision.mean": Probe([0.1, 0.5, 0.5], seen, VLM),
    "model.vision.std": Probe([0.1, 0.5, 0.5], seen, VLM),
    "model.adapter.name": Probe("linear", shapes, VLM),
    "model.adapter.mlp.hidden_dim": Probe(24, shapes, VLM),
    "model.adapter.mlp.bias": Probe(False, shapes, VLM),
    "model.adapter.pixel_shuffle.factor": Probe(1, shapes, SHUFFLE),
    "model.adapter.pixel_shuffle.bias": Probe(True, shapes, SHUFFLE),
    **{
        f"model.adapter.{name}.{key}": Probe(
            other, look, {**SHUFFLE, "model.adapter.name": name, **ADAPTERS.get(name, {})}
        )
        for name, key, other, look in (
            ("average_pool", "factor", 1, seen),
            ("average_pool", "bias", False, shapes),
            ("attentional_pool", "factor", 1, seen),
            ("attentional_pool", "num_heads", 2, seen),
            ("pixel_shuffle_mlp", "factor", 1, shapes),
            ("resampler", "num_latents", 8, shapes),
            ("resampler", "num_layers", 1, shapes),
            ("resampler", "num_heads", 2, seen),
            ("resampler", "hidden_dim", 24, shapes),
        )
    },
    **{
        f"model.fusion.cross_attention.{key}": Probe(other, look, CROSS)
        for key, other, look in (
            ("every_n_layers", 1, shapes),
            ("layers", [0], shapes),
            ("qk_norm", True, shapes),
        )
    },
    "model.input_only_ids": Probe(4, shapes, VLM),
    "model.images_per_row": Probe(2, operations, VLM),
    "model.adapter.options": Probe(
        {"factor": 2.0}, seen, {**VLM, "model.adapter.name": f"{VISION}:ScaledAdapter"}
    ),
    "model.fusion.name": Probe("mixture_of_transformers", shapes, VLM),
    "model.fusion.mixture_of_transformers.share": Probe(
        {"video": "image"}, shapes, {**TOWERS, **VIDEO}
    ),
    "model.fusion.moma.router": Probe("auxiliary_router", shapes, MOMA),
    "model.fusion.moma.num_experts": Probe(3, shapes, MOMA),
    "model.fusion.moma.experts": Probe({"image": 2}, shapes, MOMA),
    "model.fusion.moma.hidden_dim": Probe(24, shapes, MOMA),
    "model.fusion.moma.top_k": Probe(3, seen, MOMA),
    "model.fusion.moma.normalize": Probe(False, seen, MOMA),
    "model.fusion.moma.balance_loss": Probe(0.5, trained, MOMA),
    "model.fusion.moma.share": Probe({"video": "image"}, shapes, {**MOMA, **VIDEO}),
    "model.fusion.moma.capacity_factor": Probe(3.0, trained, CHOOSING),
    "model.fusion.moma.scope": Probe("micro_batch", trained, CHOOSING),
    "model.fusion.moma.gumbel_noise": Probe(1.0, trained, CHOOSING),
    "model.fusion.moma.auxiliary_dim": Probe(
        24, shapes, {**MOMA, "model.fusion.moma.router": "auxiliary_router"}
    ),
    "model.modalities.<name>.first_id": Probe(7, seen, {**TOWERS, **DRAWN}),
    "model.modalities.<name>.num_ids": Probe(
        4, seen, {**TOWERS, **DRAWN, "model.modalities.<name>.first_id": 3}
    ),
    "model.modalities.<name>.discrete": Probe(False, seen, {**TOWERS, **DRAWN}),
    "model.mrope.sections": Probe([2, 3, 3], seen, {**AXES, "model.mrope.layout": "chunked"}),
    "model.mrope.layout": Probe("chunked", seen, AXES),
}

GROUPS = {**MOE, "model.moe.num_experts": 8, "model.moe.num_groups": 4, "model.moe.top_groups": 2}
CLAMPED = {**MOE, "model.moe.activation": "clamped_swiglu"}
SHARED = {**MOE, "model.moe.num_shared_experts": 1}
FULL = {**MOE, "model.moe.capacity_factor": 0.6}
LOSS = {**MOE, "model.moe.aux_loss_weight": 0.5}
BIAS = {**MOE, "model.moe.bias_update_rate": 0.1}


WSD = {"schedule.name": "wsd", "schedule.min_lr_ratio": 0.0}
SCHEDULE_FREE = {"optimizer.name": "schedule_free_adamw", "schedule.name": "constant"}
GROUP = {"optimizer.groups.<name>.patterns": ["lm_head.*"]}
STAGE = {
    **GROUP,
    "train.stages.<name>.start_step": 2,
    "train.stages.<name>.lr_multipliers": {"text": 0.5},
}


ALERTS = {
    "resilience.alerts.events": ["done"],
    "resilience.alerts.command": "bash -c 'sleep 60'",
    "resilience.alerts.timeout_seconds": 0.2,
    "resilience.alerts.attempts": 1,
}
KEEP_ONE = {"checkpoint.every_steps": 1, "checkpoint.keep_last": 1}


def saves(t: Trainer) -> Any:
    """Kinds of events of saves, or the refusal."""
    try:
        t.fit()
    except ConfigError as error:
        return str(error)
    return sorted(e["event"] for e in read_run(t.paths.path).events if "save" in e["event"])


def saves_on_a_full_disk(t: Trainer) -> Any:
    """The step at which a run ends whose disk refuses the first two saves."""
    disk = Disk()
    disk.refuses = 2
    try:
        return t.fit().step
    except JobError as error:
        return str(error)
    finally:
        disk.restore()


def digests(t: Trainer) -> Any:
    t.fit()
    (path,) = t.paths.checkpoints.glob("step-*")
    return '"digest":"blake3"' in (path / "manifest.json").read_text()


def routed(t: Trainer) -> Any:
    """Output of the first mixture on tokens that differ, with weights that tell experts apart."""
    t.prepare()
    (layer, *_) = (m for m in t.model.modules() if isinstance(m, MoE))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0.0, 1.0, generator=generator)
        x = torch.randn(64, 16, generator=generator)
        return layer(x).double().square().sum().item()


def hooks(t: Trainer) -> Any:
    t.fit()
    return next(c.calls for c in t.run.extensions if isinstance(c, Counting))


def biases(t: Trainer) -> Any:
    t.fit()
    return {n: b.tolist() for n, b in t.model.named_buffers()}


def products(t: Trainer) -> Any:
    (layer, *_) = (m for m in t.model.modules() if isinstance(m, MoE))
    return choose_backend(layer.config.backend, torch.zeros(4, 16), (16, 48))


FEWER = {"train.steps": 8, "resilience.nonfinite.max_in_a_row": 0, "checkpoint.every_steps": 3}
SPIKES = {
    "train.steps": 8,
    "resilience.spike.action": "skip",
    "resilience.spike.window": 4,
    "resilience.spike.of": "grad_norm",
}


def batch(t: Trainer) -> Any:
    """The batch script, and the options with which it would be run at a terminal."""
    config, facts = (
        t.config.slurm,
        JobFacts("/run", "/run/slurm/job.sh", "/", t.config.resilience.save_limit_seconds),
    )
    return batch_script(config, ["train"], facts)


def orchestrated(t: Trainer) -> Any:
    """The command that orchestrates, and the script of the small job that runs it."""
    facts = JobFacts("/run", "/run/slurm/orchestrator.sh", "/", 1.0, None)
    config = t.config.slurm
    command = orchestrator_command(config, facts.script, [2, 1], "name", "/run/events.jsonl")
    return batch_script(small_job(config), command, facts)


_ELEMENTS = {"slurm.array": "0-3%1"}
#: Each changes the script; what a script does is looked at in tests/slurm and in the package.
SLURM = {
    "nodes": Probe("3-4", batch),
    "tasks_per_node": Probe(2, batch),
    "gpus_per_node": Probe(2, batch),
    "gpus_option": Probe("--gres=gpu:{gpus}", batch, {"slurm.gpus_per_node": 1}),
    "cpus_per_task": Probe(2, batch),
    "memory": Probe("5G", batch),
    "time_limit": Probe("12:00:00", batch),
    "partition": Probe("gpu", batch),
    "account": Probe("lab", batch),
    "qos": Probe("long", batch),
    "job_name": Probe("mine", batch),
    "mail_user": Probe("me@lab.org", batch),
    "mail_type": Probe("END", batch, {"slurm.mail_user": "me@lab.org"}),
    "array": Probe("0-3%1", batch),
    "array_run_dirs": Probe(True, batch, _ELEMENTS),
    "array_arguments": Probe(["--run.seed=%a"], batch, _ELEMENTS),
    "sbatch_options": Probe(["--exclude=n1"], batch),
    "srun_options": Probe(["--cpu-bind=cores"], batch),
    "prologue": Probe(["module load nccl"], batch),
    "environment": Probe({"NCCL_DEBUG": "INFO"}, batch),
    "container": Probe(["env"], batch),
    "cache_dir": Probe("/scratch/cache", batch),
    "on_stop": Probe("resubmit", batch),
    **{
        f"orchestrator.{key}": Probe(value, orchestrated)
        for key, value in {
            "wait_seconds": 60.0,
            "grow_after_seconds": 60.0,
            "max_resizes_per_hour": 5,
            "poll_seconds": 5.0,
            "partition": "cpu",
            "time_limit": "24:00:00",
        }.items()
    },
    "max_restarts": Probe(3, batch),
    "retries": Probe(3, batch),
}


def lives(t: Trainer) -> Any:
    """How often ranks that fail at once are started, and the code at their end."""
    folder = Path(t.config.run.dir).parent
    (folder / "lives").write_text("")
    script = f"open({str(folder / 'lives')!r}, 'a').write('x'); raise SystemExit(1)"
    result = supervise([sys.executable, "-c", script], 1, config=t.config.resilience.watch)
    return result.code, result.attempts, (folder / "lives").read_text()


def patience(phase: str, steps: int) -> Callable[[Trainer], Any]:
    """Seconds until a rank that makes no entry in `phase` is late."""

    def look(t: Trainer) -> Any:
        seconds = iter(range(10**6))
        watch = Watch(t.config.resilience.watch, clock=lambda: float(next(seconds)))
        beat = HeartbeatRecord(0, 1, 1, phase, 1, 0.0, 1, steps, "", 0.0, 1)
        return next(late.limit for _ in range(10**5) if (late := watch.look([beat], [0])))

    return look


WATCH = {
    "action": Probe("restart", lives),
    "max_restarts": Probe(0, lives, {"resilience.watch.action": "restart"}),
    "step_seconds": Probe(7.0, patience("step", 2)),
    "first_step_seconds": Probe(7.0, patience("step", 1)),
    "start_seconds": Probe(7.0, patience("load", 0)),
    "other_seconds": Probe(7.0, patience("evaluate", 2)),
    "limits": Probe({"save": 7.0}, patience("save", 2)),
}

PROBES: dict[str, Probe] = {
    **SIGHT,
    **{f"resilience.watch.{key}": probe for key, probe in WATCH.items()},
    **{f"slurm.{key}": probe for key, probe in SLURM.items()},
    "resilience.save_limit_seconds": Probe(100.0, batch),
    "model.moe.num_experts": Probe(4, shapes),
    "model.moe.every_n_layers": Probe(2, shapes, MOE),
    "model.moe.first_dense_layers": Probe(1, shapes, MOE),
    "model.moe.width_multiplier": Probe(0.5, shapes, MOE),
    "model.moe.top_k": Probe(3, routed, MOE),
    "model.moe.router": Probe("sigmoid_topk", routed, MOE),
    "model.moe.normalize": Probe("before_top_k", routed, MOE),
    "model.moe.num_groups": Probe(2, routed, MOE),
    "model.moe.top_groups": Probe(3, routed, GROUPS),
    "model.moe.group_score": Probe("max", routed, GROUPS),
    "model.moe.route_scale": Probe(2.0, routed, MOE),
    "model.moe.expert_bias": Probe(True, lambda t: list(dict(t.model.named_buffers())), MOE),
    "model.moe.activation": Probe("gelu", shapes, MOE),
    "model.moe.bias": Probe(True, shapes, MOE),
    "model.moe.router_bias": Probe(True, shapes, MOE),
    "model.moe.swiglu_alpha": Probe(0.5, routed, CLAMPED),
    "model.moe.swiglu_limit": Probe(0.5, routed, CLAMPED),
    "model.moe.num_shared_experts": Probe(1, shapes, MOE),
    "model.moe.shared_hidden_dim": Probe(24, shapes, SHARED),
    "model.moe.shared_gate": Probe(True, shapes, SHARED),
    "model.moe.capacity_factor": Probe(0.6, routed, MOE),
    "model.moe.drop_policy": Probe("probability", routed, FULL),
    "model.moe.aux_loss_weight": Probe(0.5, trained, MOE),
    "model.moe.aux_scope": Probe("sequence", trained, LOSS),
    "model.moe.sequence_loss_weight": Probe(0.5, trained, MOE),
    "model.moe.z_loss_weight": Probe(0.5, trained, MOE),
    "model.moe.bias_update_rate": Probe(0.1, biases, MOE),
    "model.moe.bias_center": Probe(True, biases, BIAS),
    "model.moe.bias_schedule": Probe("cosine", biases, BIAS),
    "model.moe.backend": Probe("batched", products, MOE),
    "run.dir": Probe("elsewhere", lambda t: str(t.paths.path)),
    "run.seed": Probe(1, initial),
    "init.seed": Probe(1, initial),
    "data.seed": Probe(1, rows),
    "model.name": Probe(
        "forge_testing.models:bigram",
        lambda t: type(t.model).__name__,
        {"sample.max_new_tokens": 0},
    ),
    "model.vocab_size": Probe(300, shapes),
    "model.dim": Probe(32, shapes),
    "model.num_layers": Probe(2, shapes),
    "model.num_heads": Probe(4, logits),
    "model.num_kv_heads": Probe(1, shapes),
    "model.head_dim": Probe(4, shapes),
    "model.hidden_dim": Probe(24, shapes),
    "model.norm": Probe("layer_norm", shapes),
    "model.norm_eps": Probe(0.1, logits),
    "model.feed_forward": Probe("gelu", shapes),
    "model.rope_theta": Probe(100.0, logits),
    **{key: Probe(value * 2, logits, ROPE) for key, value in ROPE.items()},
    "model.rope_scaling.name": Probe("linear", logits, {"model.rope_scaling.factor": 2.0}),
    **{f"model.rope_scaling.{key}": probe for key, probe in YARN_KEYS.items()},
    "model.rope_scaling.options": Probe(
        {"by": 3.0}, logits, {"model.rope_scaling.name": f"{PARTS}:scaled_frequencies"}
    ),
    "model.attention.scale": Probe(0.01, logits),
    "model.attention.window": Probe(3, logits),
    "model.attention.softcap": Probe(0.5, logits),
    "model.attention.sinks": Probe(True, shapes),
    "model.attention.mask": Probe(
        f"{PARTS}:self_only", logits, {"sample.max_new_tokens": 0, "eval.every_steps": 0}
    ),
    "model.layer_pattern": Probe(
        ["text"], logits, {**LOCAL, "model.layer_pattern": ["global", "text"]}
    ),
    "model.layer_types.<name>.window": Probe(5, logits, LOCAL),
    "model.layer_types.<name>.rope_theta": Probe(100.0, logits, LOCAL),
    "model.layer_types.<name>.rope_scaling": Probe(False, logits, {**LOCAL, **ROPE}),
    "model.layer_types.<name>.rope": Probe(False, logits, LOCAL),
    "model.mixer": Probe(f"{PARTS}:RunningMean", shapes),
    **{f"model.mla.{key}": probe for key, probe in WIDTHS.items()},
    "model.mixer_options": Probe({"gain": 2.0}, logits, {"model.mixer": f"{PARTS}:RunningMean"}),
    "model.norm_options": Probe({"gain": 2.0}, logits, {"model.norm": f"{PARTS}:GainNorm"}),
    "model.feed_forward_options": Probe(
        {"power": 2},
        logits,
        {"model.feed_forward": f"{PARTS}:PowerOfReLU", "model.feed_forward_options.power": 1},
    ),
    "model.block": Probe(f"{PARTS}:ParallelBlock", logits),
    "model.block_options": Probe(
        {"weight": 2.0}, logits, {"model.block": f"{PARTS}:ParallelBlock"}
    ),
    "model.partial_rotary_factor": Probe(0.5, logits),
    "model.qk_norm": Probe(True, shapes),
    "model.qk_norm_over": Probe("all_heads", shapes, {"model.qk_norm": True}),
    "model.qkv_bias": Probe(True, shapes),
    "model.o_bias": Probe(True, shapes),
    "model.feed_forward_bias": Probe(True, shapes),
    "model.tie_embeddings": Probe(True, shapes),
    "model.init_std": Probe(0.05, initial),
    "model.embedding_scale": Probe(2.0, logits),
    "model.residual_scale": Probe(2.0, logits),
    "model.logits_scale": Probe(2.0, logits),
    "model.logits_softcap": Probe(2.0, logits),
    "lora.rank": Probe(3, shapes),
    "lora.alpha": Probe(2.0, logits, LORA),
    "lora.patterns": Probe(["*.gate_proj"], shapes, LORA),
    "lora.whole": Probe(["norm.weight"], trained, LORA),
    "lora.base_dtype": Probe("fp32", dtypes, LORA),
    "model.mtp.num_modules": Probe(1, shapes),
    "model.mtp.weight": Probe(0.9, trained, {"model.mtp.num_modules": 1}),
    "model.parametrization": Probe("mup", logits),
    "model.mup.base_dim": Probe(16, logits, MUP),
    "model.mup.base_num_layers": Probe(16, logits, MUP),
    "model.mup.base_head_dim": Probe(4, logits, MUP),
    "model.max_seq_len": Probe(4096, lambda t: t.model.config.max_seq_len),
    "data.seq_len": Probe(48, rows),
    "data.num_workers": Probe(1, lambda t: t.loader.num_workers),
    "data.prefetch": Probe(2, lambda t: read_ahead(t)),
    "data.worker_timeout_seconds": Probe(9.0, lambda t: t.loader.worker_timeout_seconds),
    "data.worker_restarts": Probe(
        0, survives_a_dead_worker, {"data.num_workers": 1, "train.steps": 6}
    ),
    "data.sources.<name>.name": Probe(
        "forge_testing.models:Alphabet", rows, {"eval.every_steps": 0}
    ),
    "data.sources.<name>.split": Probe("validation", rows, {"eval.every_steps": 0}),
    "data.sources.<name>.options": Probe(
        {"first": 65},
        rows,
        {"eval.every_steps": 0, "data.sources.<name>.name": "forge_testing.models:Alphabet"},
    ),
    "data.sources.<name>.weight": Probe(3.0, of_source, MIXED),
    "data.sources.<name>.max_epochs": Probe(
        1, lambda t: t.loader.stream.mixture.end, {**MIXED, "data.sources.more.max_epochs": 1}
    ),
    "data.packing.name": Probe("best_fit", rows),
    "data.packing.first_fit.window": Probe(3, rows, {"data.packing.name": "first_fit"}),
    "data.packing.best_fit.window": Probe(3, rows, {"data.packing.name": "best_fit"}),
    "data.accept_change": Probe(True, goes_on_with_another_seed),
    "data.temperature": Probe(4.0, of_source, {**MIXED, "data.sources.more.weight": 9.0}),
    "data.phases.<name>.start_tokens": Probe(256, of_source, ENDING),
    "data.phases.<name>.start_instance": Probe(
        8,
        of_source,
        {
            **MIXED,
            "data.phases.<name>.start_instance": 2,
            "data.phases.<name>.weights": {"more": 1},
        },
    ),
    "data.phases.<name>.seq_len": Probe(16, trained, ENDING),
    "data.phases.<name>.global_batch": Probe(6, trained, ENDING),
    "data.phases.<name>.weights": Probe({"more": 1.0}, of_source, ENDING),
    "data.phases.<name>.lr_multiplier": Probe(0.1, trained, ENDING),
    "data.validation.options": Probe(
        {"first": 65}, evaluations, {"data.validation.name": "forge_testing.models:Alphabet"}
    ),
    "train.loss": Probe(f"{PARTS}:squared_error", trained),
    "train.loss_options": Probe(
        {"scale": 0.5}, evaluations, {"train.loss": f"{PARTS}:squared_error"}
    ),
    "train.cross_entropy.z_loss": Probe(0.1, trained),
    "train.cross_entropy.label_smoothing": Probe(0.1, trained),
    "train.fused_cross_entropy.z_loss": Probe(0.1, trained, FUSED),
    "train.fused_cross_entropy.label_smoothing": Probe(0.1, trained, FUSED),
    "train.objective": Probe(f"{PARTS}:smoothed", trained),
    "train.objective_options": Probe(
        {"smoothing": 0.1}, trained, {"train.objective": f"{PARTS}:smoothed"}
    ),
    "train.steps": Probe(7, lambda t: t.total_steps),
    "train.tokens": Probe(1000, lambda t: t.total_steps),
    "train.tokens_per_parameter": Probe(1.0, lambda t: t.total_steps),
    "train.global_batch": Probe(2, rows),
    "train.micro_batch": Probe(2, forwards),
    "train.max_grad_norm": Probe(
        1e-3, trained, {"optimizer.name": "forge_testing.models:PlainSGD"}
    ),
    "resilience.nonfinite.action": Probe("skip", survives_a_bad_step),
    "resilience.nonfinite.max_in_a_row": Probe(
        0, survives_a_bad_step, {"resilience.nonfinite.action": "skip"}
    ),
    "resilience.alerts.command": Probe("false", alerts_that_failed, ALERTS),
    "resilience.alerts.webhook": Probe("http://127.0.0.1:9", alerts_that_failed, ALERTS),
    "resilience.alerts.events": Probe(["start"], alerts_that_failed, ALERTS),
    "resilience.alerts.timeout_seconds": Probe(0.4, alerts_that_failed, ALERTS),
    "resilience.alerts.attempts": Probe(2, alerts_that_failed, ALERTS),
    "health.at_start": Probe(False, probed),
    "health.every_steps": Probe(2, probed, {"health.at_start": False}),
    "health.action": Probe("warn", probed),
    "health.memory_mib": Probe(2, probed),
    "health.timeout_seconds": Probe(30.0, probed),
    "resilience.replicas.every_steps": Probe(1, survives_a_flipped_bit),
    "resilience.replicas.action": Probe(
        "warn", survives_a_flipped_bit, {"resilience.replicas.every_steps": 1}
    ),
    **{
        f"resilience.spike.{key}": Probe(
            other, answers, SPIKES | {f"resilience.spike.{key}": first}
        )
        for key, first, other in (
            ("action", "off", "skip"),
            ("sigma", 6.0, 1000.0),
            ("window", 4, 10),
            ("of", "grad_norm", "loss"),
        )
    },
    **{
        f"resilience.rollback.{key}": Probe(
            other, rollbacks, {"resilience.nonfinite.action": "rollback", **FEWER}
        )
        for key, other in (("max_rollbacks", 1), ("batches_before", 1), ("lr_factor", 0.5))
    },
    "callbacks.<name>.name": Probe(
        f"{PARTS}:StepLog",
        lambda t: [type(e) for e in t.run.extensions],
        {"callbacks.<name>.name": COUNTING},
    ),
    "callbacks.<name>.every_steps": Probe(2, hooks, {"callbacks.<name>.name": COUNTING}),
    "callbacks.<name>.options": Probe(
        {"file": "others"}, files, {"callbacks.<name>.name": f"{PARTS}:StepLog"}
    ),
    "optimizer.name": Probe("forge_testing.models:PlainSGD", trained),
    "optimizer.lr": Probe(1e-3, trained),
    "optimizer.betas": Probe([0.5, 0.9], trained),
    "optimizer.eps": Probe(1e-2, trained),
    "optimizer.weight_decay": Probe(5.0, trained),
    "optimizer.state_dtype": Probe("bf16", trained),
    **{
        f"optimizer.muon.{key}": Probe(other, trained, {"optimizer.name": "muon"})
        for key, other in (
            ("momentum", 0.5),
            ("nesterov", False),
            ("ns_steps", 2),
            ("ns_dtype", "fp32"),
            ("adjust", "original"),
            ("adamw_lr_multiplier", 0.1),
        )
    },
    "optimizer.groups.<name>.muon": Probe(True, trained, {**GROUP, "optimizer.name": "muon"}),
    "optimizer.ema.decay": Probe(0.5, trained),
    "optimizer.schedule_free.r": Probe(3.0, trained, SCHEDULE_FREE),
    "optimizer.schedule_free.weight_lr_power": Probe(
        0.0, trained, {**SCHEDULE_FREE, "schedule.warmup_steps": 2}
    ),
    "optimizer.options": Probe({"momentum": 0.5}, trained, {"optimizer.name": "torch.optim:SGD"}),
    "optimizer.groups.<name>.patterns": Probe(
        ["layers.*"], trained, {**GROUP, "optimizer.groups.<name>.lr_multiplier": 0.1}
    ),
    "optimizer.groups.<name>.lr_multiplier": Probe(0.1, trained, GROUP),
    "optimizer.groups.<name>.weight_decay": Probe(5.0, trained, GROUP),
    "train.stages.<name>.start_step": Probe(3, trained, STAGE),
    "train.stages.<name>.lr_multipliers": Probe({"text": 0.0}, trained, STAGE),
    "schedule.name": Probe("constant", trained),
    "schedule.options": Probe(
        {"height": 0.5},
        trained,
        {"schedule.name": f"{PARTS}:half_way", "schedule.options.height": 0.1},
    ),
    "schedule.warmup_steps": Probe(2, trained),
    "schedule.min_lr_ratio": Probe(0.9, trained),
    "schedule.wsd.decay_steps": Probe(2, trained, WSD),
    "schedule.wsd.decay_fraction": Probe(0.8, trained, WSD),
    "schedule.wsd.decay": Probe("cosine", trained, {**WSD, "schedule.wsd.decay_steps": 3}),
    "parallel.precision": Probe("bf16", trained),
    "eval.every_steps": Probe(1, evaluations),
    "eval.sequences": Probe(2, evaluations),
    "eval.at_start": Probe(True, evaluations),
    "checkpoint.every_steps": Probe(1, files),
    "checkpoint.keep_last": Probe(1, files, {"checkpoint.every_steps": 1}),
    "checkpoint.keep_every": Probe(2, files, KEEP_ONE),
    "checkpoint.milestones": Probe("powers_of_2", files, KEEP_ONE),
    "checkpoint.best": Probe(
        "val_loss",
        files,
        {**KEEP_ONE, "eval.every_steps": 1, "optimizer.lr": 10.0, "schedule.name": "constant"},
    ),
    "checkpoint.wait": Probe(True, saves, {"checkpoint.every_steps": 1}),
    "checkpoint.staging_gib": Probe(1e-6, saves),
    "checkpoint.max_failed_saves": Probe(1, saves_on_a_full_disk, {"checkpoint.every_steps": 1}),
    "checkpoint.digest": Probe("blake3", digests),
    "metrics.every_steps": Probe(2, logged),
    "metrics.gradients_every_steps": Probe(1, columns),
    "metrics.source_shares": Probe(True, columns, MIXED),
    "metrics.tensorboard": Probe(True, files),
    "metrics.flat_names": Probe(True, tags, {"metrics.tensorboard": True}),
    "metrics.sinks.<name>.name": Probe(
        f"{PARTS}:LineSink", files, {"metrics.sinks.<name>.name": "tensorboard"}
    ),
    "metrics.sinks.<name>.options": Probe(
        {"file": "others"}, files, {"metrics.sinks.<name>.name": f"{PARTS}:LineSink"}
    ),
    "metrics.expert_loads": Probe(True, loads, MOE),
    "metrics.console": Probe("off", lambda t: console_mode(t.config.metrics.console)),
    "profile.start_step": Probe(3, profiled, {"profile.num_steps": 1, "train.steps": 10}),
    "profile.num_steps": Probe(1, profiled, {"profile.start_step": 2}),
    "profile.every_steps": Probe(
        2, profiled, {"profile.start_step": 2, "profile.num_steps": 1, "train.steps": 5}
    ),
    "profile.memory": Probe(True, profiled, {"profile.start_step": 2, "profile.num_steps": 1}),
    "sample.prompt": Probe("If ", sample),
    "sample.max_new_tokens": Probe(3, sample),
    "sample.temperature": Probe(0.0, sample),
}
CHAT_KEYS = (
    *("tokenizer", "template", "messages_field", "tools_field", "train_on", "too_long", "cache"),
    *("ignore_keys", "strict"),
)
#: Shown below, by tests of their own.
#: Key -> another value, or (value, further keys of both runs). "WORDS" is the path of a tokenizer.
KEYS_OF_KINDS: dict[str, dict[str, Any]] = {
    "text": {
        "tokenizer": "WORDS",
        "eos": ("<end>", {"tokenizer": "WORDS"}),
        "bos": ("a", {"tokenizer": "WORDS"}),
        "document": "line",
        "text_field": "more",
        "validation_every": 4,
        "ignore_keys": ([], {"strict": True, "ignore_keys": ["more"]}),
        "strict": True,
        "cache": "",
    },
    "huggingface": {
        "tokenizer": "WORDS",
        "eos": ("<end>", {"tokenizer": "WORDS"}),
        "bos": ("a", {"tokenizer": "WORDS"}),
        "text_field": "more",
        "split": "test",
        "config_name": "other",
        "streaming": True,
        "virtual_shards": 2,
        "shuffle_window": 9,
        "ignore_keys": ([], {"strict": True, "ignore_keys": ["more"]}),
        "strict": True,
        "cache": "",
    },
}
BORDERS = [f"{kind}.{key}" for kind in ("nanogpt", "npy") for key in ("eos_id", "bos_id")]
ELSEWHERE = {
    "model.args",
    "model.fusion.cross_attention.sees",  # behind gates that begin at 0: forge_vlm's tests
    "model.bidirectional",  # needs ids that the probe's pictures have not: tests/vlm/test_layouts.py
    "model.pixels_per_image",  # of encoders that take images of any size: forge_vlm's tests
    "model.vision.vit.merge",  # of the same: forge_vlm's tests
    "model.positions",  # of three axes: with [model.mrope]; else where a row comes without any: forge_vlm's tests
    *(f"init.{key}" for key in ("from", "keep", "patterns", "other_tokenizer", "vocab_size")),
    "init.encoder",  # tests/vlm/test_encoder_folders.py
    "profile.ranks",  # tests/use/test_profile.py
    *(  # apps/train/tests/test_evaluation_sets.py; the other keys are those of data.validation
        f"eval.choices.<name>.{f.name}" for f in fields(ChoicesConfig)
    ),
    *(row.key for row in key_rows() if row.key.startswith("eval.sets.<name>.")),
    *(  # tests/vlm/test_exact_match.py
        f"eval.exact_match.{f.name}" for f in fields(ExactMatchConfig)
    ),
    "parallel.device",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.ep",
    *(
        f"parallel.{key}"
        for key in ("sdpa", "layout", "tp", "sequence_parallel", "async_tp", "cp", "cp_exchange")
    ),
    *(f"parallel.{key}" for key in ("pp", "pp_schedule", "pp_stages_per_rank")),
    *(
        f"parallel.{key}"
        for key in ("gpus_per_node", "across_nodes", "float8", "float8_all_gather")
    ),
    *(f"parallel.{key}" for key in ("recompute", "recompute_every", "memory_budget", "compile")),
    "model.moe.dispatcher",
    "model.moe.dispatch_chunks",
    "parallel.reshard_after_forward",
    "parallel.cpu_offload",
    "parallel.reduce_dtype",
    "parallel.param_dtype",
    "parallel.timeout_seconds",
    "parallel.start_timeout_seconds",
    "data.sources.<name>.path",
    "data.sources.<name>.dtype",
    "data.sources.<name>.verify",
    *(f"data.validation.{key}" for key in ("name", "path", "dtype", "split", "verify")),
    *(f"data.sources.<name>.chat.{key}" for key in CHAT_KEYS),
    *(f"data.validation.chat.{key}" for key in CHAT_KEYS),
    *(f"data.{place}.{key}" for place in ("sources.<name>", "validation") for key in BORDERS),
    *(
        f"data.{source}.{kind}.{key}"
        for source in ("sources.<name>", "validation")
        for kind, keys in KEYS_OF_KINDS.items()
        for key in keys
    ),
}


def word_tokenizer(folder: Path) -> str:
    """A JSON tokenizer of ten words, with two tokens that could end a document."""
    library = pytest.importorskip("tokenizers")
    words = ["<unk>", "</s>", "<end>", *"abcdefg"]
    model = library.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:2])
    tokenizer.save(str(folder / "words.json"))
    return str(folder / "words.json")


LENGTH = {"train.tokens", "train.tokens_per_parameter"}


def _named(key: str) -> str:
    """Modalities may have any name but text."""
    return key.replace("modalities.<name>", "modalities.drawn").replace("<name>", "text")


def build(folder: Path, settings: dict[str, Any]) -> Trainer:
    folder.mkdir(exist_ok=True)
    length = {} if LENGTH & settings.keys() else {"train.steps": 3}
    overrides = {**length, **{_named(k): v for k, v in settings.items()}}
    return Trainer(load_job(write_job(folder), overrides))


_baselines: dict[tuple[str, str], Any] = {}


def baseline(probe: Probe, folder: Path) -> Any:
    """What the probe sees without its key; the same for many keys, so built and trained once in a process."""
    key = probe.look.__qualname__, repr(sorted(probe.also.items()))
    if "<lambda>" in key[0] or any(str(folder.parent) in part for part in key):
        return probe.look(build(folder, probe.also))
    if key not in _baselines:
        _baselines[key] = probe.look(build(folder, probe.also))
    return copy.deepcopy(_baselines[key])


@pytest.mark.lane("quick")
@pytest.mark.parametrize("key", PROBES)
def test_another_value_changes_something(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    probe = PROBES[key]
    try:
        before = baseline(probe, tmp_path / "a")
        after = probe.look(build(tmp_path / "b", {**probe.also, key: probe.other}))
    finally:
        end_process_group()
    assert before != after, f"{key} = {probe.other!r} changes nothing"


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_same_value_changes_nothing(tmp_path: Path) -> None:
    """Else the probes above could see noise."""
    for look in (initial, logits, trained, rows, evaluations):
        first, second = (look(build(tmp_path / name, {})) for name in "ab")
        assert first == second, look.__name__


def test_every_key_has_a_probe() -> None:
    known = {row.key for row in key_rows()} | {"model.args"}
    assert known == PROBES.keys() | ELSEWHERE


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_run_begins_with_what_the_keys_of_init_take(tmp_path: Path) -> None:
    parent = build(tmp_path / "parent", {})
    parent.fit()
    tables = [
        {},
        {"init.from": str(parent.paths.path)},
        {"init.from": str(parent.paths.path), "init.keep": ["weights", "optimizer"]},
        {"init.from": str(parent.paths.path), "init.patterns": ["lm_head.*"]},
    ]
    found = [trained(build(tmp_path / str(n), table)) for n, table in enumerate(tables)]
    assert len(set(found)) == len(tables)


def test_model_args_reach_the_builder(tmp_path: Path) -> None:
    settings = {"model.name": "forge_testing.models:bigram", "model.args.width": 12}
    settings["sample.max_new_tokens"] = 0
    job = write_job(tmp_path)
    t = Trainer(load_job(job, settings))
    assert t.model.table.weight.shape == (257, 12)
    with rejects("model.args", {"width": 12, "wdith": 3}, "call", ConfigError):
        Trainer(load_job(job, {**settings, "model.args.wdith": 3}))


def test_the_device_is_used_or_rejected(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        assert build(tmp_path, {"parallel.device": "cuda"}).device.type == "cuda"
        return
    with rejects("parallel.device", "cuda", "requires", ConfigError):
        build(tmp_path, {"parallel.device": "cuda"})


def experts_of(options: dict[str, Any], moe: dict[str, Any]) -> Any:
    """Where the experts lie and how tokens reach them, on one rank of several."""
    config = ParallelConfig(device="cpu", **options)
    section = BuiltInModelConfig(
        vocab_size=8, dim=8, num_layers=1, num_heads=1, moe=MoESection(num_experts=4, **moe)
    )
    with torch.device("meta"):
        model = Transformer(section, feed_forward=feed_forward_factory(section))
    meshes = make_meshes(config)
    shard_experts(model, SimpleNamespace(model=section, parallel=config), meshes)  # type: ignore[arg-type]
    parallelize(model, config, meshes)
    (layer,) = (m for m in model.modules() if isinstance(m, MoE))
    chunks = getattr(layer.dispatcher, "chunks", None)
    return str(layer.experts.up_proj.placements), type(layer.dispatcher).__name__, chunks


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "moe"),
    [
        ({}, {}),
        ({"ep": 2}, {"dispatcher": "hierarchical"}),
        ({"ep": 2}, {"dispatch_chunks": 2}),
    ],
    ids=["ep", "dispatcher", "dispatch_chunks"],
)
def test_a_key_of_experts_changes_where_they_are_or_how_tokens_travel(
    options: dict[str, Any], moe: dict[str, Any]
) -> None:
    plain = run_on_ranks(2, experts_of, {"ep": 2}, {})[0]
    assert run_on_ranks(2, experts_of, options, moe)[0] != plain


@pytest.mark.lane("quick")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("dp_replicate", 2),
        ("reshard_after_forward", False),
        ("cpu_offload", True),
        ("reduce_dtype", "bf16"),
        ("param_dtype", "bf16"),
    ],
)
def test_a_layout_key_changes_what_fsdp_does(key: str, other: Any) -> None:
    assert run_on_ranks(2, layout, {})[0] != run_on_ranks(2, layout, {key: other})[0]


def arranged(options: dict[str, Any]) -> Any:
    """What parallelize makes of a decoder of six layers: classes, placements, and names below."""
    section = BuiltInModelConfig(vocab_size=64, dim=512, num_layers=6, num_heads=2, hidden_dim=4096)
    with torch.device("meta"):
        model = Transformer(section)
    config = ParallelConfig(device="cpu", **options)
    meshes = make_meshes(config)
    parallelize(model, config, meshes, seq_len=16)
    found: dict[str, Any] = {n: str(p.placements) for n, p in model.named_parameters()}
    attend = model.blocks()[0].mixer.attend
    found |= {"exchange": type(getattr(attend, "exchange", attend)).__name__}
    found |= {"cut": [m.tp.tokens_sharded for m in model.modules() if hasattr(m, "tp")]}
    found |= {
        f"class of {n}": [c.__name__ for c in type(m).__mro__] for n, m in model.named_modules()
    }
    found |= {
        "compiled": [bool(m._compiled_call_impl) or "forward" in vars(m) for m in model.modules()]
    }
    if meshes.pp.size > 1:
        found["stages"] = [len(stage.blocks()) for stage in stages_of(model)]
        pipeline = Pipeline(
            model, config, meshes, num_micro_batches=4, micro_batch=1, seq_len=16, dim=512
        )
        found["schedule"] = type(pipeline._schedule).__name__
    return found


@pytest.mark.lane("quick")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("key", "other", "also"),
    [
        ("tp", 2, {}),
        ("sequence_parallel", False, {"tp": 2}),
        ("cp", 2, {}),
        ("cp_exchange", "ring", {"cp": 2}),
        ("pp", 2, {}),
        ("pp_schedule", "gpipe", {"pp": 2}),
        ("pp_stages_per_rank", 3, {"pp": 2, "pp_schedule": "interleaved_1f1b"}),
        ("float8", "tensorwise", {"precision": "bf16"}),
        ("recompute", "full", {}),
        ("recompute_every", 2, {"recompute": "full"}),
        ("compile", True, {}),
    ],
)
def test_a_key_changes_what_parallelize_makes(key: str, other: Any, also: dict[str, Any]) -> None:
    plain = run_on_ranks(2, arranged, also)
    assert run_on_ranks(2, arranged, {**also, key: other}) != plain


@pytest.mark.parametrize(("key", "other"), [("gpus_per_node", 4), ("across_nodes", True)])
def test_a_key_about_nodes_lets_groups_be_larger(key: str, other: Any) -> None:
    with rejects("tp", 4, "node"):
        ParallelConfig(tp=4).axes(8, 2)
    assert ParallelConfig(tp=4, **{key: other}).axes(8, 2).tp == 4


def test_the_memory_budget_reaches_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "forge_parallel.compile.compile_blocks",
        lambda *_, memory_budget, **__: seen.append(memory_budget),
    )
    for budget in (None, 0.5):
        config = ParallelConfig("cpu", "fp32", compile=True, memory_budget=budget)
        parallelize(torch.nn.Linear(2, 2), config)
    assert seen == [None, 0.5]


@pytest.mark.parametrize("key", ["async_tp", "float8_all_gather"])
def test_a_key_for_gpus_is_rejected_on_a_cpu(tmp_path: Path, key: str) -> None:
    with rejects(f"parallel.{key}", True, kind=ConfigError):
        build(tmp_path, {f"parallel.{key}": True})


@pytest.mark.lane("quick")
def test_the_layout_is_chosen_with_reasons_and_kept_by_the_run(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path), {"parallel.layout": "auto", "train.steps": 1})
    alone = find_world({})
    chosen, reasons = with_layout(job, alone)
    assert chosen.config.parallel.layout == "manual"
    assert chosen.origin("parallel.layout") not in ("default", "flag")
    assert "FSDP" in reasons[0]
    Trainer(job).fit()
    again, reasons = with_layout(job, alone)
    assert again.config == chosen.config
    assert reasons == [f"kept from {tmp_path / 'run'}"]


def test_a_layout_is_chosen_again_for_another_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 -> 3 -> 4: tensor parallelism of two cannot be on three ranks, and comes back on four."""

    def choose(job: Any, world_size: int, gpus_per_node: int) -> Any:
        asked.append(world_size)
        return replace(job.config.parallel, layout="manual", tp=2 - world_size % 2), ["chosen"]

    def live(ranks: int) -> tuple[int, list[str]]:
        names = (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        )
        world = find_world(dict(zip(names, ("0", "0", str(ranks), str(ranks), "127.0.0.1", "1"))))
        chosen, reasons = with_layout(job, world)
        paths.record(chosen, ["host"] * ranks)
        return chosen.config.parallel.tp, reasons

    asked: list[int] = []
    monkeypatch.setattr("forge_train.plan.choose_layout", choose)
    job = load_job(write_job(tmp_path), {"parallel.layout": "auto"})
    paths = RunDirectory(tmp_path / "run")
    paths.create()
    kept = [f"kept from {tmp_path / 'run'}"]
    assert [live(4), live(4), live(3), live(4)] == [
        (2, ["chosen"]),
        (2, kept),
        (1, ["chosen"]),
        (2, ["chosen"]),
    ]
    assert asked == [4, 3, 4]


def test_the_number_of_shards_is_kept_to(tmp_path: Path) -> None:
    with rejects("parallel.dp_shard", 2, "world_size", ConfigError):
        build(tmp_path, {"parallel.dp_shard": 2})


def test_a_hang_is_reported_before_the_ranks_that_wait_for_it_fail(tmp_path: Path) -> None:
    config = load_job(write_job(tmp_path)).config
    assert config.resilience.watch.step_seconds < config.parallel.timeout_seconds


def test_timeouts_reach_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def start(*args: Any, **options: Any) -> None:
        raise Started(options)

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr("forge_parallel.meshes.start_process_group", start)
    config = ParallelConfig(device="cpu", timeout_seconds=7.0, start_timeout_seconds=3.0)
    with pytest.raises(Started) as started, launch(config):
        pass
    options = started.value.args[0]
    assert (options["timeout_seconds"], options["start_timeout_seconds"]) == (7.0, 3.0)


def test_path_and_dtype_choose_the_tokens(tmp_path: Path) -> None:
    raw = tmp_path / "raw.bin"
    raw.write_bytes(bytes(range(100)) * 20)
    base = {
        "data.sources.<name>.name": "tokens",
        "data.sources.<name>.path": str(raw),
        "eval.every_steps": 0,
        "model.vocab_size": 30_000,
        "sample.max_new_tokens": 0,
    }
    with rejects("data.sources.text.dtype", kind=DataError):
        build(tmp_path, base)
    one = build(tmp_path / "a", {**base, "data.sources.<name>.dtype": "uint8"})
    two = build(tmp_path / "b", {**base, "data.sources.<name>.dtype": "uint16"})
    assert len(one.loader.stream) == 2 * len(two.loader.stream) - 1
    assert rows(one) != rows(two)


@pytest.mark.lane("quick")
@pytest.mark.parametrize("place", ["sources.<name>", "validation"])
@pytest.mark.parametrize("key", BORDERS)
def test_ids_between_documents_of_raw_files(tmp_path: Path, place: str, key: str) -> None:
    kind = key.partition(".")[0]
    ids = numpy.arange(400, dtype="<u2") % 50
    numpy.save(tmp_path / "a.npy", ids)
    ids.tofile(tmp_path / "a.bin")
    settings = {
        f"data.{place}.name": kind,
        f"data.{place}.path": str(tmp_path / {"npy": "a.npy", "nanogpt": "a.bin"}[kind]),
        "sample.max_new_tokens": 0,
        "model.vocab_size": 300,
    }
    if place != "validation":
        settings["eval.every_steps"] = 0

    def documents(number: int, more: dict[str, Any]) -> list[int]:
        t = build(tmp_path / str(number), {**settings, **more})
        stream = (
            t.run.evaluation.streams["validation"] if place == "validation" else t.loader.stream
        )
        return stream.source.documents.tolist()  # type: ignore[union-attr]

    assert documents(1, {}) == [0]
    first = 7 + (key.endswith("eos_id"))
    assert documents(2, {f"data.{place}.{key}": 7}) == [0, *range(first, 400, 50)]


def of_kind(folder: Path, source: str, kind: str, settings: dict[str, Any]) -> Any:
    """What a run reads from a source of a kind, or why it is refused."""
    table = f"data.{source}"
    values = {"name": kind, "path": str(folder / kind)}
    values |= {f"{kind}.{key}": value for key, value in settings.items()}
    held_out = {"eval.every_steps": 0} if source != "validation" else {}
    folder = folder / "run"
    try:
        trainer = build(folder, {**held_out, "sample.max_new_tokens": 0, "model.vocab_size": 300,
                                 **{f"{table}.{key}": value for key, value in values.items()}})  # fmt: skip
    except (ConfigError, DataError) as error:
        return str(error)
    stream = (
        trainer.run.evaluation.streams["validation"]
        if source == "validation"
        else trainer.loader.stream
    )
    assert stream is not None
    return stream.fingerprint()


@pytest.mark.lane("quick")
@pytest.mark.parametrize("source", ["sources.<name>", "validation"])
@pytest.mark.parametrize(
    ("kind", "key", "also"),
    [(k, key, also) for k, keys in KEYS_OF_KINDS.items() for key, also in keys.items()],
)
def test_keys_of_a_kind_choose_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: str, key: str, also: Any
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    rows = {"text": ["a b", "c d", "e f", "g"] * 30, "more": ["f g", "a"] * 60}
    one = datasets.Dataset.from_dict(rows)
    (tmp_path / "text").mkdir()
    one.to_json(tmp_path / "text/a.jsonl")
    (tmp_path / "text/b.txt").write_text("a\nb\n\nc\n" * 20)
    datasets.DatasetDict(train=one, test=one.select(range(40))).save_to_disk(
        tmp_path / "huggingface"
    )
    words = word_tokenizer(tmp_path)
    other, base = also if isinstance(also, tuple) else (also, {})
    base = {k: words if v == "WORDS" else v for k, v in base.items()}
    found = of_kind(tmp_path, source, kind, base)
    assert isinstance(found, dict), found
    other = words if other == "WORDS" else str(tmp_path / "mine") if key == "cache" else other
    changed = of_kind(tmp_path, source, kind, {**base, key: other})
    if key == "cache":
        assert (tmp_path / "mine").is_dir()
        return
    assert changed != found


def test_verify_decides_whether_damage_is_seen(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words to read\n" * 400)
    prepare([tmp_path / "text.txt"], tmp_path / "tokens", document="line", validation_every=4)
    seen: dict[str, Any] = {}
    for split in ("train", "validation"):
        path = tmp_path / "tokens" / split / "tokens.bin"
        path.write_bytes(path.read_bytes().replace(b"w", b"v", 1))
    for mode in ("touch", "full", "off"):
        source = {"name": "tokens", "path": str(tmp_path / "tokens"), "verify": mode}
        settings = {f"data.sources.<name>.{key}": value for key, value in source.items()}
        try:
            trainer = build(tmp_path / mode, settings)
            assert trainer.config.data.validation.verify == mode  # type: ignore[union-attr]
            rows(trainer)
        except (DataError, forge_data.InvalidData) as error:
            seen[mode] = error
    assert seen.keys() == {"touch", "full"}
    assert isinstance(seen["full"], DataError)
    assert isinstance(seen["touch"], forge_data.InvalidData)  # at the first batch
    for error, key in ((seen["full"], "data.sources.text.block"), (seen["touch"], "block")):
        assert_problem(error, key, 0, "damaged")
        assert "tokens.bin" in str(error)


@pytest.mark.slow
def test_keys_of_chat_choose_what_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    one, two = dialog("a", "b", "c", "d"), dialog("the sky", "blue", "grass", "green " * 30)
    tools = [{"type": "function"}]
    records = [
        {"messages": one, "other": dialog("is", "no"), "tools": tools},
        {"messages": two, "other": one},
    ]
    paths = {"sources.<name>": tmp_path / "talks.jsonl", "validation": tmp_path / "held.jsonl"}
    for folder, template in (("plain", CHATML), ("headers", HEADERS)):
        save_tokenizer(tmp_path / folder, template)
    (tmp_path / "own.jinja").write_text(HEADERS)
    base = {"data.seq_len": 64, "model.vocab_size": 320, "sample.max_new_tokens": 0}
    for place, path in paths.items():
        write_dialogs(
            path, [*records, {"messages": one, "other": one}][: 2 + (place == "validation")]
        )
        base |= {f"data.{place}.name": "chat", f"data.{place}.path": str(path)}
        base |= {f"data.{place}.chat.tokenizer": str(tmp_path / "headers")}
        base |= {f"data.{place}.chat.too_long": "truncate"}
        base |= {f"data.{place}.chat.ignore_keys": ["tools", "messages"]}

    def seen(number: int, place: str, key: str, value: Any) -> str:
        settings = {**base, f"data.{place}.chat.{key}": value}
        if key in ("ignore_keys", "strict"):
            with pytest.raises(DataError) as error:
                build(tmp_path / f"{place[0]}{number}", settings)
            return str(error.value)
        t = build(tmp_path / f"{place[0]}{number}", settings)
        stream = (
            t.run.evaluation.streams["validation"] if place == "validation" else t.loader.stream
        )
        assert stream is not None
        arrays = stream.arrays(numpy.arange(2))
        return str({name: value.tolist() for name, value in arrays.items()})

    others = {
        "tokenizer": tmp_path / "plain",
        "template": tmp_path / "own.jinja",
        "messages_field": "other",
        "tools_field": "tools",
        "train_on": "last",
        "too_long": "skip",
        "cache": tmp_path / "elsewhere",
        "ignore_keys": [],
        "strict": True,
    }
    assert set(others) == set(CHAT_KEYS)
    for place in paths:
        plain = seen(0, place, "train_on", "assistant")
        for number, (key, other) in enumerate(others.items(), start=1):
            if key == "template":  # whose tokenizer has another one
                base[f"data.{place}.chat.tokenizer"] = str(tmp_path / "plain")
                before = seen(100, place, "train_on", "assistant")
                assert seen(number, place, key, str(other)) == plain != before
                base[f"data.{place}.chat.tokenizer"] = str(tmp_path / "headers")
            else:
                plain_value = isinstance(other, bool | list)
                found = seen(number, place, key, other if plain_value else str(other))
                kept = (tmp_path / "elsewhere").is_dir()
                assert kept if key == "cache" else found != plain, key


def test_validation_keys_choose_what_is_measured(tmp_path: Path) -> None:
    raw = tmp_path / "raw.bin"
    raw.write_bytes(bytes(range(100)) * 20)
    own = build(tmp_path / "a", {})
    other = build(tmp_path / "b", {
        "data.validation.name": "tokens",
        "data.validation.path": str(raw),
        "data.validation.dtype": "uint8",
    })  # fmt: skip
    alphabet = build(tmp_path / "c", {
        "data.validation.name": "forge_testing.models:Alphabet",
        "data.validation.split": "validation",
    })  # fmt: skip
    seen = [t.run.evaluation.streams["validation"].fingerprint() for t in (own, other, alphabet)]
    assert len({json.dumps(s, sort_keys=True) for s in seen}) == 3
    assert seen[2]["source.shift"] == 1, seen[2]
