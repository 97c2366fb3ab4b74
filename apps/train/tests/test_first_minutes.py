"""The first minutes of a user: no GPU, no extras, no account, and answers that help."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forge_testing import forge_train, kill_after_step, start, wait_for_step, write_job
from forge_testing.models import Counting
from forge_testing.problems import rejects
from forge_train import ConfigError, Trainer, load_job, load_trained, read_run
from forge_train.report.describe import key_rows

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[3]
#: Name files of a user's own; tests/data/test_chat_forge.py and tests/vlm/test_recipe_qwen3_vl.py run them on some.
OWN_FILES = ("chat.toml", "qwen3_vl.toml")
STUDY = "study.toml"  # no job: test_sweep.py reads it
SHIPPED = [
    path
    for folder in ("apps/train/configs", "examples")
    for path in sorted((ROOT / folder).glob("**/*.toml"))
    if "example_lab" not in path.parts  # needs its distribution
    and path.name not in (*OWN_FILES, STUDY)
]

# Runs the tiny job in an interpreter where the extras cannot be imported.
WITHOUT_EXTRAS = """
import sys
for extra in ("wandb", "transformers", "datasets", "tensorboard", "tokenizers", "torchao"):
    sys.modules[extra] = None
from forge_train.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_F79_a_machine_without_gpu_prints_its_first_loss_line(tmp_path: Path) -> None:
    done = forge_train("run", write_job(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.code == 0, done.err
    assert "step 1/12  loss 5." in done.out  # ln(257) = 5.55


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_F80_help_shows_type_default_and_meaning(tmp_path: Path) -> None:
    shown = forge_train("run", write_job(tmp_path), "--help", COLUMNS="90").out
    row = shown[
        shown.index("  train.global_batch  (int, at least 1 and at most 1048576; default 4)") :
    ][:200]
    (help,) = (row.meaning for row in key_rows() if row.key == "train.global_batch")
    assert help[:20] in row


def test_F81_a_bad_configuration_is_found_before_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    with rejects("model.dim", 16, "divides", ConfigError):
        Trainer(load_job(write_job(tmp_path), {"model.num_heads": 3}))
    assert not (tmp_path / "run").exists()


@pytest.mark.lane("quick")
def test_F82_hooks_from_the_configuration_and_from_code(tmp_path: Path) -> None:
    name = "forge_testing.models:Counting"
    mine = Counting()
    trainer = Trainer(
        load_job(write_job(tmp_path), {"callbacks.count.name": name}), callbacks=[mine]
    )
    trainer.fit()
    expected = {"start": 1, "step_end": 12, "log": 12, "evaluation": 2, "checkpoint": 4, "end": 1}
    assert [c.calls for c in trainer.run.extensions if isinstance(c, Counting)] == [
        expected,
        expected,
    ]


def test_F83_doctor_assumes_no_gpu() -> None:
    seen = forge_train("doctor", "--json", CUDA_VISIBLE_DEVICES="")
    report = json.loads(seen.out)
    assert seen.code == report["exit_code"] in (0, 1)
    states = {f["what"]: f["state"] for f in report["findings"]}
    assert states["accelerator"] == states["computing"] == "ok"


@pytest.mark.slow
def test_F84_a_small_model_needs_no_extra(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_EXTRAS, "run", str(write_job(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout


@pytest.mark.slow
def test_F84_an_extra_that_is_asked_for_and_missing_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_EXTRAS, "run", str(write_job(tmp_path))]
    done = subprocess.run(
        [*command, "--metrics.tensorboard", "true"], capture_output=True, text=True
    )
    assert done.returncode == 78
    assert "forge-train[track]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.lane("quick")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_F85_every_shipped_configuration_loads(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    if path.parent.name == "digits":  # reads files that its first command writes
        from examples.digits.write import write as write_digits

        pytest.importorskip("sklearn")
        write_digits(tmp_path / "runs/digits_data")
        monkeypatch.chdir(tmp_path)
    trainer = Trainer(load_job(path))
    assert trainer.total_steps > 0


@pytest.mark.slow
def test_the_example_of_a_hook_runs(tmp_path: Path) -> None:
    done = forge_train(
        "run", "examples/weight_norms.toml", "--run.dir", tmp_path / "run",
        "--train.steps", "20", "--schedule.warmup_steps", "0", "--train.global_batch", "2",
        "--eval.every_steps", "0", "--sample.max_new_tokens", "0", cwd=ROOT,
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = [json.loads(r) for r in (tmp_path / "run/weight_norms.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [10, 20]
    assert 0 < rows[0]["lm_head.weight"] < rows[1]["lm_head.weight"]


@pytest.mark.slow
def test_a_run_records_how_it_was_made(tmp_path: Path) -> None:
    assert forge_train("run", write_job(tmp_path), "--optimizer.lr", "0.02", cwd=ROOT).code == 0
    run = read_run(tmp_path / "run")
    assert run.config["optimizer"]["lr"] == 0.02
    assert "lr = 0.02 # flag" in (tmp_path / "run/config.toml").read_text()
    assert torch.__version__.startswith(run.environment["versions"]["torch"])  # or "2.11.0+cu130"
    assert len(run.environment["git"]["commit"]) == 40
    assert run.environment["command"][-2:] == ["--optimizer.lr", "0.02"]
    assert run.metrics["step"] == list(range(1, 13))
    assert run.metrics["val_loss"].count(None) == 10
    assert (run.events[0]["event"], run.events[-1]["event"]) == ("start", "done")


@pytest.mark.slow
def test_the_resolved_configuration_runs_again(tmp_path: Path) -> None:
    assert forge_train("run", write_job(tmp_path)).code == 0
    copy = tmp_path / "run/config.toml"
    again = forge_train("run", copy, "--run.dir", tmp_path / "again")
    assert again.code == 0, again.err
    first, second = (read_run(tmp_path / d).metrics["loss"] for d in ("run", "again"))
    assert first == second
    set_keys = [(tmp_path / f"{d}/config.toml").read_text().count("# /") for d in ("run", "again")]
    assert set_keys[1] < 1.5 * set_keys[0], "the second file says what is no default, too"


@pytest.mark.slow
def test_the_commands_shown_at_the_end_work(tmp_path: Path) -> None:
    done = forge_train("run", write_job(tmp_path), "--run.dir", tmp_path / "my run")
    end = done.out[done.out.index("\nnext\n") :].splitlines()
    shown = [line.split("#")[0].split("forge-train ")[1] for line in end if "forge-train " in line]
    assert len(shown) == 3, done.out
    for command in shown:
        again = forge_train(*shlex.split(command))
        assert again.code == 0, (command, again.err)
        assert "Warning" not in again.err
    assert read_run(tmp_path / "my run").metrics["step"][-1] == 24
    assert read_run(tmp_path / "my run-2").metrics["step"][-1] == 24  # of the second command


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    assert forge_train("run", job).code == 0
    before = read_run(tmp_path / "run").metrics
    again = forge_train("run", job)
    assert again.code == 0, again.err
    assert "done: step 12 of 12" in again.out
    assert read_run(tmp_path / "run").metrics["step"] == before["step"]


@pytest.mark.slow
def test_accumulation_changes_nothing_but_rounding(tmp_path: Path) -> None:
    losses = []
    for i, micro_batch in enumerate(("4", "2", "1")):
        folder = tmp_path / str(i)
        folder.mkdir()
        done = forge_train("run", write_job(folder), "--train.micro_batch", micro_batch)
        assert done.code == 0, done.err
        losses.append(torch.tensor(read_run(folder / "run").metrics["loss"], dtype=torch.float64))
    for other in losses[1:]:
        # fp32 sums in another order, through 12 steps of AdamW
        torch.testing.assert_close(other, losses[0], rtol=1e-4, atol=0)


@pytest.mark.slow
def test_generate_streams_the_same_text_for_the_same_seed(tmp_path: Path) -> None:
    assert forge_train("run", write_job(tmp_path)).code == 0
    flags = ("--prompt", "If ", "--max_new_tokens", "20", "--seed", "3")
    first = forge_train("generate", tmp_path / "run", *flags)
    assert first.code == 0, first.err
    assert first.out.startswith("If ")
    assert forge_train("generate", tmp_path / "run", *flags).out == first.out
    assert forge_train("generate", tmp_path / "run", *flags[:-1], "4").out != first.out


@pytest.mark.slow
def test_generate_reads_next_to_a_run_that_trains(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    process = start("run", job, "--train.steps", "100000")
    wait_for_step(process, tmp_path / "run/metrics.jsonl", 4, saved=3)
    shown = forge_train("generate", tmp_path / "run", "--prompt", "If ", "--max_new_tokens", "5")
    stopped = kill_after_step(process, tmp_path / "run/metrics.jsonl", 1, 15)
    assert shown.code == 0, shown.err
    assert stopped.code == 75
    assert load_trained(tmp_path / "run")[2] > 3


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path: Path) -> None:
    failed = forge_train(
        "run", write_job(tmp_path), "--optimizer.lr", "1e30", "--train.max_grad_norm", "none"
    )
    assert failed.code == 76
    assert "step 2" in failed.err
    assert "Traceback" not in failed.err
    model, _, step = load_trained(tmp_path / "run") if _has_steps(tmp_path) else (None, None, 0)
    assert model is None or all(bool(p.isfinite().all()) for p in model.parameters()), step


@pytest.mark.slow
def test_a_closed_pipe_changes_neither_run_nor_exit_code(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    process = start("run", job, "--train.steps", "100000")
    assert process.stdout is not None
    process.stdout.close()
    stopped_after = 5
    wait_for_step(process, tmp_path / "run/metrics.jsonl", stopped_after)
    process.terminate()
    assert process.wait(60) == 75
    assert load_trained(tmp_path / "run")[2] >= stopped_after


@pytest.mark.slow
def test_a_full_disk_is_one_message_and_damages_no_checkpoint(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    assert forge_train("run", job, "--train.steps", "6").code == 0
    good = load_trained(tmp_path / "run")[2]
    # files may not grow over 20 kB: rows still fit, the tensors of a checkpoint do not
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
    code = limit + "from forge_train.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", str(job)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,  # no checkout, so no git.patch of unknown size
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "run/checkpoints") in done.stderr
    assert load_trained(tmp_path / "run")[2] == good


def _has_steps(folder: Path) -> bool:
    return any(not p.suffix for p in (folder / "run/checkpoints").glob("step-*"))
