"""Loops of strangers in twenty lines: they stop with 75, go on with the same bits, and skip what is not finite."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from forge_resilience import read_events
from forge_resilience.heartbeat import read_heartbeats

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.slow


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- a loop in plain torch

# Loss not finite in step 6 on one rank; a rank killed in step 9 of the first life; a step takes a while.
_FAULTS = """
import os, signal, sys, time
import nano_gpt
plain = nano_gpt.loss_of
def loss_of(model, step, rank):
    time.sleep(float(os.environ["SECONDS"]))
    if (step, rank, os.environ["FORGE_LIFE"], os.environ["KILL"]) == (9, 1, "0", "1"):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(model, step, rank) * (float("nan") if (step, rank) == (6, 1) else 1.0)
nano_gpt.loss_of = loss_of
sys.exit(nano_gpt.main(sys.argv[1]))
"""


def start(run: Path, seconds: float = 0.0, kill: bool = False) -> subprocess.Popen[str]:
    run.mkdir(exist_ok=True)
    environ = {"SECONDS": str(seconds), "KILL": str(int(kill)), "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-m", "forge_resilience.supervise", "--nproc=2", f"--journal={run}/events.jsonl",
         f"--heartbeats={run}/beats", "--", sys.executable, "-W", "ignore", "-c", _FAULTS, str(run)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path]), "OMP_NUM_THREADS": "1", **environ},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said = process.communicate(timeout=900)[1]
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_nanogpt_like_loop(tmp_path):
    code, said = end(start(tmp_path / "whole"))
    assert code == 0, said

    process = start(tmp_path / "hurt", seconds=0.1, kill=True)
    deadline = time.monotonic() + 600
    while not any((b.step or 0) >= 13 for b in read_heartbeats(tmp_path / "hurt/beats")):
        assert time.monotonic() < deadline
        assert process.poll() is None, end(process)
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    code, said = end(process)
    assert code == 75, said
    code, said = end(start(tmp_path / "hurt"))
    assert code == 0, said

    events = list(read_events(tmp_path / "hurt/events.jsonl"))
    names = [e["event"] for e in events if e["event"] not in ("save", "skip")]
    assert names == ["start", "restart", "resume", "stop", "resume", "done"]
    assert {e["step"] for e in events if e["event"] == "skip"} == {6}
    (restart,) = (e for e in events if e["event"] == "restart")
    assert (restart["rank"], restart["phase"], restart["step"]) == (1, "step", 9)
    wanted, got = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("whole", "hurt")
    )
    assert got["step"] == wanted["step"] == 24
    assert all(torch.equal(got["model"][name], value) for name, value in wanted["model"].items())


def test_the_wrap_is_twenty_lines():
    lines = (EXAMPLES / "nano_gpt.py").read_text().splitlines()
    assert sum("  # +" in line for line in lines) <= 20


# ---- transformers.Trainer


def trainer(folder: Path, stop_at: int = 0, bad: int = 0):
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Disturb(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step + 1 == stop_at:
                os.kill(os.getpid(), signal.SIGUSR1)

        def on_pre_optimizer_step(self, args, state, control, model, **_):
            if state.global_step + 1 == bad:
                next(model.parameters()).grad[0] = float("nan")

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    rows = torch.randint(0, 32, (64, 12), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        folder / "hf", max_steps=8, per_device_train_batch_size=2, save_steps=100, report_to="none",
        disable_tqdm=True, learning_rate=1e-2, use_cpu=True, max_grad_norm=0,
    )  # fmt: skip
    guard = example("trainer_guard").ForgeGuard(folder)
    data = [{"input_ids": ids, "labels": ids} for ids in rows]
    return Trainer(model, arguments, train_dataset=data, callbacks=[Disturb(), guard]), guard


def test_a_trainer_of_transformers(tmp_path):
    for name in ("transformers", "accelerate"):
        pytest.importorskip(name)
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole, guard = trainer(tmp_path / "whole", bad=3)
    whole.train()
    assert guard.exit_code == 0
    before = signal.getsignal(signal.SIGUSR1)

    stopped, guard = trainer(tmp_path / "stopped", stop_at=5, bad=3)
    stopped.train()
    assert (guard.exit_code, stopped.state.global_step) == (75, 5)
    assert signal.getsignal(signal.SIGUSR1) is before
    resumed, guard = trainer(tmp_path / "stopped")
    resumed.train(resume_from_checkpoint=True)
    assert (guard.exit_code, resumed.state.global_step) == (0, 8)

    events = [(e["event"], e["step"]) for e in read_events(tmp_path / "stopped/events.jsonl")]
    assert events == [
        ("start", 0), ("skip", 2), ("save", 5), ("stop", 5), ("resume", 5), ("save", 8), ("done", 8),
    ]  # fmt: skip
    wanted, got = whole.model.state_dict(), resumed.model.state_dict()
    assert all(value.isfinite().all() for value in got.values())
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


# ---- accelerate and Lightning


def test_a_loop_of_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    main = example("accelerate_stop").main

    def end(name, **options):
        code = main(tmp_path / name, **options)
        file = tmp_path / name / "model.safetensors"
        return code, safetensors.torch.load_file(file)["weight"]

    safetensors = pytest.importorskip("safetensors")
    importlib.import_module("safetensors.torch")
    code, full = end("full")
    assert code == 0
    code, _ = end(
        "stopped", on_step=lambda step: step == 3 and os.kill(os.getpid(), signal.SIGUSR1)
    )
    assert code == 75
    code, resumed = end("stopped")
    assert code == 0
    assert torch.equal(full, resumed)


def test_a_trainer_of_lightning(tmp_path):
    lightning = pytest.importorskip("lightning", reason="needs lightning")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            if self.global_step == 2 and not (tmp_path / "last.ckpt").exists():
                os.kill(os.getpid(), signal.SIGUSR1)
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.TensorDataset(torch.randn(16, 4))
    found = []
    for _ in range(2):
        stop = example("lightning_stop").ForgeStop(tmp_path / "last.ckpt")
        trainer = lightning.Trainer(
            max_steps=6, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, callbacks=[stop],
        )  # fmt: skip
        rows = torch.utils.data.DataLoader(data, batch_size=2)
        trainer.fit(Model(), rows, ckpt_path=stop.path_if_saved)
        found.append((stop.exit_code, trainer.global_step))
    assert found == [(75, 3), (0, 6)]
