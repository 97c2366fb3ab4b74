"""Damaged or different token files under the runner: one sentence, exit code 65, on all ranks in the same step."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch.distributed as dist

from forge_data import TokenFiles
from forge_data.prepare import prepare
from forge_testing.ranks import run_on_ranks
from forge_testing.runs import Fitted, fit, fit_on_ranks, make_job
from forge_train import Callback, Trainer, read_run

pytestmark = pytest.mark.lane("test")


class DamagedCopyOnRank1(Callback):
    """As if the second node had a copy of its own, with a flipped bit."""

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 4 and trainer.meshes.rank == 1:
            path = trainer.paths.path.parent / "damaged"
            trainer.loader.stream.source = TokenFiles(path)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_F93_a_damaged_block_of_one_rank_ends_all_in_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"some words {i}\n" for i in range(400)))
    for name in ("tokens", "damaged"):
        prepare([tmp_path / "text.txt"], tmp_path / name, document="line")
    tokens = tmp_path / "damaged/tokens.bin"
    tokens.write_bytes(tokens.read_bytes().replace(b"w", b"v", 1))
    fitted = fit_on_ranks(
        2,
        make_job(tmp_path),
        DamagedCopyOnRank1,
        data__sources={"a": {"name": "tokens", "path": str(tmp_path / "tokens")}},
        eval__every_steps=0,
        sample__max_new_tokens=0,
    )
    assert [(f.code, f.step) for f in fitted] == [(65, 4)] * 2
    (problem,) = fitted[0].problems
    assert "rank 1: step 5: InvalidData:" in problem
    assert "damaged/tokens.bin: block 0 (bytes 0.." in problem
    (event,) = [e for e in read_run(tmp_path / "run").events if e["event"] == "fault"]
    assert (event["rank"], event["code"]) == (1, 65)


def fit_with_own_files(job: Path) -> Fitted:
    """Train in this rank's folder, as if each node had a disk of its own under the same path."""
    overrides = {
        "data.sources": {"a": {"name": "tokens", "path": "tokens"}},
        "eval.every_steps": 0,
        "sample.max_new_tokens": 0,
        "metrics.console": "off",
    }
    with contextlib.chdir(job.parent / f"node{dist.get_rank()}"):
        return fit(job, overrides)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_ranks_with_other_data_are_found_before_the_first_step(tmp_path: Path) -> None:
    """Each copy is whole, so that no digest of a block is wrong: only a word of document 7 differs."""
    for node, word in enumerate(("some", "more")):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        lines = [f"{word if i == 7 else 'some'} words {i}\n" for i in range(400)]
        (folder / "text.txt").write_text("".join(lines))
        prepare([folder / "text.txt"], folder / "tokens", document="line")
    fitted = run_on_ranks(2, fit_with_own_files, make_job(tmp_path), timeout=240)
    assert [(f.code, f.step) for f in fitted] == [(65, 0)] * 2
    assert all("source.tokens" in problem for f in fitted for problem in f.problems)
