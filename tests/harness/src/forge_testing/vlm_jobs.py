"""A job of colored squares that the runner trains in a second."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from forge_testing.squares import IMAGE, SIDE
from forge_train import Callback

#: The end of a job without evaluations.
SETTINGS = """
[optimizer]
lr = 1e-2
eps = 1e-4
[schedule]
name = "constant"
[parallel]
device = "cpu"
precision = "fp32"
[metrics]
every_steps = 1
console = "off"
[sample]
max_new_tokens = 0
"""
VLM_JOB = f"""
[run]
dir = "RUN"
[model]
name = "vlm"
dim = 16
num_layers = 2
num_heads = 2
max_seq_len = 16
init_std = 0.2
[model.vision]
name = "vit"
[model.vision.vit]
image_size = {SIDE}
patch_size = 4
dim = 16
num_layers = 1
num_heads = 2
[model.modalities.image]
first_id = {IMAGE}
[data]
seq_len = 8
[data.sources.squares]
name = "forge_testing.squares:Squares"
[train]
steps = 6
global_batch = 12
[eval]
every_steps = 3
sequences = 12
[checkpoint]
every_steps = 0
{SETTINGS}"""
#: In place of the encoder of the job: one of transformers.
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 4,
}
#: The same as keys of a job.
TRANSFORMERS = {
    "model.vision.name": "transformers",
    "model.vision.transformers": CLIP,
    "model.vision.select_layer": [-2],
    "model.vision.select_feature": "patch",
}


def flags(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys of a job as keyword arguments of `fit_on_ranks`."""
    return {key.replace(".", "__"): value for key, value in keys.items()}


def write_vlm_job(folder: Path, extra: str = "") -> Path:
    """`folder/job.toml`: the job with `extra` TOML appended; its run directory is `folder/run`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.toml"
    path.write_text(VLM_JOB.replace("RUN", str(folder / "run")) + extra)
    return path


class Killed(Callback):
    """A machine that is gone behind step `at`, before that step is saved."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
