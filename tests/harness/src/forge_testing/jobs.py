"""A job that trains 12 steps in about a second."""

from __future__ import annotations

from pathlib import Path

TINY_JOB = """
[run]
dir = "{run_dir}"
[model]
dim = 16
num_layers = 1
num_heads = 2
[data]
seq_len = 32
[data.sources.text]
name = "builtin"
[train]
steps = 12
global_batch = 4
[optimizer]
lr = 1e-2
[parallel]
device = "cpu"
precision = "fp32"
[eval]
every_steps = 6
sequences = 4
[checkpoint]
every_steps = 3
[metrics]
every_steps = 1
[sample]
max_new_tokens = 8
"""
#: A mixture of eight experts, appended to the tiny job.
MIXTURE = """
[model.moe]
num_experts = 8
width_multiplier = 0.5
num_shared_experts = 1
shared_gate = true
bias_update_rate = 1e-3
sequence_loss_weight = 1e-2
z_loss_weight = 1e-3
"""


def write_job(folder: Path, extra: str = "", run_dir: str | Path | None = None) -> Path:
    """`folder/job.toml`: the tiny job with `extra` TOML appended; its run directory is `folder/run`."""
    path = folder / "job.toml"
    path.write_text(TINY_JOB.format(run_dir=run_dir or folder / "run") + extra)
    return path
