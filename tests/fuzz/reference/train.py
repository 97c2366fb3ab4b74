"""Train the job of a case folder in one process, in plain torch.

`steps` of `run.json` may be null: then the run has the length of the job. It may have `bad_steps`:
steps whose loss is not finite and that change nothing, which `resilience.nonfinite` skips. It may
have `rollbacks`: the step of the checkpoint that each rollback of the run went back
to, in order. Each multiplies the learning rate of all later steps by
`resilience.rollback.lr_factor`, also where a later one goes back further.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .data import Data
from .lora import merged, round_base, trained_names
from .losses import after_step, evaluation_loss, step_loss
from .optimizers import Optimizer, group_of
from .parametrization import lr_scales
from .rows import Step
from .schedule import rate_factors, token_counts, token_target

BUFFERS = ("expert_bias", "lagged_counts", "position_ids")  # last parts of names


def multipliers(job: dict, step: int) -> dict[str, float]:
    """Return the factor of the learning rate of each group in `step`, counted from 1."""
    factors = {name: keys["lr_multiplier"] for name, keys in job["optimizer"]["groups"].items()}
    stages = job["train"]["stages"].values()
    for stage in sorted(stages, key=lambda stage: stage["start_step"]):
        if stage["start_step"] <= step:
            factors |= stage["lr_multipliers"]
    return factors


def is_due(every: int, step: int, last: int) -> bool:
    """Return whether an evaluation follows a step; 0 is once, after the last step."""
    return step == last or (every > 0 and step % every == 0)


def finite(value: Any) -> Any:
    """Return None for a float that is not finite, as metrics.jsonl does, and other values as they are."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Run:
    """A training run: weights, optimizer, data and the rows of its metrics."""

    def __init__(self, folder: Path):
        self.job = json.loads((folder / "job.json").read_text())
        self.run = json.loads((folder / "run.json").read_text())
        dtype = getattr(torch, self.run["dtype"])

        # Parameters are cast; buffers keep their dtypes.
        self.weights: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        for name, array in np.load(folder / "weights.npz").items():
            tensor = torch.from_numpy(array)
            if name.rpartition(".")[2] in BUFFERS:
                self.buffers[name] = tensor
            else:
                self.weights[name] = tensor.to(dtype)
        trained = trained_names(self.job, self.weights)
        round_base(self.job, self.weights, trained)
        scales = lr_scales(self.job, self.weights)
        self.optimizer = Optimizer(self.job, {n: self.weights[n] for n in trained}, scales)

        # The schedule depends on the tokens of all steps, so the data is read twice.
        target = token_target(self.job, self.weights)
        read = Data(self.job, folder, self.run["readers"], self.run["skipped"])
        tokens = token_counts(self.job, (step.tokens for step in read.steps()), target)
        self.data = Data(self.job, folder, self.run["readers"], self.run["skipped"])
        self.factors = rate_factors(self.job, tokens)
        self.rows: list[dict[str, Any]] = []
        self.margins: list[float] = []

    def model_weights(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of the model, with adapters merged into them."""
        return merged(self.job, {**self.weights, **trained})

    def train(self, steps: int) -> None:
        """Train for a number of steps and evaluate where the job does."""
        last = len(self.factors)
        if self.job["eval"]["at_start"]:
            self.rows.append({"step": 0, **self.evaluate(0, last)})
        for number, step in enumerate(islice(self.data.steps(), steps), start=1):
            row = self.train_step(number, step)
            self.rows.append(row | self.evaluate(number, last))

    def rate(self, number: int, step: Step) -> float:
        """Return the learning rate of a step, before the factors of groups."""
        rate = self.job["optimizer"]["lr"] * self.factors[number - 1] * step.lr_multiplier
        to_steps = enumerate(self.run.get("rollbacks", []), start=1)
        earlier = max((count for count, to_step in to_steps if to_step < number), default=0)
        return rate * self.job["resilience"]["rollback"]["lr_factor"] ** earlier

    def train_step(self, number: int, step: Step) -> dict[str, Any]:
        """Train one step and return its row."""
        lr = self.rate(number, step)
        row = {"step": number, "lr": lr, "tokens": step.tokens, "instances": step.digest}
        factors = multipliers(self.job, number)
        leaves = {
            name: weight.detach().requires_grad_()
            for name, weight in self.optimizer.weights.items()
            if factors.get(group_of(self.job, name), 1.0) != 0.0
        }
        loss = step_loss(self.job, self.model_weights(leaves), self.buffers, step)
        found = torch.autograd.grad(loss.total, list(leaves.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
        }
        norm = math.sqrt(math.fsum(g.double().square().sum().item() for g in gradients.values()))
        self.margins.append(loss.margin)

        # A step without a label has a gradient if its router has losses, but nothing changes.
        bad = number in self.run.get("bad_steps", [])
        micro_batches = [rows for reader in step.micro_batches for rows in reader]
        labeled = any((rows.weights > 0).any() for rows in micro_batches)
        known = labeled and not bad
        columns = {name: value if known else math.nan for name, value in loss.columns.items()}
        row |= {"grad_norm": math.nan if bad else norm, **columns}
        if not math.isfinite(norm) or not math.isfinite(columns["loss"]):
            return row

        largest = self.job["train"]["max_grad_norm"]
        if largest is not None:  # with the constant of torch.nn.utils.clip_grad_norm_
            factor = min(1.0, largest / (norm + 1e-6))
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        self.optimizer.step(gradients, lr, factors)
        after_step(self.job, self.buffers, loss, number, len(self.factors))
        return row

    def evaluate(self, number: int, last: int) -> dict[str, float]:
        """Return the losses of the sets that are evaluated after a step; 0 is the start."""
        columns: dict[str, float] = {}
        if self.job["eval"]["every_steps"] == 0:
            return columns
        for name, column, every in self._evaluations():
            if number == 0 or is_due(every, number, last):
                weights = self.model_weights(self.optimizer.evaluation_weights())
                rows = self.data.validation(name)
                columns[column] = evaluation_loss(self.job, weights, self.buffers, rows)
        return columns

    def _evaluations(self) -> Iterator[tuple[str | None, str, int]]:
        every = self.job["eval"]["every_steps"]
        if self.job["data"]["validation"]:
            yield None, "val_loss", every
        for name, keys in self.job["eval"]["sets"].items():
            own = keys["every_steps"]
            yield name, f"eval/{name}/loss", every if own is None else own


def train(folder: Path, steps: int | None = None) -> None:
    """Train the case of `folder` and write `reference.json` and `reference.npz` into it.

    The second holds the trained weights and buffers by name (with LoRA the adapters and what is
    trained next to them), and `ema.` + name for weights that are evaluated in their place.
    """
    run = Run(folder)
    steps = run.run["steps"] if steps is None else steps
    run.train(len(run.factors) if steps is None else steps)
    rows = [{name: finite(value) for name, value in row.items()} for row in run.rows]
    report = {"rows": rows, "margins": run.margins}
    (folder / "reference.json").write_text(json.dumps(report))

    arrays = {**run.optimizer.weights, **run.buffers}
    if run.optimizer.evaluation_weights() is not run.optimizer.weights:
        arrays |= {f"ema.{n}": w for n, w in run.optimizer.evaluation_weights().items()}
    np.savez(folder / "reference.npz", **{n: w.detach().numpy() for n, w in arrays.items()})
