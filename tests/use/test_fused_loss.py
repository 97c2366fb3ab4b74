"""train.loss = "fused_cross_entropy" is the loss of the logits without ever holding them.

Bound: fp32 1e-5 of max|a - b| / max|b|.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core._shared.cross_entropy import _TOKENS_FUSED
from forge_testing import forge_train, runs, write_job
from forge_testing.problems import rejects
from forge_train import ConfigError, Trainer, load_job

pytestmark = pytest.mark.lane("test")

V = 64
FUSED = {"train.loss": "fused_cross_entropy"}
KEYS: dict[str, Any] = {
    "data.sources.text.name": f"{__name__}:Weighted",
    "model.vocab_size": V,
    "model.num_layers": 4,
    "train.micro_batch": 3,
    "train.steps": 4,
    "eval.every_steps": 2,
    "sample.max_new_tokens": 0,
}


class WeightedRows:
    def __init__(self, first: int, seq_len: int, seed: int) -> None:
        self.first, self.seq_len, self.seed = first, seq_len, seed

    def __len__(self) -> int:
        return 1000

    def fingerprint(self) -> dict[str, str | int]:
        return {"first": self.first, "seq_len": self.seq_len, "seed": self.seed}

    def arrays(self, ids: np.ndarray) -> dict[str, Any]:
        rows = [self._row(int(i)) for i in [*ids, 0]]
        return {name: np.stack([row[name] for row in rows])[:-1] for name in rows[0]}

    def _row(self, i: int) -> dict[str, np.ndarray]:
        random, length = np.random.default_rng([self.seed, self.first + i]), self.seq_len
        line = random.integers(0, V, length + 1)
        documents = np.arange(length) // (length // 2)
        return {
            "tokens": line[:-1],
            "labels": np.where(random.random(length) < 0.3, -100, line[1:]),
            "positions": np.arange(length) % (length // 2),
            "document_ids": documents,
            "weights": random.random(length).astype(np.float32),
        }


class Weighted:
    """Rows of two documents without end, with uneven weights, a third of the labels ignored."""

    vocab_size, max_token_id, tokenizer = V, V - 1, None
    rows = WeightedRows

    def __init__(self, config: Any) -> None:
        self.first = 0 if config.split == "train" else 10**6

    def fingerprint(self) -> dict[str, str | int]:
        return {"first": self.first}

    def stream(self, seq_len: int, seed: int) -> WeightedRows:
        return self.rows(self.first, seq_len, seed)


class PaddedRows(WeightedRows):
    """Rows of 1 to `seq_len` tokens; the rest of a row is padding."""

    def _row(self, i: int) -> dict[str, np.ndarray]:
        row, length = super()._row(i), 1 + (self.seed + self.first + i) * 7 % self.seq_len
        for name, value in {
            "tokens": 0,
            "labels": -100,
            "positions": 0,
            "document_ids": -1,
        }.items():
            row[name][length:] = value
        return row


class Padded(Weighted):
    rows = PaddedRows


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_it_trains_as_the_loss_of_logits_does(tmp_path: Path, recompute: str, tied: bool) -> None:
    """In one process; tests/equivalence has the layouts."""
    keys = {**KEYS, "model.tie_embeddings": tied}
    plain, job = runs.make_job(tmp_path / "plain"), runs.make_job(tmp_path / "fused")
    wanted = runs.fit_reference(plain, **keys).weights
    got = runs.fit_alone(job, **keys, **FUSED, **{"parallel.recompute": recompute}).weights
    runs.assert_close(got, wanted)
    runs.assert_same_rows(runs.columns(job), runs.columns(plain))


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    keys = {**KEYS, **FUSED, "schedule.name": "constant"}
    straight = runs.fit_alone(runs.make_job(tmp_path / "straight"), **keys)
    job = runs.make_job(tmp_path / "resumed")
    runs.fit_alone(job, **{**keys, "train.steps": 2})
    assert runs.together([straight, runs.fit_alone(job, **keys)]).keys() == straight.weights.keys()
    assert runs.columns(job) == runs.columns(tmp_path / "straight/job.toml")


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator gives."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.lane("quick")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_no_tensor_has_the_size_of_all_logits(tmp_path: Path, training: bool) -> None:
    rows, length, vocab = 2, 256, 40_000
    keys = {"model.vocab_size": vocab, "data.seq_len": length, "train.global_batch": rows}
    found = []
    for name, loss in (("plain", {}), ("fused", FUSED)):
        trainer = Trainer(load_job(runs.make_job(tmp_path / name), {**keys, **loss}))
        trainer.prepare()
        batch = next(trainer.loader)
        with Largest() as largest:
            if training:
                trainer.run.compute.gradients(batch, lambda: 1.0)
            else:
                trainer.run.compute.losses(batch)
        found.append(largest.numel)
    assert found[0] == rows * length * vocab
    assert found[1] <= _TOKENS_FUSED * vocab < rows * length * vocab


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (
            ("--train.objective", "forge_testing.extensions:smoothed"),
            ("train.objective 'forge_testing.extensions:smoothed'", "'fused_cross_entropy'"),
        ),
        (
            ("--model.name", "forge_testing.models:bigram"),
            ("train.loss 'fused_cross_entropy'", "forge_testing.models:bigram", "`loss`"),
        ),
        (
            ("--train.loss", "fused_crossentropy"),
            ("train.loss 'fused_crossentropy'", "'fused_cross_entropy'?"),
        ),
    ],
    ids=["objective", "then", "name"],
)
def test_where_it_cannot_be_computed_it_is_rejected(
    tmp_path: Path, flags: tuple[str, ...], named: tuple[str, ...]
) -> None:
    loss = () if "--train.loss" in flags else ("--train.loss", "fused_cross_entropy")
    told = forge_train("run", write_job(tmp_path), *loss, *flags)
    assert told.code == 78, told.err
    assert all(name in " ".join(told.err.split()) for name in named), told.err
    assert not (tmp_path / "run").exists()


def test_a_model_without_then_is_rejected_before_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    keys = {**FUSED, "model.name": "forge_testing.models:answering", "sample.max_new_tokens": 0}
    with rejects("train.loss", "fused_cross_entropy", "unsupported", ConfigError):
        Trainer(load_job(write_job(tmp_path), keys))
