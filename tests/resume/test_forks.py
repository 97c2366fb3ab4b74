"""Forks: a run that begins in the state of another one, takes what it keeps of it bit for bit, and leaves it alone."""

from __future__ import annotations

import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from forge_ckpt import read_tensors
from forge_testing import forge_train, kill_after_step, run_on_ranks, runs, start, write_job
from forge_testing.jobs import TINY_JOB
from forge_testing.problems import rejects
from forge_train import Callback, ConfigError, StateError, Trainer, load_job, read_run
from forge_train.hf.exporting import export_run
from forge_train.hf.importing import import_folder
from forge_train.loop.fork import Fork, find_fork

pytestmark = pytest.mark.lane("test")

ALL = ["weights", "optimizer", "cursor"]
QUIET = {"metrics.console": "off", "sample.max_new_tokens": 0}
WITHOUT_MODEL = TINY_JOB.replace("[model]\ndim = 16\nnum_layers = 1\nnum_heads = 2\n", "")
CONSTANT = {"schedule.name": "constant"}


def job_of(folder: Path, extra: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_job(folder, extra)


def fit(job: Path, *callbacks: Callback, **overrides: Any) -> Trainer:
    flat = {key.replace("__", "."): value for key, value in overrides.items()}
    trainer = Trainer(load_job(job, {**QUIET, **CONSTANT, **flat}), list(callbacks))
    trainer.fit()
    return trainer


def rows(run: Path, after: int = 0) -> list[tuple[Any, ...]]:
    """What a step did, without its time."""
    metrics = read_run(run).metrics
    names = ("step", "loss", "val_loss", "grad_norm", "lr", "tokens", "flops", "instances")
    return [r for r in zip(*(metrics[name] for name in names), strict=True) if r[0] > after]


def events(run: Path) -> list[str]:
    return [event["event"] for event in read_run(run).events]


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(f), f.stat().st_mtime_ns) for f in folder.rglob("*"))


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps, saved at 3, 6, 9 and 12."""
    folder = tmp_path_factory.mktemp("trunk")
    fit(job_of(folder), checkpoint__keep_last=9)
    return folder / "run"


@pytest.fixture
def parent(tmp_path: Path, trunk: Path) -> Path:
    """A copy of the trunk that a test may change."""
    return shutil.copytree(trunk, tmp_path / "parent")


# ---- what is kept


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    "place", ["run", "run@6", "run/checkpoints@6", "run/checkpoints/step-00000006", "copy"]
)
def test_a_fork_that_keeps_all_is_the_run_that_never_stopped(
    tmp_path: Path, trunk: Path, place: str
) -> None:
    before = listing(trunk)
    name = {"run": trunk, "run@6": f"{trunk}@6"}.get(place, trunk.parent / place)
    if place == "copy":
        name = shutil.copytree(trunk / "checkpoints/step-00000006", tmp_path / "best")
    steps, begun = (15, 12) if place == "run" else (12, 6)
    reference = trunk
    if place == "run":
        fit(job_of(tmp_path / "whole"), train__steps=15)
        reference = tmp_path / "whole/run"
    fit(job_of(tmp_path), train__steps=steps, init__from=str(name), init__keep=ALL)
    runs.assert_same_bits(runs.saved_tensors(tmp_path / "run"), runs.saved_tensors(reference))
    assert rows(tmp_path / "run") == rows(reference, after=begun)
    assert listing(trunk) == before, "the parent changed"
    forked = read_run(tmp_path / "run")
    assert [e["event"] for e in forked.events[:2]] == ["fork", "start"]
    assert forked.parent is not None
    assert forked.parent["step"] == forked.events[0]["of_step"] == begun
    assert forked.parent["run_dir"] == (None if place == "copy" else str(trunk))
    manifest = Path(forked.parent["checkpoint"]) / "manifest.json"
    assert forked.parent["digest"] == json.loads(manifest.read_text())["sha256"]
    assert (len(forked.parent["copied"]), forked.parent["fresh"], forked.parent["unused"]) == (
        12,
        [],
        [],
    )
    assert read_run(trunk).parent is None


class ByHand(Callback):
    """Fill the state that was built, with the tensors of a checkpoint."""

    def __init__(self, source: Path, optimizer: bool) -> None:
        self.tensors, self.optimizer = dict(read_tensors(source)), optimizer
        self.before: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def on_start(self, trainer: Trainer) -> None:
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(self.tensors[f"model.{name}"])
        if self.optimizer:
            for name, slots in trainer.optimizer.named_state().items():
                for slot in ("exp_avg", "exp_avg_sq"):
                    slots[slot].copy_(self.tensors[f"optimizer.{name}.{slot}"])
            state = trainer.optimizer.named_state()
            trainer.optimizer.load_named_state({n: {**s, "step": 6.0} for n, s in state.items()})


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("keep", [["weights"], ["weights", "optimizer"]])
def test_a_warm_start_is_a_new_run_with_weights_and_moments_put_in_by_hand(
    tmp_path: Path, trunk: Path, keep: list[str]
) -> None:
    hand = ByHand(trunk / "checkpoints/step-00000006", "optimizer" in keep)
    other = {"run__seed": 5, "train__steps": 4, "optimizer__lr": 3e-3, "schedule__name": "cosine"}
    fit(job_of(tmp_path / "hand"), hand, **other)
    warm = fit(job_of(tmp_path), init__from=f"{trunk}@6", init__keep=keep, **other)
    assert rows(tmp_path / "run") == rows(tmp_path / "hand/run")
    assert [row[0] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]
    assert warm.loader.cursor == 16
    mine, theirs = runs.saved_tensors(tmp_path / "run"), runs.saved_tensors(tmp_path / "hand/run")
    runs.assert_same_bits(mine, theirs)
    fresh = fit(job_of(tmp_path / "fresh"), **other)
    assert not torch.equal(runs.full(fresh)["lm_head.weight"], mine["model.lm_head.weight"])


@pytest.mark.lane("quick")
@pytest.mark.parametrize("name", ["lion", "muon", "torch.optim:SGD"])
def test_every_kind_of_optimizer_goes_on(tmp_path: Path, name: str) -> None:
    own = {"optimizer__name": name, "optimizer__lr": 1e-3, "eval__every_steps": 0}
    if name.startswith("torch"):
        own["optimizer__options"] = {"momentum": 0.9}
    fit(job_of(tmp_path / "whole"), train__steps=6, **own)
    source = f"{tmp_path}/whole/run@3"
    fit(job_of(tmp_path), init__from=source, init__keep=ALL, train__steps=6, **own)
    runs.assert_same_bits(
        runs.saved_tensors(tmp_path / "run"), runs.saved_tensors(tmp_path / "whole/run")
    )


def test_moments_of_another_optimizer_are_rejected_without_a_configuration_too(
    tmp_path: Path, trunk: Path
) -> None:
    copy = shutil.copytree(trunk / "checkpoints/step-00000006", tmp_path / "copy")
    keep = {"init__from": str(copy), "init__keep": ["weights", "optimizer"]}
    with pytest.raises(ConfigError, match=r"exp_avg_sq") as caught:
        fit(job_of(tmp_path), optimizer__name="lion", **keep)
    extra = [p for p in caught.value.problems if p.code == "extra"]
    assert extra
    assert all(p.key.endswith(".exp_avg_sq") for p in extra)
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))


def test_another_batch_size_goes_on_after_the_last_sample(tmp_path: Path, trunk: Path) -> None:
    job = job_of(tmp_path)
    fork = fit(job, init__from=f"{trunk}@6", init__keep=ALL, train__global_batch=8, train__steps=8)
    assert (fork.loader.cursor, fork.progress.tokens) == (6 * 4 + 2 * 8, 40 * 32)
    assert torch.equal(
        torch.from_numpy(fork.loader.ids(0, 40)),
        torch.from_numpy(Trainer(load_job(job_of(tmp_path / "x"))).loader.ids(0, 40)),
    )


class Counter(Callback):
    """A state of its own, which checkpoints carry."""

    def __init__(self) -> None:
        self.calls, self.first = 0, -1

    def on_start(self, trainer: Trainer) -> None:
        self.first = self.calls

    def on_step_end(self, trainer: Trainer) -> None:
        self.calls += 1

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Other(Counter):
    pass


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_callbacks_and_random_streams_go_on_only_with_the_cursor(tmp_path: Path) -> None:
    parent = job_of(tmp_path / "parent")
    fit(parent, Counter(), train__steps=6)
    found: dict[str, tuple[int, int]] = {}
    for name, keep in (("all", ALL), ("warm", ["weights", "optimizer"])):
        counter, other = Counter(), Other()
        fit(
            job_of(tmp_path / name),
            counter,
            other,
            train__steps=8,
            init__from=str(tmp_path / "parent/run"),
            init__keep=keep,
        )
        found[name] = counter.first, other.first
    assert found == {"all": (6, 0), "warm": (0, 0)}
    streams = [
        runs.saved_tensors(tmp_path / n / "run")["rng.streams.0.torch"]
        for n in ("parent", "all", "warm")
    ]
    assert torch.equal(streams[0], streams[1])


# ---- schedules


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_two_decays_forked_from_a_trunk_are_two_full_runs(tmp_path: Path) -> None:
    wsd = {"schedule__name": "wsd", "schedule__warmup_steps": 2, "checkpoint__keep_last": 9}
    fit(job_of(tmp_path / "trunk"), train__steps=14, schedule__wsd__decay_steps=2, **wsd)
    for name, steps, decay in (("short", 9, 3), ("long", 12, 3)):
        own = {"train__steps": steps, "schedule__wsd__decay_steps": decay, **wsd}
        fit(job_of(tmp_path / name / "whole"), **own)
        start_step = steps - decay
        fit(
            job_of(tmp_path / name),
            init__from=f"{tmp_path}/trunk/run@{start_step}",
            init__keep=ALL,
            **own,
        )
        runs.assert_same_bits(
            runs.saved_tensors(tmp_path / name / "run"),
            runs.saved_tensors(tmp_path / name / "whole/run"),
        )
        whole = rows(tmp_path / name / "whole/run")
        assert rows(tmp_path / name / "run") == whole[start_step:]
        assert whole[start_step - 1][4] > whole[start_step][4] > whole[-1][4], "the rate fell"


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_another_schedule_is_evaluated_at_the_step_of_the_parent(
    tmp_path: Path, trunk: Path
) -> None:
    steep = {
        "schedule__name": "forge_testing.extensions:half_way",
        "schedule__options__height": 0.1,
    }
    fit(job_of(tmp_path), init__from=f"{trunk}@6", init__keep=ALL, **steep)
    fit(job_of(tmp_path / "whole"), **steep)
    mine, whole = rows(tmp_path / "run"), rows(tmp_path / "whole/run")
    assert [row[4] for row in mine] == [row[4] for row in whole[6:]]


# ---- lives of a fork


@pytest.mark.slow
def test_a_killed_fork_goes_on_with_its_own_state_also_when_the_parent_is_gone(
    tmp_path: Path, trunk: Path, parent: Path
) -> None:
    job = job_of(tmp_path)
    flags = ["--init.from", f"{parent}@3", "--init.keep", *ALL, "--schedule.name", "constant"]
    flags += ["--checkpoint.wait", "true"]
    killed = kill_after_step(start("run", job, *flags), tmp_path / "run/metrics.jsonl", 8)
    assert killed.code in (-signal.SIGKILL, 0)
    assert (tmp_path / "run/checkpoints/step-00000006/manifest.json").exists()
    before = read_run(tmp_path / "run").parent
    shutil.rmtree(parent)
    done = forge_train("run", job, *flags)
    assert done.code == 0, done.err
    kinds = events(tmp_path / "run")
    assert kinds.count("fork") == 1
    assert "resume" in kinds or killed.code == 0
    assert read_run(tmp_path / "run").parent == before
    runs.assert_same_bits(runs.saved_tensors(tmp_path / "run"), runs.saved_tensors(trunk))
    assert rows(tmp_path / "run") == rows(trunk, after=3)


def test_a_fork_that_may_roll_back_saves_its_beginning(tmp_path: Path, trunk: Path) -> None:
    back = {"resilience__nonfinite__action": "rollback", "checkpoint__keep_last": 9}
    fit(job_of(tmp_path), init__from=f"{trunk}@6", init__keep=ALL, train__steps=8, **back)
    runs.assert_same_bits(runs.saved_tensors(tmp_path / "run", 6), runs.saved_tensors(trunk, 6))


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_fork_that_dies_before_its_first_save_forks_again_or_reports_a_missing_parent(
    tmp_path: Path, trunk: Path, parent: Path
) -> None:
    job = job_of(tmp_path)
    init = {"init__from": f"{parent}@6", "init__keep": ALL}
    for _ in range(2):
        with pytest.raises(runs.Died):
            fit(job, runs.Dies(), **init)
    assert events(tmp_path / "run") == ["fork", "start", "fork", "start"]
    shutil.rmtree(parent / "checkpoints/step-00000006")
    with rejects("init.from", f"{parent}@6", "step", ConfigError, where="3, 9, 12"):
        fit(job, **init)
    shutil.rmtree(parent)
    with rejects("init.from", f"{parent}@6", "not_found", ConfigError):
        fit(job, **init)
    shutil.copytree(trunk, parent)
    fit(job, **init)
    runs.assert_same_bits(runs.saved_tensors(tmp_path / "run"), runs.saved_tensors(trunk))


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_parent_may_train_meanwhile(tmp_path: Path, trunk: Path, parent: Path) -> None:

    class ForkNow(Callback):
        """In the middle of the parent, whose store is locked."""

        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.progress.step == 14:
                fit(
                    job_of(tmp_path / "child"),
                    train__steps=14,
                    init__from=str(parent),
                    init__keep=ALL,
                )

    job = write_job(tmp_path, run_dir=parent)
    fit(job, ForkNow(), train__steps=15, checkpoint__keep_last=9)
    assert read_run(tmp_path / "child/run").parent["step"] == 12
    fit(job_of(tmp_path / "whole"), train__steps=14)
    runs.assert_same_bits(
        runs.saved_tensors(tmp_path / "child/run"), runs.saved_tensors(tmp_path / "whole/run")
    )


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_damaged_source_is_rejected_and_a_damaged_fork_never_forks_again(
    tmp_path: Path, trunk: Path, parent: Path
) -> None:
    job, init = job_of(tmp_path), {"init__from": str(parent), "init__keep": ALL}
    damage(parent / "checkpoints/step-00000012/data-0.bin")
    for keep in (ALL, ["weights"]):
        with pytest.raises(StateError, match=r"step-00000012/"):
            fit(job, **{**init, "init__keep": keep}, train__steps=15)
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))
    assert (parent / "checkpoints/step-00000012").exists(), "the parent is read alone"
    damage(parent / "checkpoints/step-00000012/manifest.json")
    with rejects("init.from", str(parent), "damaged", StateError, where="manifest.json"):
        fit(job, **init, train__steps=15)
    init["init__from"] = f"{parent}@9"
    fit(job, **init)
    for path in (tmp_path / "run/checkpoints").glob("step-*"):
        damage(path / "manifest.json")
    for _ in range(2):  # the second time all are in quarantine
        with rejects("path", str(tmp_path / "run/checkpoints"), "corrupt", StateError):
            fit(job, **init)
    assert events(tmp_path / "run").count("fork") == 1


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


# ---- parts of a model


def test_patterns_take_a_part_and_the_rest_begins_by_the_seed(
    tmp_path: Path, trunk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init = {"init__from": f"{trunk}@6", "init__patterns": ["layers.0.*", "!*_norm.*"]}
    deeper = {"model__num_layers": 2, "init__seed": 3, "train__steps": 3}
    at_start = Weights()
    fit(job_of(tmp_path), at_start, **init, **deeper, metrics__console="plain")
    alone = Weights()
    fit(job_of(tmp_path / "fresh"), alone, **deeper)
    saved = runs.saved_tensors(trunk, 6)
    taken = [n for n in at_start.found if n.startswith("layers.0.") and "norm" not in n]
    assert len(taken) == 7
    for name, value in at_start.found.items():
        reference = saved[f"model.{name}"] if name in taken else alone.found[name]
        assert torch.equal(value, reference), name
    parent = read_run(tmp_path / "run").parent
    assert parent["copied"] == taken
    assert parent["changed"]["model.num_layers"] == [1, 2]
    assert (len(parent["fresh"]), len(parent["unused"])) == (14, 5)
    out = capsys.readouterr().out
    fresh = r"\b14 \w+ \(embedding\.weight, layers\.0\.mixer_norm\.weight, "
    assert re.search(rf"init: .*\b7 .*{fresh}.*\b5 .*\(", out)
    assert re.search(r"init: model\.num_layers .*\b1 .*\b2\b", out)


class Weights(Callback):
    def on_start(self, trainer: Trainer) -> None:
        self.found = {
            n: t.clone() for n, t in runs.full(trainer).items() if n.count(".exp_avg") == 0
        }


# ---- other layouts


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("keep", [ALL, ["weights"]])
@pytest.mark.parametrize(
    ("there", "here", "layout"),
    [(2, 1, {}), (1, 2, {}), (1, 2, {"parallel__pp": 2}), (2, 2, {"parallel__tp": 2})],
    ids=["2-1", "1-2", "pp", "tp"],
)
def test_a_fork_in_another_layout_has_the_same_weights_and_trains_alike(
    tmp_path: Path, keep: list[str], there: int, here: int, layout: dict[str, int]
) -> None:
    shape = {"train__steps": 3, "checkpoint__every_steps": 3, "eval__every_steps": 0, **TWO_LAYERS}
    parent = job_of(tmp_path / "parent")
    runs.together(runs.fit_on_ranks(there, parent, **shape))
    init = {"init__from": str(tmp_path / "parent/run"), "init__keep": keep, "train__steps": 5}
    if keep == ["weights"]:  # parts of which a stage has all, some or none
        init |= {"init__patterns": ["layers.1.*", "lm_head.*"], "train__steps": 2}
    found = runs.fit_on_ranks(here, job_of(tmp_path), **{**shape, **init, **layout})
    alone = runs.fit_on_ranks(1, job_of(tmp_path / "alone"), **{**shape, **init})
    runs.assert_close(runs.together(found), runs.together(alone))
    parents = [read_run(folder / "run").parent for folder in (tmp_path, tmp_path / "alone")]
    assert parents[0] is not None
    assert parents[0]["copied"] == parents[1]["copied"]
    assert parents[0]["fresh"] == parents[1]["fresh"]


@pytest.mark.slow
@pytest.mark.distributed
def test_on_two_ranks_a_decay_of_a_trunk_is_the_full_run_bit_for_bit(tmp_path: Path) -> None:
    wsd = {"schedule__name": "wsd", "schedule__wsd__decay_steps": 2, "eval__every_steps": 0}
    runs.fit_on_ranks(2, job_of(tmp_path / "trunk"), train__steps=6, **wsd)
    whole = runs.together(runs.fit_on_ranks(2, job_of(tmp_path / "whole"), train__steps=5, **wsd))
    init = {"init__from": f"{tmp_path}/trunk/run@3", "init__keep": ALL}
    fork = runs.together(runs.fit_on_ranks(2, job_of(tmp_path), train__steps=5, **init, **wsd))
    runs.assert_same_bits(fork, whole)


def fork_of_another_step(job: Path, other: Path, settings: dict[str, Any]) -> Any:
    """Rank 1 looked a moment before the parent saved."""
    rank = dist.get_rank()
    runs.as_rank()

    def find(*args: Any) -> Fork:
        found = find_fork(*args)
        assert found is not None
        return replace(found, source=replace(found.source, path=other)) if rank else found

    with mock.patch("forge_train.loop.initial.find_fork", find):
        trainer = Trainer(load_job(job, {**QUIET, **settings}))
    trainer.fit()
    return trainer.progress.tokens, runs.full(trainer)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
@pytest.mark.parametrize("keep", [ALL, ["weights"]])
def test_ranks_that_found_other_steps_take_one(
    tmp_path: Path, trunk: Path, keep: list[str]
) -> None:
    init = {"init.from": f"{trunk}@9", "init.keep": keep, "train.steps": 11, **CONSTANT}
    older = trunk / "checkpoints/step-00000003"
    first, second = run_on_ranks(2, fork_of_another_step, job_of(tmp_path), older, init)
    assert first[0] == second[0]
    runs.assert_same_bits(first[1], second[1])
    parent = read_run(tmp_path / "run").parent
    assert parent is not None
    assert parent["step"] == 9


TWO_LAYERS = {"model__num_layers": 2, "optimizer__eps": 1e-4}


# ---- folders of Hugging Face


@pytest.fixture(scope="module")
def folder(trunk: Path) -> Path:
    export_run(trunk, trunk.parent / "hf", step=6)
    return trunk.parent / "hf"


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_fork_of_a_folder_of_hugging_face_is_an_import(tmp_path: Path, folder: Path) -> None:
    source = shutil.copytree(folder, tmp_path / "hf")
    (source / "LICENSE").write_text("terms")
    (tmp_path / "job.toml").write_text(WITHOUT_MODEL.format(run_dir=tmp_path / "run"))
    short = {"train__steps": 3, "checkpoint__every_steps": 2}
    with pytest.raises(runs.Died):
        fit(tmp_path / "job.toml", runs.Dies(), **short, init__from=str(source))
    fit(tmp_path / "job.toml", **short, init__from=str(source))
    run = tmp_path / "run"
    import_folder(folder, tmp_path / "import")
    fit(tmp_path / "job.toml", **short, run__dir=str(tmp_path / "import"))
    runs.assert_same_bits(runs.saved_tensors(run), runs.saved_tensors(tmp_path / "import"))
    assert rows(run) == rows(tmp_path / "import")
    assert (run / "model.toml").read_text() == (tmp_path / "import/model.toml").read_text()
    parent = read_run(run).parent
    assert parent is not None
    assert (parent["checkpoint"], parent["run_dir"], parent["step"]) == (str(source), None, None)
    assert len(parent["copied"]) == 12
    shutil.rmtree(source)  # later lives have all they need
    fit(tmp_path / "job.toml", **{**short, "train__steps": 5}, init__from=str(source))
    assert events(run)[-1] == "done"
    assert read_run(run).config["model"]["num_heads"] == 2
    again = {
        "init__from": str(run),
        "model__num_heads": 2,
        "model__dim": 16,
        "model__num_layers": 1,
    }
    fit(job_of(tmp_path / "again"), **again, model__max_seq_len=1024, train__steps=2)
    for name in (run, tmp_path / "again/run"):  # the files of the first go with the weights
        export_run(name, tmp_path / "out")
        assert (tmp_path / "out/LICENSE").read_text() == "terms"
        shutil.rmtree(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", [{}, {"parallel__pp": 2}, {"parallel__tp": 2}], ids=str)
def test_parts_of_a_folder_of_hugging_face_in_layouts(
    tmp_path: Path, layout: dict[str, int]
) -> None:
    fit(job_of(tmp_path / "parent"), **TWO_LAYERS, train__steps=2)
    export_run(tmp_path / "parent/run", tmp_path / "hf")
    init = {
        "init__from": str(tmp_path / "hf"),
        "init__patterns": ["layers.*", "!*norm*"],
        "train__steps": 2,
        "eval__every_steps": 0,
        **TWO_LAYERS,
    }
    found = runs.fit_on_ranks(2, job_of(tmp_path), **{**init, **layout})
    alone = runs.fit_on_ranks(1, job_of(tmp_path / "alone"), **init)
    runs.assert_close(runs.together(found), runs.together(alone))
    parent = read_run(tmp_path / "run").parent
    assert parent is not None
    assert (len(parent["copied"]), len(parent["fresh"])) == (14, 7)


# ---- three seeds


def test_each_seed_has_its_own_effect(tmp_path: Path) -> None:
    def beginning(**seeds: int) -> tuple[float, list[int], int]:
        trainer = Trainer(load_job(job_of(tmp_path), {**QUIET, **seeds}))
        ids = next(trainer.loader).tokens.flatten().tolist()
        trainer.prepare()
        stream = int(torch.randint(2**31, ()))
        trainer.loader.close()
        return (
            sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters()),
            ids,
            stream,
        )

    default, all_seven = beginning(), beginning(**{"run.seed": 7})
    assert not any(a == b for a, b in zip(default, all_seven, strict=True))
    own = {"run.seed": 0, "init.seed": 0, "data.seed": 0}
    assert beginning(**own) == default, "run.seed is the default"
    for place, key in enumerate(("init.seed", "data.seed", "run.seed")):
        found = beginning(**{**own, key: 7})
        for i, value in enumerate(found):
            assert value == (all_seven if i == place else default)[i], (key, i)
