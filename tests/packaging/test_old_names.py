"""Imports that a program of 0.1 has: each works until 0.3.0, and Python shows a warning for its line."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
IMPORTS = {
    "core": """
        from forge_core import initialise
        from forge_core.loss.fused import fused_cross_entropy
        from forge_core.model import initialise
        from forge_core.model.documents import SegmentPlan
        from forge_core.model.head import Head
        from forge_core.model.init import initialise
        from forge_core.model.mtp import NextTokenModule
        from forge_core.model.spec import AttentionSpec
        from forge_core.model.yarn import attention_factor
        """,  # language: old names
    "moe": """
        from forge_moe import Routed
        from forge_moe import Rule
        from forge_moe.balance import AuxLosses
        from forge_moe.capacity import row_limit
        from forge_moe.dispatch.hierarchical import TwoSplits
        from forge_moe.full_state import load_full_state
        from forge_moe.gemm import choose_products
        from forge_moe.grad_norm import expert_grad_norm
        from forge_moe.routers import Router
        from forge_moe.routers import Rule
        from forge_moe.sorted_experts import SortedExperts
        """,
    "parallel": """
        from forge_parallel import materialise
        from forge_parallel.axes import cut_sequence
        from forge_parallel.axes.context import join_sequence
        from forge_parallel.axes.tensor import width_of_cut_logits
        from forge_parallel.axes.vocab_fused import vocab_fused_cross_entropy
        from forge_parallel.compute import extra_problems
        from forge_parallel.legal import problems
        from forge_parallel.micro_batches import MicroBatches
        from forge_parallel.order import OrderError
        from forge_parallel.points import WholePoints
        from forge_parallel.stages import splits_backward
        """,  # language: old names
    "ckpt": """
        from forge_ckpt.commands import main
        from forge_ckpt.digests import DEFAULT
        from forge_ckpt.foreign import refuse_foreign
        from forge_ckpt.hf.headers import read_json
        from forge_ckpt.hf.store import store_hf
        from forge_ckpt.lock import NAME
        from forge_ckpt.objects import encode
        from forge_ckpt.read.arena import Arena
        from forge_ckpt.read.targets import check_state
        from forge_ckpt.tree import flatten
        from forge_ckpt.write.layout import FileLayout
        from forge_ckpt.write.retain import Retention
        from forge_ckpt.write.stream import write_checkpoint
        """,
    "data": """
        from forge_data.chat.config import ChatConfig
        from forge_data.phases import Stretch
        from forge_data.prepare.plan import Unit
        from forge_data.prepare.readers import find_inputs
        from forge_data.prepare.statistics import read_statistics
        from forge_data.sources.token_files import TokenFiles
        """,
    "resilience": """
        from forge_resilience.background_sink import BackgroundSink
        from forge_resilience.chaos import Striker
        from forge_resilience.chaos.processes import PROCESS_KINDS
        from forge_resilience.goodput import read_ledger
        from forge_resilience.health import exclude_nodes
        from forge_resilience.health.config import HealthConfig
        from forge_resilience.health.exclude import broken_nodes
        from forge_resilience.heartbeat import Beat
        from forge_resilience.local_workers import Outcome
        from forge_resilience.nonfinite import nonfinite
        from forge_resilience.policy import Outcome
        from forge_resilience.slurm.commands import Queue
        from forge_resilience.supervise.lives import supervise
        from forge_resilience.supervise.place import NodeSlot
        """,
    "train": """
        from forge_train import evaluate_run
        from forge_train import extract_run
        from forge_train import read_study
        from forge_train import replay_step
        from forge_train.trainer.callbacks import Callback
        """,
    "vlm": """
        from forge_vlm.data import Conversations
        from forge_vlm.data.shards import PictureShards
        from forge_vlm.fusion import MoMa
        from forge_vlm.fusion.choice import token_choice
        from forge_vlm.loss import modality_losses
        from forge_vlm.mask import flex_mask
        from forge_vlm.plan import SequencePlan
        from forge_vlm.vision.packed import PackedViT
        """,
}


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("package", IMPORTS)
def test_each_old_import_shows_a_warning(package: str, tmp_path: Path) -> None:
    """A process of its own: Python's default filters show a DeprecationWarning only for lines of the program itself."""
    lines = IMPORTS[package].split("\n")
    program = tmp_path / "program.py"
    program.write_text("\n".join(line.strip() for line in lines))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    shown = re.findall(r"program\.py:(\d+): DeprecationWarning: ", done.stderr)
    wanted = [i for i, line in enumerate(lines, 1) if line.strip()]
    assert sorted({int(number) for number in shown}) == wanted, done.stderr


@pytest.mark.lane("test")
def test_each_table_of_old_names_has_the_same_end() -> None:
    tables = sorted(ROOT.glob("*/*/src/*/_renamed.py"))
    assert len(tables) == 9
    for table in tables:
        project = tomllib.loads((table.parents[2] / "pyproject.toml").read_text())["project"]
        assert Version(project["version"]) < Version("0.3.0"), table
        first = table.read_text().split("\n")[0]
        assert first.endswith('until 0.3.0 with a DeprecationWarning."""'), table
