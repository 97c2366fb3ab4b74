"""A step of one's own: distillation, DPO and a loss of logits, each beside the plain loop that it stands for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import Transformer, initialize
from forge_data import Batch, Loader, open_stream
from forge_testing import forge_train
from forge_testing.problems import assert_problem
from forge_testing.runs import fit_alone, fit_on_ranks, make_job
from forge_testing.vlm_jobs import write_vlm_job
from forge_train import ConfigError, load_job, read_run
from forge_train.build.layout import layout_problems, model_problems

pytestmark = pytest.mark.lane("test")

S, ROWS = 32, 12


def _forward(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(batch.tokens, batch.positions, batch.document_ids)
    return logits.float()


def _teacher(vocab_size: int) -> nn.Module:
    torch.manual_seed(7)
    return nn.Embedding(vocab_size, vocab_size).requires_grad_(False)


def distil(model: nn.Module, batch: Batch, *, temperature: float = 1.0) -> dict[str, Tensor]:
    """Sum over labels of KL(teacher, student), and the sum of token losses to look at."""
    logits = _forward(model, batch)
    target = (_teacher(logits.size(-1))(batch.tokens) / temperature).log_softmax(-1)
    valid = batch.labels != -100
    kl = F.kl_div((logits / temperature).log_softmax(-1), target, log_target=True, reduction="none")
    plain = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    return {"kl": (kl.sum(-1) * valid).sum(), "cross_entropy": plain}


def dpo(model: nn.Module, batch: Batch, *, beta: float) -> dict[str, Tensor]:
    """Rows are pairs, the preferred one first (Rafailov et al. 2023); the reference prefers none."""
    logits = _forward(model, batch)
    scores = -F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none").sum(1)  # (B,)
    margins = beta * (scores[::2] - scores[1::2])
    real = (batch.instance_ids[::2] >= 0).to(margins.device)
    losses = -F.logsigmoid(margins) * real
    return {"loss": losses.sum(), "preferred": ((margins > 0) & real).sum().float()}


def pairs(batch: Batch) -> float:
    return float((batch.instance_ids[::2] >= 0).sum())


dpo.count = pairs  # type: ignore[attr-defined]


def not_sums(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": _forward(model, batch)}


OBJECTIVES: dict[str, dict[str, Any]] = {
    "distil": {"train.objective_options": {"temperature": 2.0}},
    "dpo": {"train.objective_options": {"beta": 0.1}},
}


def options(name: str) -> dict[str, Any]:
    return {"train.objective": f"{__name__}:{name}", "train.micro_batch": 2, **OBJECTIVES[name]}


def first_step(job: Path, name: str) -> tuple[float, float]:
    """Loss and gradient norm of step 1 by hand: the whole batch at once."""
    config = load_job(job).config
    with torch.device("meta"):
        model = Transformer(config.model)
    initialize(model.to_empty(device="cpu"), config.run.seed)
    (source,) = config.data.sources.values()
    batch = next(Loader(open_stream(source, config.data.seq_len, config.run.seed), ROWS))
    function, given = globals()[name], OBJECTIVES[name]["train.objective_options"]
    loss, *_ = function(model, batch, **given).values()
    loss = loss / (pairs(batch) if name == "dpo" else batch.label_weight)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(loss.detach()), float(nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_first_step_of_an_objective_is_that_by_hand(tmp_path: Path, name: str) -> None:
    job = make_job(tmp_path)
    fit_alone(job, **options(name), **{"train.steps": 1, "sample.max_new_tokens": 0})
    rows = read_run(tmp_path / "run").metrics
    loss, norm = first_step(job, name)
    assert rows["loss"][0] == pytest.approx(loss, rel=1e-5)
    assert rows["grad_norm"][0] == pytest.approx(norm, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (
            ("--train.objective", "dpo"),
            ("train.objective 'dpo'", "forge.objectives"),
        ),
        (
            ("--train.objective", f"{__name__}:dpo"),
            ("train.objective_options.beta ", f"'{__name__}:dpo'"),
        ),
        (
            ("--train.loss", f"{__name__}:dpo"),
            (f"train.loss '{__name__}:dpo'", "(logits, labels, weights, **options)"),
        ),
        (("--train.loss", "crossentropy"), ("train.loss 'crossentropy'", "'cross_entropy'?")),
        (
            (
                "--train.loss",
                "forge_testing.extensions:squared_error",
                "--train.objective",
                f"{__name__}:distil",
            ),
            (f"train.objective '{__name__}:distil'", "'forge_testing.extensions:squared_error'"),
        ),
    ],
    ids=str,
)
def test_names_that_cannot_be_imported_are_rejected(
    tmp_path: Path, flags: tuple[str, ...], named: tuple[str, ...]
) -> None:
    for verb in ("explain", "run"):
        told = forge_train(verb, make_job(tmp_path), *flags)
        assert told.code == 78
        assert all(name in " ".join(told.err.split()) for name in named), told.err


def test_F209_an_objective_of_parts_of_sequences_with_images_is_rejected(tmp_path: Path) -> None:
    """Before step 1, from the description alone, and for models of others by what they say."""
    name = f"{__name__}:dpo"
    keys = {"train.objective": name, "train.objective_options": {"beta": 0.1}, "parallel.cp": 2}
    config = load_job(write_vlm_job(tmp_path), keys).config
    wanted = "train.objective", name, "images"
    assert_problem(ConfigError(layout_problems(config, 2, 2)), *wanted)
    assert layout_problems(replace(config, parallel=replace(config.parallel, cp=1)), 1) == []

    model, layout = nn.Linear(2, 2), config.parallel.axes(2, 2)
    model.extra_inputs = ("images", "after_embedding")  # type: ignore[assignment]
    assert_problem(ConfigError([*model_problems(model, config, layout)]), *wanted)


@pytest.mark.lane("quick")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "name", "named"),
    [
        ({"pp": 2, "num_layers": 2}, "distil", "parallel.pp 2"),
        ({"tp": 2}, "distil", "parallel.tp 2"),
        ({}, "not_sums", "(6, 32, 257)"),
    ],
    ids=str,
)
def test_layouts_and_results_that_an_objective_cannot_have_are_rejected(
    tmp_path: Path, layout: dict[str, Any], name: str, named: str
) -> None:
    keys: dict[str, Any] = {
        f"{'model' if k == 'num_layers' else 'parallel'}__{k}": v for k, v in layout.items()
    }
    keys["train__objective"] = f"{__name__}:{name}"
    for rank in fit_on_ranks(2, make_job(tmp_path), None, **keys):
        assert rank.code == 78
        assert f"train.objective '{keys['train__objective']}'" in rank.problems[0]
        assert named in rank.problems[0]
