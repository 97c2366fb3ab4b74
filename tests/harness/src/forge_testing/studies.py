"""A study of a tiny model: one trunk, and two forks of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

STUDY = """
[study]
dir = "{dir}"
tokens_per_parameter = [2.0, 6.0]
{study}
[sizes.d8]
dim = 8
num_layers = 1
num_heads = 2
{sizes}
[optimizers.adamw]
lr = 1e-2
[schedules.wsd]
name = "wsd"
[base.data]
seq_len = 32
[base.data.sources.text]
name = "builtin"
[base.train]
global_batch = 8
[base.parallel]
device = "cpu"
precision = "fp32"
[base.eval]
sequences = 16
[base.checkpoint]
every_steps = 37
[base.metrics]
every_steps = 1
[base.sample]
max_new_tokens = 0
{base}
"""
TRUNK, SHORT, LONG = "d8-adamw-seed0-trunk", "d8-adamw-wsd-seed0-x2", "d8-adamw-wsd-seed0-x6"


def write_study(folder: Path, study: str = "", sizes: str = "", base: str = "") -> Path:
    path = folder / "study.toml"
    path.write_text(STUDY.format(dir=folder / "out", study=study, sizes=sizes, base=base))
    return path


def assert_shellcheck(script: Path) -> None:
    """ShellCheck finds nothing in a batch script."""
    done = subprocess.run(
        ["shellcheck", "--shell=bash", "--severity=style", "--exclude=SC2016", script],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
