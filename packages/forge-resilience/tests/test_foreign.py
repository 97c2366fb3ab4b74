"""Programs that know nothing of Forge under the supervisor: started again after a crash, stopped by TERM, continued."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_resilience import read_events
from forge_resilience.heartbeat import read_heartbeats

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="the supervisor reads /proc"),
]

# Six steps, with a checkpoint after each: killed after the second one, and waiting for a stop after the fourth.
_STEPS = """
import os, signal, sys, time
from pathlib import Path
here = Path(sys.argv[1])
def saved(step, stopped=lambda: False):
    with (here / "steps").open("a") as file:
        file.write(f"{step} ")
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 4:
        (here / "waits").touch()
        while not stopped():
            time.sleep(0.01)
"""
_PLAIN = """
state = here / "state"
for step in range(int(state.read_text()) if state.exists() else 0, 6):
    state.write_text(str(step + 1))
    saved(step + 1)
"""
_TRANSFORMERS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
class Saved(TrainerCallback):
    def on_save(self, args, state, control, **_):
        saved(state.global_step)
sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
arguments = TrainingArguments(
    here / "hf", max_steps=6, per_device_train_batch_size=2, save_steps=1, report_to="none", disable_tqdm=True, use_cpu=True
)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (16, 12))]
trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Saved()])
trainer.train(resume_from_checkpoint=any((here / "hf").glob("checkpoint-*")))
"""
# Lightning has a handler of TERM, raises SystemExit without a code, and so would end with 0 as if it were done.
_LIGHTNING = """
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
class Saved(ModelCheckpoint):
    def on_train_batch_end(self, trainer, *args, **kwargs):
        super().on_train_batch_end(trainer, *args, **kwargs)
        saved(trainer.global_step, lambda: trainer.received_sigterm)
rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=2)
trainer = lightning.Trainer(
    max_steps=6, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[Saved(here / "checkpoints", save_last=True, every_n_train_steps=1)],
)
last = here / "checkpoints/last.ckpt"
try:
    trainer.fit(Model(), rows, ckpt_path=last if last.exists() else None)
except SIGTERMException:
    sys.exit(75)
"""


def start(folder: Path, program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "forge_resilience.supervise", f"--journal={folder}/events.jsonl",
         f"--heartbeats={folder}/beats", "--start_seconds=1", "--step_seconds=1", "--",
         sys.executable, "-W", "ignore", "-c", _STEPS + program, str(folder)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def needs(*modules: str) -> list[pytest.MarkDecorator]:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return [pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(_PLAIN, id="plain"),
        pytest.param(_TRANSFORMERS, id="transformers", marks=needs("transformers", "accelerate")),
        pytest.param(_LIGHTNING, id="lightning", marks=needs("lightning")),
    ],
)
def test_a_crash_is_started_again_and_TERM_ends_with_75(tmp_path, program):
    process = start(tmp_path, program)
    deadline = time.monotonic() + 600
    while not (tmp_path / "waits").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.terminate()
    said = process.communicate(timeout=600)[1]
    assert process.returncode == 75, said
    (restart,) = read_events(tmp_path / "events.jsonl")
    assert (restart["event"], restart["life"]) == ("restart", 1)
    assert "SIGKILL" in restart["cause"]

    process = start(tmp_path, program)
    said = process.communicate(timeout=600)[1]
    assert process.returncode == 0, said
    assert (tmp_path / "steps").read_text() == "1 2 3 4 5 6 "
    assert read_heartbeats(tmp_path / "beats") == []
