"""Groups of parameters with rates of their own, frozen and trained by stages: beside a loop by hand, resumed and refused."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_core import Transformer, TransformerConfig, initialize
from forge_data import Loader, PackedStream, SourceConfig, open_source
from forge_testing.problems import rejects
from forge_testing.runs import assert_close, fit_alone, fit_on_ranks, fit_reference, make_job
from forge_train import Callback, Trainer, load_job, read_run
from forge_train.errors import ConfigError

pytestmark = pytest.mark.lane("test")

STEPS, CHANGE, PEAK, FLOOR, EPS, DECAY = 6, 4, 1e-2, 0.1, 1e-4, 0.1
#: The front is frozen until step 4, the head from then on, the norms never train.
PLAN = """
[optimizer.groups]
front = { patterns = ["embedding.*", "layers.0.*"], lr_multiplier = 0.0, weight_decay = 0.3 }
head = { patterns = ["lm_head.weight"], lr_multiplier = 0.5 }
last_norm = { patterns = ["norm.weight"], lr_multiplier = 0.0 }
[train.stages]
whole = { start_step = 4, lr_multipliers = { front = 0.25, head = 0.0 } }
"""
SHORT = {
    "train.steps": STEPS,
    "model.num_layers": 2,
    "eval.every_steps": 0,
    "sample.max_new_tokens": 0,
}


def group_of(name: str) -> str:
    if name.startswith(("embedding.", "layers.0.")):
        return "front"
    return {"lm_head.weight": "head", "norm.weight": "last_norm"}.get(name, "rest")


def multiplier_of(name: str, step: int) -> float:
    late = step >= CHANGE
    return {"front": 0.25 * late, "head": 0.5 * (not late), "last_norm": 0.0, "rest": 1.0}[
        group_of(name)
    ]


def decay_of(name: str, parameter: torch.Tensor) -> float:
    if group_of(name) == "front":
        return 0.3  # norms included
    return DECAY if parameter.ndim >= 2 else 0.0


def plain_loop(micro: int = 12) -> tuple[nn.Module, dict[str, dict[str, Any]], list[float]]:
    """AdamW, clipping and freezing parameter by parameter, with none of the runner or its optimizer."""
    model = Transformer(TransformerConfig(257, dim=16, num_layers=2, num_heads=2))
    initialize(model, 0)
    loader = Loader(PackedStream(open_source(SourceConfig()), 32, seed=0), 12, 0, 1)
    state = {
        name: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p), "step": 0}
        for name, p in model.named_parameters()
        if group_of(name) != "last_norm"
    }
    norms = []
    for step in range(1, STEPS + 1):
        batch = next(loader)
        logits = model(batch.tokens, batch.positions, batch.document_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        trained = {n: p for n, p in model.named_parameters() if multiplier_of(n, step) > 0}
        gradients = torch.autograd.grad(loss, list(trained.values()))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        norms.append(norm)
        factor = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * step / STEPS)) / 2
        with torch.no_grad():
            for (name, p), gradient in zip(trained.items(), gradients):
                slots, lr = state[name], PEAK * factor * multiplier_of(name, step)
                gradient = gradient * min(1.0, 1.0 / (norm + 1e-6))
                slots["step"] += 1
                slots["exp_avg"].lerp_(gradient, 0.1)
                slots["exp_avg_sq"].mul_(0.95).add_(0.05 * gradient**2)
                mean = slots["exp_avg"] / (1 - 0.9 ** slots["step"])
                root = (slots["exp_avg_sq"] / (1 - 0.95 ** slots["step"])).sqrt()
                p.mul_(1 - lr * decay_of(name, p)).sub_(lr * mean / (root + EPS))
    return model, state, norms


def wanted_weights() -> dict[str, torch.Tensor]:
    model, state, _ = plain_loop()
    found: dict[str, torch.Tensor] = {n: p.detach() for n, p in model.named_parameters()}
    for name, slots in state.items():
        found |= {f"{name}.{slot}": slots[slot] for slot in ("exp_avg", "exp_avg_sq")}
    return found


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_runner_equals_a_loop_by_hand(tmp_path: Path) -> None:
    trainer = Trainer(load_job(make_job(tmp_path, PLAN), SHORT))
    assert trainer.fit().step == STEPS
    _, state, norms = plain_loop()
    run = read_run(tmp_path / "run")
    assert run.metrics["grad_norm"] == pytest.approx(norms, rel=1e-5)
    named = trainer.optimizer.named_state()
    assert {n: slots["step"] for n, slots in named.items()} == {
        n: slots["step"] for n, slots in state.items()
    }
    again = fit_alone(make_job(tmp_path / "again", PLAN), **SHORT)
    assert_close(again.weights, wanted_weights())
    stages = [(e["step"], e["name"]) for e in run.events if e["event"] == "stage"]
    assert stages == [(1, None), (CHANGE, "whole")]


class Watch(Callback):
    """Frozen parameters have no gradient and keep their bits; what is trained changes."""

    def on_start(self, trainer: Trainer) -> None:
        self.before = {n: local(p).clone() for n, p in trainer.model.named_parameters()}

    def on_step_end(self, trainer: Trainer) -> None:
        step = trainer.progress.step
        for name, p in trainer.model.named_parameters():
            frozen = multiplier_of(name, step) == 0
            assert p.requires_grad != frozen, name
            same = torch.equal(local(p), self.before[name])
            assert same == frozen or not local(p).numel(), (step, name)
            self.before[name] = local(p).clone()


class WatchGradients(Watch):
    """They are fp32 also in blocks that were frozen when FSDP2 first looked at their dtypes."""

    def on_start(self, trainer: Trainer) -> None:
        super().on_start(trainer)
        trainer.optimizer.register_step_pre_hook(lambda *_: self.look(trainer))

    def look(self, trainer: Trainer) -> None:
        gradients = {n: p.grad for n, p in trainer.model.named_parameters()}
        trained = {n for n in gradients if multiplier_of(n, trainer.progress.step + 1) > 0}
        assert {n: g.dtype for n, g in gradients.items() if g is not None} == dict.fromkeys(
            trained, torch.float32
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach()
    return value.to_local() if hasattr(value, "to_local") else value


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_of_what_was_frozen_are_summed_in_fp32(tmp_path: Path, world: int) -> None:
    options = {**SHORT, "parallel.precision": "bf16"}
    for one in fit_on_ranks(world, make_job(tmp_path, PLAN), WatchGradients, **options):
        assert (one.code, one.step, one.problems) == (0, STEPS, ())


FROZEN = """
[optimizer.groups.front]
patterns = ["embedding.*", "layers.0.*"]
lr_multiplier = 0.0
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("options", [{}, {"parallel.pp": 2, "train.micro_batch": 3}], ids=str)
def test_frozen_weights_have_no_state_and_a_rank_may_have_only_those(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Under pp the first rank holds the embedding and layer 0 and nothing else."""
    wanted = fit_reference(make_job(tmp_path / "one", FROZEN), **SHORT).weights
    assert "lm_head.weight.exp_avg" in wanted
    assert "embedding.weight.exp_avg" not in wanted
    job = make_job(tmp_path / "many", FROZEN)
    ran = fit_on_ranks(2, job, **{**SHORT, **options})
    assert {(r.code, r.step, r.problems) for r in ran} == {(0, STEPS, ())}
    assert_close({n: v for rank in ran for n, v in rank.weights.items()}, wanted)
    events = [e["event"] for e in read_run(tmp_path / "many/run").events]
    assert "quarantine" not in events
    for steps, other in (
        (STEPS + 1, {}),
        (STEPS + 2, options),
    ):  # and on to another layout and back
        again = fit_on_ranks(
            1 if other != options else 2, job, **{**SHORT, "train.steps": steps, **other}
        )
        assert {(r.step, r.problems) for r in again} == {(steps, ())}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("step", [2, 5])
@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.lane("ci")),
        (2, {}),
        pytest.param(2, {"parallel.pp": 2, "train.micro_batch": 3}, marks=pytest.mark.lane("ci")),
        (2, {"optimizer.name": "torch.optim:Adam"}),
    ],
    ids=str,
)
def test_a_run_resumes_in_the_middle_of_a_stage_with_the_same_bits(
    tmp_path: Path, world: int, options: dict[str, Any], step: int
) -> None:
    job, whole = make_job(tmp_path, PLAN), {**SHORT, **options, "checkpoint.every_steps": 1}
    whole["checkpoint.keep_last"] = STEPS
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    ran = fit_on_ranks(world, job, **{**whole, "run.dir": str(straight)})
    assert {(one.code, one.step) for one in ran} == {(0, STEPS)}
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copy(straight / "config.toml", resumed)
    name = f"checkpoints/step-{step:08d}"
    shutil.copytree(straight / name, resumed / name)
    again = fit_on_ranks(
        world, job, Watch if step == 5 else None, **{**whole, "run.dir": str(resumed)}
    )
    assert read_run(resumed).events[0]["event"] == "resume"
    for mine, theirs in zip(again, ran, strict=True):
        assert mine.problems == ()
        assert mine.weights.keys() == theirs.weights.keys()
        for name, value in theirs.weights.items():
            assert torch.equal(mine.weights[name], value), name


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("thaws", [True, False])
@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.lane("ci")),
        (2, {}),
        pytest.param(2, {"parallel.pp": 2, "train.micro_batch": 3}, marks=pytest.mark.lane("ci")),
    ],
    ids=str,
)
def test_a_later_attempt_may_train_what_was_always_frozen_or_freeze_for_good(
    tmp_path: Path, world: int, options: dict[str, Any], thaws: bool
) -> None:
    """As if the stage at the border of the two lives had been planned from the start."""
    stage = "[train.stages.s]\nstart_step = 3\nlr_multipliers = {front = %s}\n"
    if thaws:
        first, then = FROZEN, FROZEN + stage % 0.5
        planned = then
    else:
        first, then = FROZEN.replace("0.0", "0.5"), FROZEN
        planned = first + stage % 0.0
    settings = {**SHORT, **options, "schedule.name": "constant"}
    folder = tmp_path / "lives"
    fit_on_ranks(world, make_job(folder, first), **{**settings, "train.steps": 2})
    lives = fit_on_ranks(world, make_job(folder, then), **settings)
    straight = fit_on_ranks(world, make_job(tmp_path / "straight", planned), **settings)
    assert read_run(folder / "run").events[-1]["event"] == "done"
    for mine, theirs in zip(lives, straight, strict=True):
        assert (mine.step, mine.problems) == (STEPS, ())
        for name, value in mine.weights.items():
            assert torch.equal(value, theirs.weights[name]), name


SGD = {**SHORT, "optimizer.name": "torch.optim:SGD", "optimizer.lr": 0.5, "optimizer.eps": 1e-8}


@pytest.mark.lane("quick")
def test_a_class_of_torch_gets_the_groups(tmp_path: Path) -> None:
    trainer = Trainer(load_job(make_job(tmp_path, PLAN), SGD), [Watch()])
    assert trainer.fit().step == STEPS
    groups = [
        (g.get("group"), g["weight_decay"], g["lr"] / trainer.optimizer.param_groups[0]["lr"])
        for g in trainer.optimizer.param_groups
    ]
    assert groups == [(None, 0.1, 1.0), (None, 0.0, 1.0), ("front", 0.3, 0.25), ("head", 0.1, 0.0)]


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("table", "key", "value", "code", "named"),
    [
        (
            '[optimizer.groups.a]\npatterns = ["layers.*"]\n[optimizer.groups.b]\npatterns = ["*.q_proj.*"]',
            "optimizer.groups",
            "layers.0.mixer.q_proj.weight",
            "duplicate",
            "optimizer.groups.b",
        ),
        (
            '[optimizer.groups.a]\npatterns = ["lm_heat.*"]',
            "optimizer.groups.a.patterns",
            "lm_heat.*",
            "not_found",
            "lm_head.weight",
        ),
        (
            '[optimizer.groups.a]\npatterns = ["*"]\nlr_multiplier = 0.0',
            "optimizer.groups",
            ...,
            "frozen",
            "step 1",
        ),
        (
            '[optimizer.groups.a]\npatterns = ["*"]\n[train.stages.s]\nstart_step = 2\n'
            "lr_multipliers = {a = 0.0}",
            "train.stages.s",
            ...,
            "frozen",
            "step 2",
        ),
        (
            '[optimizer.groups.vision]\npatterns = ["*"]\n[train.stages.s]\nstart_step = 2\n'
            "lr_multipliers = {visoin = 0.5}",
            "train.stages.s.lr_multipliers",
            "visoin",
            "unknown",
            "vision",
        ),
        (
            "[train.stages.s]\nstart_step = 2\nlr_multipliers = {a = 0.5}",
            "train.stages.s.lr_multipliers",
            "a",
            "unknown",
            "optimizer.groups",
        ),
        (
            '[optimizer.groups.a]\npatterns = ["*"]\nlr_multiplier = -0.5',
            "optimizer.groups.a.lr_multiplier",
            -0.5,
            "range",
            "0.1",
        ),
        (
            '[optimizer.groups.a]\npatterns = ["*"]\nlr_multiplier = nan',
            "optimizer.groups.a.lr_multiplier",
            math.nan,
            "finite",
            "job.toml",
        ),
        (
            "[optimizer.groups.a]\npatterns = []",
            "optimizer.groups.a.patterns",
            (),
            "type",
            "job.toml",
        ),
        (
            '[optimizer.groups.a]\npatterns = "*"',
            "optimizer.groups.a.patterns",
            "*",
            "type",
            "job.toml",
        ),
        (
            "[optimizer.groups.a]\nlr_multiplier = 1.0",
            "optimizer.groups.a.patterns",
            ...,
            "missing",
            "",
        ),
        (
            '[optimizer.groups.a]\npaterns = ["*"]',
            "optimizer.groups.a.paterns",
            ...,
            "unknown_key",
            "optimizer.groups.a.patterns?",
        ),
        (
            '[optimizer.groups."a b"]\npatterns = ["*"]',
            "optimizer.groups",
            "a b",
            "name",
            "",
        ),
        (
            '[optimizer.groups.a]\npatterns = ["*"]\n[train.stages.s]\nstart_step = 0\n'
            "lr_multipliers = {a = -1.0}",
            "train.stages.s.start_step",
            0,
            "range",
            "job.toml",
        ),
        (
            '[optimizer.groups.a]\npatterns = ["*"]\n[train.stages.s]\nstart_step = 1\n'
            "lr_multipliers = {a = -1.0}",
            "train.stages.s.lr_multipliers.a",
            -1.0,
            "range",
            "job.toml",
        ),
        (
            '[optimizer.groups.a]\npatterns = ["*"]\n[train.stages.s]\nstart_step = 2\n'
            "lr_multipliers = {a = nan}",
            "train.stages.s.lr_multipliers.a",
            math.nan,
            "finite",
            "job.toml",
        ),
        (
            '[optimizer.groups.a]\npatterns = ["*"]\n[train.stages.s]\nstart_step = 2\nlr_multipliers = {}',
            "train.stages.s.lr_multipliers",
            {},
            "missing",
            "job.toml",
        ),
        (
            '[optimizer.groups.a]\npatterns = ["*"]\n[train.stages.s]\nstart_step = 2\n'
            "lr_multipliers = {a = 0.5}\n[train.stages.t]\nstart_step = 2\nlr_multipliers = {a = 0.1}",
            "train.stages.t.start_step",
            2,
            "duplicate",
            "train.stages.s",
        ),
        (
            '[optimizer.groups.a]\npatterns = ["*"]\n[train.stages.s]\nstart_step = 13\n'
            "lr_multipliers = {a = 0.5}",
            "train.stages.s.start_step",
            13,
            "above_steps",
            "12",
        ),
    ],
)
def test_wrong_groups_and_stages_are_rejected_as_they_are_read(
    tmp_path: Path, table: str, key: str, value: Any, code: str, named: str
) -> None:
    with rejects(key, value, code, ConfigError, where=named):
        load_job(make_job(tmp_path, table + "\n"))


def test_options_that_a_class_of_torch_does_not_take_are_rejected(tmp_path: Path) -> None:
    table = '[optimizer.groups.a]\npatterns = ["*"]\nweight_decay = 0.5\n'
    key = "optimizer.groups.a.weight_decay"
    with rejects(key, 0.5, "unsupported", ConfigError, where="torch.optim:Rprop"):
        load_job(
            make_job(tmp_path, table),
            {"optimizer.name": "torch.optim:Rprop", "optimizer.eps": 1e-8},
        )


def test_an_optimizer_without_groups_is_rejected_by_name(tmp_path: Path) -> None:
    job = make_job(tmp_path, FROZEN.replace("0.0", "0.5"))
    trainer = Trainer(load_job(job, {**SHORT, "optimizer.name": "forge_testing.models:PlainSGD"}))
    key, optimizer = "optimizer.groups.front", "forge_testing.models:PlainSGD"
    with rejects(key, ..., "param_groups", ConfigError, where=optimizer):
        trainer.fit()


@pytest.mark.slow
def test_other_groups_are_rejected_where_state_goes_by_position(tmp_path: Path) -> None:
    """Groups of one parameter each: torch would give the head's moments to the table."""
    adam = {**SHORT, "optimizer.name": "torch.optim:Adam"}
    table = '[optimizer.groups.a]\npatterns = ["{}.*"]\n'
    job = make_job(tmp_path, table.format("embedding"))
    assert fit_alone(job, **{**adam, "train.steps": 2}).step == 2
    job = make_job(tmp_path, table.format("lm_head"))
    saved = "layers.0.mixer.q_proj.weight"
    with rejects("optimizer", saved, "parameter", ConfigError, where="embedding.weight"):
        fit_alone(job, **adam)


@pytest.mark.lane("quick")
def test_an_imported_model_in_16_bits_has_groups(tmp_path: Path) -> None:
    """Masters in fp32 are made later; what never trains keeps its dtype but in one process in fp32."""
    name = {"model.name": "forge_testing.models:half", "parallel.precision": "bf16"}
    table = '[optimizer.groups.a]\npatterns = ["table.*"]\nlr_multiplier = 0.0\n'
    settings = {**name, **SHORT, "optimizer.name": "torch.optim:Adam"}
    del settings["model.num_layers"]
    trainer = Trainer(load_job(make_job(tmp_path, table), settings))
    assert trainer.fit().step == STEPS
    dtypes = {n: p.dtype for n, p in trainer.model.named_parameters()}
    assert dtypes == {"table.weight": torch.bfloat16, "head.weight": torch.float32}


def test_patterns_are_tried_on_a_custom_model_before_a_run_begins(tmp_path: Path) -> None:
    table = '[optimizer.groups.a]\npatterns = ["hat.*"]\n'
    name = {"model.name": "forge_testing.models:bigram", "sample.max_new_tokens": 0}
    job = load_job(make_job(tmp_path, table), name)
    key = "optimizer.groups.a.patterns"
    with rejects(key, "hat.*", "not_found", ConfigError, where="head.weight"):
        Trainer(job)
    assert not (tmp_path / "run").exists()


def test_muon_is_tried_on_a_custom_model_before_a_run_begins(tmp_path: Path) -> None:
    theirs = {"model.name": "forge_testing.models:bigram", "sample.max_new_tokens": 0}
    job = load_job(make_job(tmp_path), theirs | {"optimizer.name": "muon"})
    with rejects("optimizer.name", "muon", "no_matrix", ConfigError):
        Trainer(job)


def test_the_table_of_the_page_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/running.md").read_text()
    (table,) = re.findall(r"```toml\n(\[optimizer.groups.*?)```", page, re.DOTALL)
    config = load_job(make_job(tmp_path, table), {"train.steps": 2000}).config
    assert config.optimizer.groups["tables"].lr_multiplier == 0.0
    assert config.train.stages["all"].lr_multipliers == {"tables": 0.1}


def test_flags_reach_groups_and_stages(tmp_path: Path) -> None:
    from forge_train.config.flags import add_flags
    from forge_train.config.layers import read_layers

    layers = read_layers(make_job(tmp_path, PLAN))
    flags = [
        "--optimizer.groups.head.lr_multiplier",
        "0.25",
        "--train.stages.whole.start_step",
        "5",
    ]
    assert add_flags(layers, flags) == []
    assert layers.at("optimizer.groups.head.lr_multiplier") == 0.25
    assert layers.at("train.stages.whole.start_step") == 5
