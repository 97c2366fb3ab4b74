"""A run that dies and is started again ends with the same bits as one that never died."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import torch

from forge_testing import forge_train, kill_after_step, start, write_job
from forge_train import load_trained, read_run


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_trained(run_dir)[0].state_dict()


def columns(run_dir: Path) -> dict[str, list]:
    """The columns of metrics.jsonl that do not measure time or memory."""
    metrics = read_run(run_dir).metrics
    same = ("step", "loss", "val_loss", "grad_norm", "lr", "tokens", "flops", "instances")
    return {name: metrics[name] for name in same}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = forge_train("run", write_job(folder))
    assert done.code == 0, done.err
    return folder / "run"


def assert_same_run(run_dir: Path, reference: Path) -> None:
    mine, theirs = weights(run_dir), weights(reference)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name
    assert columns(run_dir) == columns(reference)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_sigkill_at_random_steps_then_the_same_command_gives_the_same_bits(
    tmp_path: Path, undisturbed: Path, seed: int
) -> None:
    job, instants = write_job(tmp_path), random.Random(seed)
    step = 0
    for _ in range(2):
        step = instants.randint(step + 1, 11)
        killed = kill_after_step(start("run", job), tmp_path / "run/metrics.jsonl", step)
        assert killed.code in (-signal.SIGKILL, 0)
        if step >= 10:
            break
    done = forge_train("run", job)
    assert done.code == 0, done.err
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_leaves_with_75_and_the_same_command_resumes(
    tmp_path: Path, undisturbed: Path, sig: signal.Signals
) -> None:
    job = write_job(tmp_path, "\n", None)
    stopped = kill_after_step(start("run", job, "--train.steps", "4000", "--checkpoint.every_steps", "0"),
                              tmp_path / "run/metrics.jsonl", 2, sig)  # fmt: skip
    assert stopped.code == 75, stopped.err
    events = read_run(tmp_path / "run").events
    assert [e["event"] for e in events[-2:]] == ["save", "stop"]
    assert events[-1]["signal"] == sig.name
    assert events[-2]["step"] == events[-1]["step"] > 0, "the stop lost steps"
    again = forge_train("run", job, "--train.steps", str(events[-1]["step"] + 2))
    assert again.code == 0, again.err
    resumed = [e for e in read_run(tmp_path / "run").events if e["event"] == "resume"]
    assert resumed[-1]["step"] == events[-1]["step"]


@pytest.mark.slow
def test_F37_the_last_step_is_saved_whatever_the_interval(tmp_path: Path) -> None:
    done = forge_train("run", write_job(tmp_path), "--checkpoint.every_steps", "5")
    assert done.code == 0, done.err
    assert load_trained(tmp_path / "run")[2] == 12


@pytest.mark.slow
def test_a_flipped_bit_in_the_newest_checkpoint_falls_back_and_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: Path
) -> None:
    job = write_job(tmp_path)
    kill_after_step(start("run", job), tmp_path / "run/metrics.jsonl", 11)
    # the kill may meet a save before its rename
    newest = max(p for p in (tmp_path / "run/checkpoints").glob("step-*") if not p.suffix)
    victim = max(newest.iterdir(), key=lambda f: f.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    done = forge_train("run", job)
    assert done.code == 0, done.err
    assert newest.name in done.err
    resumed = [e["step"] for e in read_run(tmp_path / "run").events if e["event"] == "resume"]
    assert resumed == [int(newest.name.removeprefix("step-")) - 3]
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_every_checkpoint_corrupt_is_exit_66_and_changes_nothing(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    assert forge_train("run", job).code == 0
    for manifest in (tmp_path / "run/checkpoints").glob("step-*/manifest.json"):
        manifest.write_text(manifest.read_text()[:-40])
    failed = forge_train("run", job, "--train.steps", "20")
    assert failed.code == 66, (failed.code, failed.err)
    assert "Traceback" not in failed.err
