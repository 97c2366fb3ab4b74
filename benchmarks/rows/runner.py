"""The whole step of the runner next to a loop of 40 lines; the costs of saves, resumes and preemptions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.harness import Step
from benchmarks.rows import Row, Setting
from benchmarks.rows.data import IGNORED, with_documents, write_tokens

LR, MAX_NORM, BETAS = 1e-4, 1.0, (0.9, 0.95)


@dataclass(frozen=True)
class Job:
    """Case of all rows that train: a model, its batch and a folder of tokens."""

    setting: Setting
    tokens: Path
    model: dict[str, Any]
    precision: str
    compile: bool
    batch: int
    seq_len: int

    def autocast(self) -> Any:
        bf16 = self.precision == "bf16"
        return torch.autocast(self.setting.device.type, torch.bfloat16, enabled=bf16)

    def compiled(self, module: Any) -> Any:
        return torch.compile(module) if self.compile else module


#: The models, as (full, quick, h100).
MODELS = {
    "22.8M": ({"dim": 256, "num_layers": 8, "num_heads": 4, "vocab_size": 32_000},
              {"dim": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 512},
              {"dim": 2048, "num_layers": 16, "num_heads": 16, "vocab_size": 32_000}),
    "tiny": ({"dim": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 512},
             {"dim": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 512}, None),
    "moe": ({"dim": 256, "num_layers": 4, "num_heads": 4, "vocab_size": 8192, "hidden_dim": 128,
             "moe": {"num_experts": 64, "top_k": 4}},
            {"dim": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 512, "hidden_dim": 16,
             "moe": {"num_experts": 4, "top_k": 2}},
            {"dim": 1024, "num_layers": 8, "num_heads": 16, "vocab_size": 32_000, "hidden_dim": 512,
             "moe": {"num_experts": 64, "top_k": 4}}),
}  # fmt: skip


def job(setting: Setting, model: str, precision: str = "fp32", compile: bool = False) -> Job:
    tokens = write_tokens(setting, setting.of(4_000_000, 100_000))
    if compile and setting.size == "quick":  # a compilation takes 5 s
        setting.stack.enter_context(torch.compiler.set_stance("force_eager"))
    batch, seq_len = setting.of(4, 2, 8), setting.of(512, 32, 2048)
    return Job(setting, tokens, setting.of(*MODELS[model]), precision, compile, batch, seq_len)


def config_file(case: Job, name: str) -> Path:
    """The job as a file of `forge-train run`."""
    path = case.setting.folder / f"{name}.toml"
    tables = {
        "run": {"dir": str(case.setting.folder / name)},
        "model": {k: v for k, v in case.model.items() if k != "moe"},
        "model.moe": case.model.get("moe", {}),
        "data": {"seq_len": case.seq_len},
        "data.sources.tokens": {"name": "tokens", "path": str(case.tokens)},
        "train": {"steps": 10**6, "global_batch": case.batch, "max_grad_norm": MAX_NORM},
        "optimizer": {"lr": LR},
        "parallel": {"precision": case.precision, "device": case.setting.device.type, "compile": case.compile},
        "metrics": {"console": "off"},
        "checkpoint": {"every_steps": 0},
        "eval": {"every_steps": 0},
        "sample": {"max_new_tokens": 0},
    }  # fmt: skip
    lines = [f"[{t}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items()) for t, keys in tables.items()]  # fmt: skip
    path.write_text("\n".join(lines))
    return path


def open_trainer(case: Job, name: str) -> Any:
    """A trainer that is ready for its next step.

    `fit` trains to the end. These private calls are its own, in its order: the sides must take turns step by step.
    """
    from forge_resilience import StopSignal
    from forge_train import Trainer, load_job

    trainer = Trainer(load_job(config_file(case, name)))
    trainer._join(None)
    trainer._open(case.setting.stack, StopSignal())  # not entered: SIGTERM ends this process
    case.setting.stack.callback(trainer.loader.close)
    return trainer


def forge(case: Job, name: str = "forge") -> Callable[[], object]:
    """A step of `forge-train run`: verified data, documents, metrics and the bad-step check are on."""
    trainer = open_trainer(case, name)

    def step() -> None:
        with trainer._extensions.around("around_step", trainer.progress.step + 1):
            trainer.train_step()
            trainer._between_steps()

    return step


def again(case: Job) -> Callable[[], object]:
    """Forge's side a second time."""
    return forge(case, "again")


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Fused AdamW without decay for norms, as in Forge's default."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)


def train_by_hand(
    case: Job, model: Any, forward: Callable[..., torch.Tensor]
) -> Callable[[], object]:
    """A step of the loop that a person writes: documents, one normalizer, clipping, fused AdamW.

    forward(tokens, positions, document_ids) -> logits (B, S, V).
    """
    parameters, optimizer = list(model.parameters()), adamw(model)
    batches = with_documents(case.tokens, case.seq_len, case.batch)

    def step() -> None:
        on_host = next(batches)
        tokens, labels, positions, _ = (
            t.to(case.setting.device, non_blocking=True) for t in on_host
        )
        count = int((on_host[1] != IGNORED).sum())
        with case.autocast():
            logits = forward(tokens, positions, on_host[3])
            loss = (
                F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
                / count
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(case: Job) -> Callable[[], object]:
    """Forge's model in that loop: what differs is the runner."""
    from forge_core import Transformer, TransformerConfig

    model = Transformer(TransformerConfig(**case.model, max_seq_len=case.seq_len))
    model = model.to(case.setting.device)
    return train_by_hand(case, model, lambda t, p, d: model(t, p, d))


# ---- no peer: saves, resumes, goodput

#: Of a day: preemptions, and seconds between saves.
PREEMPTIONS, INTERVAL, DAY = 10, 600, 86_400
FORMULA = "1 - (10 x (save + start + load) + 86,400 / 600 x blocked) / 86,400"


@dataclass(frozen=True)
class State:
    """Case of the row `resume`: a trainer's state and its store."""

    trainer: Any
    store: Any
    state: Any
    job: Path


def resume_case(setting: Setting) -> State:
    from forge_ckpt import Store

    case = job(setting, "22.8M")
    trainer = open_trainer(case, "forge")
    trainer.train_step()
    store = setting.stack.enter_context(Store(setting.folder / "store", keep_last=2))
    state = {"model": trainer.model, "optimizer": trainer.optimizer}
    store.save(0, state)
    return State(trainer, store, state, config_file(case, "started"))


def save(case: State) -> Callable[[], object]:
    return lambda: case.store.save(case.store.steps()[-1] + 1, case.state) and None


def blocked(case: State) -> Step:
    def run() -> None:
        case.store.save(case.store.steps()[-1] + 1, case.state, wait=False)

    return Step(run, after=case.store.wait)


def load(case: State) -> Callable[[], object]:
    return lambda: case.store.load(case.state) and None


def start(case: State) -> Callable[[], object]:
    """A process of `forge-train run` that does one step and saves nothing but its end."""
    command = [sys.executable, "-m", "forge_train", "run", str(case.job), "--train.steps", "1"]
    path = os.pathsep.join(p for p in sys.path if p.endswith("src"))
    env = {**os.environ, "PYTHONPATH": path}

    def run() -> None:
        subprocess.run(command, env=env, check=True, capture_output=True)

    return Step(run, before=lambda: shutil.rmtree(case.job.with_suffix(""), ignore_errors=True))


def goodput(seconds: dict[str, float]) -> dict[str, Any]:
    lost = PREEMPTIONS * (seconds["save"] + seconds["start"] + seconds["load"])
    paused = DAY / INTERVAL * seconds["blocked"]
    return {
        "save_and_resume_seconds": round(sum(seconds[n] for n in ("save", "start", "load")), 3),
        "goodput": round(1 - (lost + paused) / DAY, 5),
        "formula": FORMULA,
    }


_LOOP = "4 rows of 512 tokens; verified data, metrics, bad-step check; by hand: memmap, numpy boundaries, autocast, "
_LOOP += "F.cross_entropy, clip_grad_norm_, fused AdamW"
SAME = {"by_hand": 0.98}
ROWS = [
    *(
        Row(f"noise-{end}", job, {"forge": forge, "again": again}, "dense 22.8M fp32, Forge against itself",
            {"model": "22.8M"}, warmup=3)
        for end in ("start", "end")
    ),
    Row("runner-20m-bf16", job, {"forge": forge, "by_hand": by_hand}, "dense 22.8M bf16, Forge's model on both sides; " + _LOOP,
        {"model": "22.8M", "precision": "bf16"}, SAME),
    Row("runner-tiny", job, {"forge": forge, "by_hand": by_hand}, "dim 64, 2 layers, V 512, fp32; " + _LOOP,
        {"model": "tiny"}, SAME, causes={
            "by_hand": "both spend 58 to 67 % in the same matmuls and attention, and Forge starts 2,775 operators a step where the loop starts "
            "2,315: the grad norm, the decision on a bad step, metrics and the digest of samples take about 1 ms of 31"
        }),
    Row("resume", resume_case, {"save": save, "blocked": blocked, "load": load, "start": start},
        "dense 22.8M with AdamW's moments (274 MB): a verified save, the pause of one in the background, a verified load, "
        "and a process from its start to its first step and end", derive=goodput, warmup=1),
]  # fmt: skip
