"""Weighted labels, ragged extras and positions of three axes: gradients, cuts and refusals.

tests/equivalence trains them in layouts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import TransformerConfig
from forge_data import Batch, Loader, Ragged
from forge_parallel import make_meshes, parallelize
from forge_parallel.check_model import extra_problems
from forge_parallel.compute import divide_batch
from forge_testing.extensions import PatchTransformer
from forge_testing.problems import assert_problem
from forge_testing.runs import make_job
from forge_train import ConfigError, Trainer, load_job
from forge_train.build.objective import make_compute

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]
S, D, VOCAB, ROWS = 16, 32, 64, 12


class Placed(PatchTransformer):
    """With two further axes of position."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.axes: Any = nn.Linear(2, config.dim, bias=False)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        added: Tensor = self.axes(positions[:, 1:].transpose(1, 2).float() / S)
        return x + added

    def pipeline_parts(self) -> dict[str, Any]:
        return {**super().pipeline_parts(), "first": ("embedding", "patch", "axes")}


class Pictures:
    """Rows of two documents, of patches (i % 4 of them), of uneven weights."""

    def arrays(self, ids: np.ndarray) -> dict[str, Any]:
        rows = [self.row(int(i)) for i in ids]
        names = ("tokens", "labels", "positions", "document_ids", "weights")
        empty = self.row(0)
        stacked = {n: np.stack([r[n] for r in rows]) if rows else empty[n][None][:0] for n in names}
        patches = [r["patches"] for r in rows]
        offsets = np.cumsum([0, *map(len, patches)])
        values = np.concatenate([empty["patches"][:0], *patches])
        return {**stacked, "patches": Ragged(torch.from_numpy(values), torch.from_numpy(offsets))}

    def row(self, i: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(i)
        tokens = random.integers(0, VOCAB, S + 1)
        ends = np.arange(S) >= 5 + i % 7
        first = np.where(ends, 5 + i % 7, 0)
        labels = np.where(random.random(S) < 0.3, -100, tokens[1:])
        return {
            "tokens": tokens[:-1],
            "labels": labels,
            "document_ids": ends.astype(np.int64),
            "positions": np.stack([np.arange(S) - first, random.integers(0, 9, S), np.full(S, i)]),
            "weights": (random.random(S) / 100).astype(np.float32),
            "patches": random.standard_normal((i % 4, 4)).astype(np.float32),
        }

    def fingerprint(self) -> dict[str, str | int]:
        return {"pictures": 1}

    def __len__(self) -> int:
        return 100


def build() -> Placed:
    torch.manual_seed(0)
    model = Placed(
        TransformerConfig(vocab_size=VOCAB, dim=D, num_layers=4, num_heads=4, max_seq_len=S)
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    return model


def reference() -> tuple[float, dict[str, Tensor]]:
    """Row by row, with torch's own loss."""
    model, batch = build(), next(Loader(Pictures(), ROWS))
    assert batch.weights is not None
    assert 0 < batch.label_weight < 1, "a floor of one would show"
    total = torch.zeros(())
    for row in batch.split(1):
        logits = model(row.tokens, row.positions, row.document_ids, row.extras["patches"])
        losses = F.cross_entropy(logits[0], row.labels[0], reduction="none")
        loss = (losses * row.weights[0]).sum() / batch.label_weight
        loss.backward()
        total += loss.detach()
    return float(total), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.lane("quick")
@pytest.mark.distributed
@pytest.mark.parametrize("micro_batch", [3, ROWS])
def test_gradients_and_evaluation_are_those_of_rows(tmp_path: Path, micro_batch: int) -> None:
    """One process of the runner, beside torch's own loss of each row."""
    wanted, gradients = reference()
    sizes = {"model.dim": D, "model.num_layers": 4, "model.num_heads": 4, "data.seq_len": S}
    config = load_job(make_job(tmp_path), {**sizes, "train.global_batch": ROWS}).config
    meshes = make_meshes(config.parallel)
    parts = divide_batch(config.parallel, ROWS, 1, micro_batch)
    model = parallelize(build(), config.parallel, meshes, seq_len=S)
    compute = make_compute(model, config, meshes, parts, None)
    rows = {"micro_batch": parts.size, "num_micro_batches": parts.count}
    batch = next(Loader(Pictures(), ROWS, 0, 1, **rows))
    assert float(compute.gradients(batch, lambda: batch.label_weight)) == pytest.approx(
        wanted, rel=1e-5
    )
    for name, parameter in model.named_parameters():
        error = (parameter.grad - gradients[name]).abs().max()
        assert error <= 1e-5 * gradients[name].abs().max(), name
    losses = sum(float(compute.losses(part)) for part in batch.split(compute.sequences_at_once))
    assert losses / batch.label_weight == pytest.approx(wanted, rel=1e-5)


def test_extras_that_are_missing_or_cannot_be_split_are_rejected(tmp_path: Path) -> None:
    config = load_job(make_job(tmp_path)).config
    one, two = config.parallel.axes(1), replace(config.parallel, cp=2).axes(2)
    model, batch = build(), Loader(Pictures(), 4).filler(1)
    bare = replace(batch, extras={}, label_weight=0.0)
    assert extra_problems(model, batch, two, "[data]") == []
    (missing,) = extra_problems(model, bare, one, "[data]")
    assert_problem(ConfigError([missing]), "model.name", ..., "extras")
    assert {"patches", "[data]"} <= set(re.split(r"[ ,;]+", missing.rule))

    class Rigid(Placed):
        extra_inputs = ("patches",)

    model.__class__ = Rigid
    assert extra_problems(model, batch, one) == []
    (uncut,) = extra_problems(model, batch, two, "[data]")
    assert_problem(ConfigError([uncut]), "parallel.cp", 2, "after_embedding")
    (both,) = extra_problems(model, batch, replace(config.parallel, cp=2, tp=2).axes(4))
    assert_problem(ConfigError([both]), "parallel.cp", 2, "tp")


def test_a_batch_of_three_axes_is_split_along_its_tokens() -> None:
    """Rows first, tokens last."""
    batch: Batch = next(Loader(Pictures(), 3))
    assert batch.positions.shape == (3, 3, S), "as many rows as axes: a wrong dim would go unseen"
    assert torch.equal(batch.split(1)[1].positions[0], batch.positions[1])


class PictureSource:
    """Rows with patches, as a job names them; `plain` leaves the patches out."""

    vocab_size, max_token_id, tokenizer = VOCAB, VOCAB - 1, None

    def __init__(self, config: Any, plain: bool = False) -> None:
        self.plain = plain

    def fingerprint(self) -> dict[str, str | int]:
        return {"plain": int(self.plain)}

    def stream(self, seq_len: int, seed: int) -> Any:
        return _NoPatches() if self.plain else Pictures()


class _NoPatches(Pictures):
    def arrays(self, ids: np.ndarray) -> dict[str, Any]:
        return {n: v for n, v in super().arrays(ids).items() if n != "patches"}


def build_pictured(vocab_size: int) -> Placed:
    return build()


@pytest.mark.lane("quick")
@pytest.mark.parametrize("plain", [False, True])
def test_validation_rows_without_the_models_extras_are_rejected_before_the_start(
    tmp_path: Path, plain: bool
) -> None:
    name = f"{__name__}:PictureSource"
    extra = f'[data.validation]\nname = "{name}"\noptions = {{ plain = {str(plain).lower()} }}\n'
    keys = {"model.name": f"{__name__}:build_pictured", "data.sources.text.name": name}
    keys |= {"data.seq_len": S, "sample.max_new_tokens": 0, "metrics.console": "off"}
    path = make_job(tmp_path, extra)
    lines = path.read_text().split("[model]\n")
    path.write_text(lines[0] + lines[1][lines[1].index("[data]") :])
    job = load_job(path, keys)
    if not plain:
        assert Trainer(job).fit().val_loss is not None
        return
    with pytest.raises(ConfigError, match=r"data\.validation.*have none"):
        Trainer(job)
