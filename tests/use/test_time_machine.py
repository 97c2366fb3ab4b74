"""forge-train replay and bisect: a step again with the same bits, and the place where two runs part."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from forge_core import Transformer, TransformerConfig, initialize
from forge_core.interp import ActivationStore
from forge_core.model.feed_forward import FeedForward
from forge_data import Loader, open_training
from forge_lab.cli import replay, study
from forge_lab.study.bisect import bisect_runs, find_interval
from forge_lab.study.difference import Difference, first_difference
from forge_lab.study.private_job import find_start, private_job
from forge_lab.study.record import Record, Recorder
from forge_lab.study.replay import COMPARED, replay_step, train_again
from forge_testing import run_on_ranks
from forge_testing.problems import rejects
from forge_testing.runs import (
    as_rank,
    assert_same_bits,
    fit_alone,
    fit_on_ranks,
    full,
    make_job,
    saved_tensors,
)
from forge_train import Callback, ConfigError, StateError, Trainer, load_job
from forge_train.errors import NumericsError

pytestmark = pytest.mark.lane("test")

MOE = """
[model.moe]
num_experts = 4
top_k = 2
width_multiplier = 0.5
"""
FLIPPED = "layers.2.feed_forward.down_proj.weight"


class Flip(Callback):
    """Flips the sign of one weight before step 37."""

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 36:
            with torch.no_grad():
                dict(trainer.model.named_parameters())[FLIPPED][3, 5] *= -1.0


_forward = FeedForward.forward
_modules: list[Any] = []


def broken_in_layer_2(self: Any, *args: Any) -> torch.Tensor:
    """The feed-forward of the third layer is a thousandth too large."""
    if self not in _modules:
        _modules.append(self)
    out = _forward(self, *args)
    return out * 1.001 if _modules.index(self) == 2 else out


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def same_as_logged(said: str) -> list[str]:
    """Names of the lines of a replay with one number and words: those that differ show the logged number, too."""
    return re.findall(rf"^  ({'|'.join(COMPARED)}) +\S+ +[^\d\n]+$", said, re.MULTILINE)


def record(run: Path, start: int, end: int, folder: Path, callbacks: bool = False) -> Path:
    """One rank or process of `replay --record`."""
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder, run, start + 1, end)
    job = private_job(run, start, folder.parent / f"{folder.name}-private", None, callbacks)
    train_again(job, recorder)
    recorder.write_head(start, callbacks)
    return folder


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize(
    ("extra", "overrides"),
    [
        ("", {"train.micro_batch": 4, "metrics.every_steps": 2}),
        (MOE, {"model.moe.bias_update_rate": 1e-2}),
        ("", {"optimizer.name": "schedule_free_adamw", "schedule.name": "constant"}),
    ],
    ids=["accumulated", "mixture", "schedule-free"],
)
def test_a_step_is_the_same_bits(tmp_path: Path, extra: str, overrides: dict[str, Any]) -> None:
    job = make_job(tmp_path, extra)
    options = {"metrics.console": "off", "checkpoint.keep_last": 9, **overrides}
    fit_alone(job, **options)
    run = tmp_path / "run"
    before = tree(run)
    found = replay_step(run, 8)
    assert (found.start, found.logged is None, found.differs) == (6, False, {})
    # the state behind step 9 is that of the run's checkpoint
    found = replay_step(run, 9)
    saved = {k.partition(".")[2]: v for k, v in saved_tensors(run, 9).items() if k[0] in "mo"}
    mine = full(found.trainer)
    assert len(mine) > 10
    assert_same_bits(mine, {name: saved[name] for name in mine})
    assert tree(run) == before
    assert find_start(run, 7) == 6
    # the initial state, where there is no checkpoint before
    found = replay_step(run, 2)
    assert (found.start, found.differs) == (0, {})


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_step_after_rollbacks_leaves_out_what_they_left_out(tmp_path: Path) -> None:
    """Back to step 6 and again to step 6, whose checkpoint is gone."""
    rollbacks = "tests.resume.test_rollback"
    options = {
        "metrics.console": "off",
        "train.steps": 11,
        "train.objective": f"{rollbacks}:poisoned",
        "train.objective_options.last": 90,
        "resilience.nonfinite.action": "rollback",
        "resilience.nonfinite.max_in_a_row": 0,
        "resilience.rollback.batches_before": 1,
        "resilience.rollback.lr_factor": 0.5,
        "checkpoint.every_steps": 6,
        "checkpoint.keep_last": 1,
    }
    fit_alone(make_job(tmp_path), **options)
    run = tmp_path / "run"
    before = tree(run)
    for step in (6, 7, 9):
        found = replay_step(run, step)
        assert (found.start, found.differs, found.changed) == (0, {}, {})
        assert not {row.instance for row in found.seen} & {*range(72, 96)}
    assert tree(run) == before
    # numbers that the run did not have end a replay
    with pytest.raises(NumericsError, match=r"\bstep 7\b"):
        replay_step(run, 9, settings={"train.objective_options.last": 110})


@pytest.mark.slow
def test_a_fork_is_replayed_from_what_it_began_from(tmp_path: Path) -> None:
    options = {"metrics.console": "off", "checkpoint.keep_last": 9, "schedule.name": "constant"}
    trunk, run = make_job(tmp_path / "trunk"), tmp_path / "run"
    fit_alone(trunk, **options)
    source = {"init.from": str(tmp_path / "trunk/run")}
    fit_alone(make_job(tmp_path), **options, **source)
    fit_alone(trunk, **options, **{"train.steps": 15})  # its newest checkpoint is another one now
    assert replay_step(run, 2).differs == {}
    # one that goes on at its parent's step
    goes_on = {
        "init.from": f"{source['init.from']}@6",
        "init.keep": ["weights", "optimizer", "cursor"],
    }
    fit_alone(make_job(tmp_path / "on"), **options, **goes_on)
    run = tmp_path / "on/run"
    found = replay_step(run, 8)
    assert (found.start, found.differs) == (6, {})
    with rejects("--step", 6, "range", ConfigError, where="7 to 12"):
        replay_step(run, 6)
    (run / "model.toml").write_text("")  # an imported trunk: init.from names its weights
    assert find_start(run, 8) == 6


@pytest.mark.slow
def test_a_run_from_hugging_face_is_replayed_from_its_first_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.use.test_hugging_face import save

    save("Llama", tmp_path / "hf")
    job = make_job(tmp_path)
    text = job.read_text()
    job.write_text(text[: text.index("[model]")] + text[text.index("[data]") :])
    fit_alone(
        job, **{"metrics.console": "off", "init.from": str(tmp_path / "hf"), "train.steps": 2}
    )
    found = replay_step(tmp_path / "run", 2)
    assert (found.start, found.differs, found.changed) == (0, {}, {})


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_keys_that_a_later_attempt_changed_are_named(tmp_path: Path) -> None:
    options = {"metrics.console": "off", "checkpoint.keep_last": 9, "schedule.name": "constant"}
    job, run = make_job(tmp_path), tmp_path / "run"
    for steps, lr in ((6, 1e-2), (9, 3e-3), (12, 1e-3)):
        fit_alone(job, **options, **{"train.steps": steps, "optimizer.lr": lr})
    found = replay_step(run, 5)
    assert found.changed == {"train.steps": [6, 12], "optimizer.lr": [1e-2, 1e-3]}
    assert "lr" in found.differs
    found = replay_step(run, 8, settings={"optimizer.lr": 3e-3})
    assert (found.changed, found.differs) == ({"train.steps": [9, 12]}, {})
    found = replay_step(run, 11)
    assert (found.changed, found.differs) == ({}, {})


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_what_a_step_saw(tmp_path: Path) -> None:
    fit_alone(make_job(tmp_path), **{"metrics.console": "off"})
    run = tmp_path / "run"
    store = ActivationStore(["layers.*.resid_post"])
    seen: list[int] = []

    def hook(trainer: Trainer) -> Any:
        seen.append(trainer.progress.step)
        return store.watch(trainer.model)

    found = replay_step(run, 5, hooks=[hook], anomaly=True)
    assert found.differs == {} and seen == [4]  # noqa: PT018
    assert store["layers.0.resid_post"].shape == (12, 32, 16)
    assert not torch.is_anomaly_enabled()
    wrong = dataclasses.replace(found, logged={**found.row, "loss": 1.0})
    assert wrong.differs == {"loss": (1.0, found.row["loss"])}
    # slowly, from the source itself
    config = load_job(run / "config.toml").config
    stream = open_training(config.data)
    loader = Loader(stream, 12)
    batches = [next(loader) for _ in range(5)]
    assert [row.instance for row in found.seen] == sorted(batches[4].instance_ids.tolist())
    offsets = stream.source.documents
    for row, tokens in zip(found.seen, batches[4].tokens):
        at = int(stream.rows(np.array([row.instance]))[0]) * 32
        places = range(at, min(at + 32, stream.source.num_tokens))
        documents = [max(d for d, o in enumerate(offsets) if o <= place) for place in places]
        assert row.documents == list(dict.fromkeys(documents))
        text = bytes(tokens[: documents.count(documents[0])].tolist()).decode(errors="replace")
        assert (row.source, row.texts[0]) == ("text", text)


def shows(trainer: Trainer) -> Any:
    """A hook that says what it is called around."""
    print("hook before step", trainer.progress.step + 1)
    stack = contextlib.ExitStack()
    stack.callback(lambda: print("hook behind step", trainer.progress.step))
    return stack


@pytest.mark.slow
def test_a_debugger_and_a_hook_on_the_command_line(tmp_path: Path) -> None:
    fit_alone(make_job(tmp_path), **{"metrics.console": "off"})
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "forge_train", "replay", str(tmp_path / "run"), "--step", "5"]  # fmt: skip

    def type_in(keys: str) -> tuple[int, str, str]:
        flags = ["--debugger", "--hook", f"{__name__}:shows"]
        environment = {**os.environ, "TMPDIR": str(temporary)}
        done = subprocess.run([*command, *flags], input=keys, capture_output=True, text=True, env=environment)  # fmt: skip
        assert not list(temporary.glob("forge-*"))
        return done.returncode, done.stdout, done.stderr

    code, out, _ = type_in("p trainer.progress.step\nnext\np trainer.progress.step\ncontinue\n")
    assert code == 0
    assert "(Pdb) 4\n" in out and "(Pdb) 5\n" in out  # noqa: PT018
    assert out.index("hook before step 5") < out.index("(Pdb)") < out.index("hook behind step 5")
    assert same_as_logged(out) == list(COMPARED)
    code, _, err = type_in("quit\n")
    assert (code, len(err.splitlines())) == (1, 1)
    assert err.startswith("forge-train: ") and err.endswith(" step 5\n")  # noqa: PT018


def test_invalid_arguments_are_rejected(tmp_path: Path) -> None:
    fit_alone(make_job(tmp_path), **{"metrics.console": "off"})
    run = tmp_path / "run"
    replayed = ["replay", str(run), "--step", "4"]
    for call, key, value, code in (
        (lambda: replay_step(run, 13), "--step", 13, "range"),
        (lambda: replay_step(run, 0), "--step", 0, "range"),
        (lambda: replay_step(tmp_path, 1), "run_dir", str(tmp_path), "not_found"),
        (lambda: replay_step(run, 4, output=run / "x"), "--output", str(run / "x"), "inside"),
        (lambda: replay_step(run, 4, settings={"model.dim": 8}), "--model.dim", ..., "fixed"),
        (lambda: replay([*replayed[1:], "--model.dim", "8"]), "--model.dim", ..., "fixed"),
        (lambda: study(["bisect", str(run), str(run)]), "run_b", str(run), "duplicate"),
        (lambda: study([*replayed, "--from_step", "3"]), "--from_step", 3, "requires"),
        (lambda: study([*replayed, "--set", "x"]), "--set", "x", "form"),
    ):
        with rejects(key, value, code, ConfigError):
            call()
    (run / "model.toml").write_text("")
    with rejects("--step", 2, "imported", StateError):
        find_start(run, 2)


def runs(tmp_path: Path, **of_b: Any) -> tuple[Path, Path]:
    """Two runs of a model with three layers, 45 steps each."""
    shared = {
        "metrics.console": "off",
        "model.num_layers": 3,
        "train.steps": 45,
        "train.global_batch": 4,
        "checkpoint.every_steps": 10,
        "checkpoint.keep_last": 9,
    }
    found = []
    for name, more in (("a", {}), ("b", of_b)):
        fit_alone(make_job(tmp_path / name), **shared, **more)
        found.append(tmp_path / name / "run")
    return found[0], found[1]


@pytest.mark.slow
def test_a_flipped_weight_is_found_by_step_and_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = runs(tmp_path, **{"callbacks.flip.name": "tests.use.test_time_machine:Flip"})
    interval = find_interval(a, b)
    assert (interval.start, interval.end, interval.cause) == (30, 37, "loss of step 37")
    assert study(["bisect", str(a), str(b), "--callbacks", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["difference"]["step"] == 37
    assert (found["difference"]["quantity"], found["difference"]["name"]) == ("weight", FLIPPED)
    assert found["difference"]["others"] == []
    assert re.search(rf"{re.escape(FLIPPED)} .* step 37\b", found["text"])
    # without it the fault is one that the code does not make again, and its step is known
    verdict = bisect_runs(a, b, record)
    assert (verdict.difference, verdict.departs) == (None, (None, 37))
    assert "B departs" in verdict.text and "--callbacks" in verdict.text  # noqa: PT018
    # the same weights, and a module that computes otherwise
    with mock.patch("forge_core.model.feed_forward.FeedForward.forward", broken_in_layer_2):
        record(a, 30, 32, tmp_path / "broken")
    record(a, 30, 32, tmp_path / "right")
    wrong = first_difference(Record(tmp_path / "right"), Record(tmp_path / "broken"))
    assert wrong is not None
    assert (wrong.step, wrong.quantity, wrong.name) == (31, "output", "layers.2.feed_forward")
    assert study(["bisect", str(tmp_path / "right"), str(tmp_path / "right")]) == 0


@pytest.mark.slow
def test_the_first_cause_is_named(tmp_path: Path) -> None:
    options = {"metrics.console": "off", "schedule.name": "constant", "train.steps": 3}
    a = tmp_path / "a/run"
    fit_alone(make_job(tmp_path / "a"), **options)
    for name, more, start, difference, text in (
        ("length", {"train.steps": 6}, 3, None, r"\b3 .*\bstep 3\b"),
        ("seed", {"run.seed": 7}, 0, (1, "weight", "embedding.weight"), r"embedding\.weight, .*\d"),
        ("order", {"data.seed": 7}, 0, (1, "data", "tokens"), r"\bstep 1 .*\btokens of instance \d"),
        ("batch", {"train.global_batch": 6}, 0, (1, "instances", ""), r"\bstep 1 .*\binstances\b"),
        ("rate", {"optimizer.lr": 1e-3}, 0, (1, "lr", ""), r"\blr of step 1\b"),
        ("clip", {"train.max_grad_norm": 0.1}, 0, (2, "weight", "embedding.weight"), r" step 2, .*\d"),
    ):  # fmt: skip
        fit_alone(make_job(tmp_path / name), **{**options, **more})
        verdict = bisect_runs(a, tmp_path / name / "run", record_in(tmp_path / f"of-{name}"))
        assert (verdict.interval.start, verdict.differs) == (start, name != "length")
        found = verdict.difference
        assert (found and (found.step, found.quantity, found.name)) == difference
        assert re.search(text, verdict.text)
        json.dumps(verdict.as_json(), allow_nan=False)
    endless = dataclasses.replace(verdict, difference=Difference(1, "output", "norm", math.inf))
    json.dumps(endless.as_json(), allow_nan=False)
    fit_alone(make_job(tmp_path / "dim"), **{**options, "model.dim": 32})
    with rejects("embedding.weight", (257, 32), "mismatch", ConfigError, where="(257, 16)"):
        bisect_runs(a, tmp_path / "dim/run", record_in(tmp_path / "of-dim"))
    record(tmp_path / "dim/run", 0, 1, tmp_path / "wide")
    with rejects("embedding.weight", (257, 32), "mismatch", ConfigError, where="(257, 16)"):
        first_difference(Record(tmp_path / "of-seed/a"), Record(tmp_path / "wide"))


def record_in(folder: Path) -> Any:
    """`record`, which leaves its records."""
    return lambda run, start, end, side: shutil.copytree(
        record(run, start, end, folder / side.name), side
    )


def rank_replays(run: Path, step: int, output: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    as_rank()
    found = replay_step(run, step, output=output)
    return dict(found.differs), full(found.trainer), len(found.seen)


@pytest.mark.slow
@pytest.mark.distributed
def test_on_two_ranks_a_step_is_the_same_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path, MOE)
    options = {"model__moe__bias_update_rate": 1e-2, "checkpoint__keep_last": 9}
    fit_on_ranks(2, job, **options)
    before = tree(tmp_path / "run")
    saved = {
        k.partition(".")[2]: v
        for k, v in saved_tensors(tmp_path / "run", 6).items()
        if k.startswith(("model.", "optimizer."))
    }
    for differs, mine, rows in run_on_ranks(2, rank_replays, tmp_path / "run", 6, tmp_path / "out"):
        assert (differs, rows) == ({}, 12)
        assert_same_bits(mine, {name: saved[name] for name in mine})
    capfd.readouterr()
    assert study(["replay", str(tmp_path / "run"), "--step", "6", "--anomaly"]) == 0
    shown = capfd.readouterr().out
    assert re.search(r"\bstep 3 .*\b2 processes", shown)
    assert "world_size" not in shown
    assert same_as_logged(shown) == list(COMPARED)
    assert study(["replay", str(tmp_path / "run"), "--step", "2", "--nproc", "1"]) == 0
    assert re.search(r"\bworld_size .*\b2 .*\b1\b", capfd.readouterr().out)
    assert tree(tmp_path / "run") == before


def with_wrong_role(vocab_size: int, wrong: bool = True) -> Transformer:
    """Under tp each rank sees other heads, and the gradients of the norms of queries are not added up."""
    sizes = {"dim": 16, "num_layers": 3, "num_heads": 2, "qk_norm": True}
    model = Transformer(TransformerConfig(vocab_size=vocab_size, **sizes))
    roles = model.parallel_roles()
    assert roles["layers.1.mixer.q_norm.*"] == "replicate_sum_grad"
    if wrong:
        roles["layers.1.mixer.q_norm.*"] = "sequence"
        model.parallel_roles = lambda: roles  # type: ignore[method-assign]
    initialize(model, 0)
    return model


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("wrong", [True, False], ids=["wrong", "right"])
def test_a_wrong_role_is_found_by_step_and_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: bool
) -> None:
    options = {
        "model.name": "tests.use.test_time_machine:with_wrong_role",
        "model.args.wrong": wrong,
        "metrics.console": "off",
    }
    if wrong:
        options["optimizer.eps"] = 1e-8  # small gradients count
    job = make_job(tmp_path / "a")
    fit_alone(job, **options)
    ranks = {**options, "parallel.tp": 2, "parallel.sequence_parallel": not wrong}
    fit_on_ranks(2, make_job(tmp_path / "b"), **ranks)
    a, b = str(tmp_path / "a/run"), str(tmp_path / "b/run")
    if not wrong:
        assert study(["bisect", a, b]) == 0
        # nor are there differences of single tensors
        record(Path(a), 0, 3, tmp_path / "one")
        run_on_ranks(2, rank_records, Path(b), 3, tmp_path / "two")
        assert first_difference(Record(tmp_path / "one"), Record(tmp_path / "two")) is None
        return
    assert study(["bisect", a, b, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["interval"]["start"] == 0
    where = found["difference"]
    assert (where["step"], where["quantity"]) == (1, "gradient")
    assert (where["name"], where["others"]) == ("layers.1.mixer.q_norm.weight", [])
    assert "layers.1.mixer.q_norm.weight" in found["text"]


def rank_records(run: Path, end: int, folder: Path) -> None:
    as_rank()
    record(run, 0, end, folder)
