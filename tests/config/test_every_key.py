"""No key is parsed and ignored: each is set to another legal value, and what changes is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forge_testing import forge_train, write_job
from forge_train import Trainer, load_job, read_run
from forge_train.config.describe import key_rows


def trainer(job: Path, **overrides: Any) -> Trainer:
    return Trainer(load_job(job, overrides))


def shapes(t: Trainer) -> Any:
    return {n: tuple(p.shape) for n, p in t.model.named_parameters()}


def logits(t: Trainer) -> Any:
    """Output of the freshly initialised model on three tokens."""
    t._materialise()
    t.model.eval()
    with torch.no_grad():
        return t.model(torch.arange(30)[None]).double().sum().item()


def first_rows(t: Trainer) -> Any:
    return next(t.loader).tokens.tolist()


def after_three_steps(t: Trainer) -> Any:
    """Loss column and weights of a real short run."""
    t.fit()
    return sum(p.double().abs().sum().item() for p in t.model.parameters())


def files(t: Trainer) -> Any:
    t.fit()
    names = {f.relative_to(t.paths.path).parts[0] for f in t.paths.path.rglob("*")}
    steps = sorted(f.name for f in t.paths.checkpoints.glob("step-*"))
    return names, steps, read_run(t.paths.path).metrics["step"]


def evaluations(t: Trainer) -> Any:
    t.fit()
    events = read_run(t.paths.path).events
    return [(e["step"], round(e["val_loss"], 9)) for e in events if e["event"] == "evaluation"]


def plan(t: Trainer) -> Any:
    return t.total_steps


def rope(t: Trainer) -> Any:
    return logits(t)


#: key -> (another legal value, what must change). Keys below `<name>` use the source `text`.
Probe = tuple[Any, Callable[[Trainer], Any]]
PROBES: dict[str, Probe] = {
    "run.dir": ("elsewhere", lambda t: str(t.paths.path)),
    "run.seed": (1, logits),
    "model.vocab_size": (300, shapes),
    "model.dim": (32, shapes),
    "model.num_layers": (2, shapes),
    "model.num_heads": (4, logits),
    "model.num_kv_heads": (1, shapes),
    "model.head_dim": (4, shapes),
    "model.hidden_dim": (24, shapes),
    "model.norm": ("layer_norm", lambda t: sorted({type(m).__name__ for m in t.model.modules()})),
    "model.norm_eps": (0.1, logits),
    "model.feed_forward": ("gelu", shapes),
    "model.rope_theta": (100.0, rope),
    "model.rope_scaling.factor": (4.0, rope),
    "model.rope_scaling.low_freq_factor": (2.0, rope),
    "model.rope_scaling.high_freq_factor": (8.0, rope),
    "model.rope_scaling.original_max_position": (64, rope),
    "model.qk_norm": (True, shapes),
    "model.qkv_bias": (True, shapes),
    "model.o_bias": (True, shapes),
    "model.feed_forward_bias": (True, shapes),
    "model.tie_embeddings": (True, shapes),
    "model.init_std": (0.05, logits),
    "model.max_seq_len": (4096, lambda t: t.model.config.max_seq_len),
    "model.name": ("forge_testing.models:bigram", lambda t: type(t.model).__name__),
    "data.seq_len": (48, first_rows),
    "data.num_workers": (1, lambda t: t.loader.num_workers),
    "data.sources.<name>.name": ("forge_testing.models:alphabet", first_rows),
    "data.sources.<name>.split": ("validation", None),
    "data.sources.<name>.path": (None, None),
    "data.sources.<name>.dtype": (None, None),
    "train.steps": (7, plan),
    "train.tokens": (1000, plan),
    "train.tokens_per_parameter": (1.0, plan),
    "train.global_batch": (2, first_rows),
    "train.micro_batch": (2, None),
    "train.max_grad_norm": (1e-3, after_three_steps),
    "train.callbacks": (("forge_testing.models:Counting",), lambda t: len(t.callbacks)),
    "optimizer.name": ("forge_testing.models:sgd", after_three_steps),
    "optimizer.lr": (1e-3, after_three_steps),
    "optimizer.betas": ((0.5, 0.9), after_three_steps),
    "optimizer.eps": (1e-2, after_three_steps),
    "optimizer.weight_decay": (5.0, after_three_steps),
    "schedule.name": ("constant", after_three_steps),
    "schedule.warmup_steps": (2, after_three_steps),
    "schedule.min_lr_ratio": (0.9, after_three_steps),
    "parallel.device": (None, None),
    "parallel.precision": ("bf16", after_three_steps),
    "eval.every_steps": (1, evaluations),
    "eval.sequences": (2, evaluations),
    "checkpoint.every_steps": (1, files),
    "checkpoint.keep_last": (1, files),
    "metrics.every_steps": (2, files),
    "metrics.tensorboard": (True, files),
}
