"""Optimizers of the reference: AdamW, Lion, Muon and schedule-free AdamW, one tensor at a time.

An optimizer changes a dictionary of tensors by name. Moments and counts of a parameter begin at its
first update; a parameter that is not updated in a step keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

BETAS = {
    "adamw": (0.9, 0.95),
    "lion": (0.9, 0.99),
    "muon": (0.9, 0.95),
    "schedule_free_adamw": (0.9, 0.999),
}
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Keller Jordan 2024


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Return whether a parameter is a matrix, an embedding, or a stack of matrices.

    Biases and norms are vectors also where a stack, such as that of experts, gives them two dims.
    """
    part = name.removesuffix(".weight").rpartition(".")[2]
    return tensor.dim() >= 2 and not part.endswith(("bias", "norm"))


def in_block(name: str) -> bool:
    """Return whether a parameter is in a block: of the decoder, an encoder, a resampler or MTP."""
    return any(part.isdigit() or part.startswith("cross_") for part in name.split("."))


def group_of(job: dict, name: str) -> str | None:
    """Return the name of the group in `[optimizer.groups]` whose patterns match a parameter."""
    for group, keys in (job["optimizer"].get("groups") or {}).items():
        if any(fnmatchcase(name, pattern) for pattern in keys["patterns"]):
            return group
    return None


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """Return the Newton-Schulz iteration of a matrix, in its dtype (Keller Jordan 2024)."""
    a, b, c = NEWTON_SCHULZ
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Optimizer:
    """The optimizer of `[optimizer]` over a dictionary of weights, which it changes in place.

    `scales` are factors of the learning rate by name, such as those of maximal-update
    parametrization.
    """

    def __init__(self, job: dict, weights: dict[str, Tensor], scales: Mapping[str, float]):
        self.keys = job["optimizer"]
        self.job = job
        self.weights = weights
        self.scales = scales
        self.betas = self.keys["betas"] or BETAS[self.keys["name"]]
        self.state: dict[str, dict] = {name: {} for name in weights}
        self.updates = 0
        decay = self.keys["ema"]["decay"]
        self.ema = None if decay is None else {n: w.clone() for n, w in weights.items()}
        if self.keys["name"] == "schedule_free_adamw":  # `weights` are the training point y
            for name, weight in weights.items():
                self.state[name] = {"x": weight.clone(), "z": weight.clone(), "total": 0.0}

    def weight_decay(self, name: str) -> float:
        """Return the decay of a parameter: that of its group, or that of matrices."""
        group = group_of(self.job, name)
        own = None if group is None else self.keys["groups"][group]["weight_decay"]
        if own is not None:
            return own
        return self.keys["weight_decay"] if is_matrix(name, self.weights[name]) else 0.0

    def uses_muon(self, name: str) -> bool:
        """Return whether Muon updates a parameter, else AdamW."""
        group = group_of(self.job, name)
        own = None if group is None else self.keys["groups"][group]["muon"]
        return is_matrix(name, self.weights[name]) and (in_block(name) if own is None else own)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float, factors: Mapping[str, float]):
        """Update each parameter that has a gradient; `factors` are those of groups, by name."""
        for name, gradient in gradients.items():
            rate = lr * factors.get(group_of(self.job, name), 1.0) * self.scales.get(name, 1.0)
            state = self.state[name]
            state["step"] = state.get("step", 0) + 1
            if self.keys["name"] == "lion":
                self._lion(name, gradient, rate)
            elif self.keys["name"] == "schedule_free_adamw":
                self._schedule_free(name, gradient, rate)
            elif self.keys["name"] == "muon" and self.uses_muon(name):
                self._muon(name, gradient, rate)
            elif self.keys["name"] == "muon":
                self._adamw(name, gradient, rate * self.keys["muon"]["adamw_lr_multiplier"])
            else:
                self._adamw(name, gradient, rate)
        if self.ema is not None:
            # The first updates have a smaller decay, or the initial weights would dominate.
            self.updates += 1
            decay = min(self.keys["ema"]["decay"], (self.updates - 1) / (self.updates + 8))
            for name, average in self.ema.items():
                average.mul_(decay).add_(self.weights[name], alpha=1 - decay)

    def evaluation_weights(self) -> dict[str, Tensor]:
        """Return the weights to evaluate and to save."""
        if self.keys["name"] == "schedule_free_adamw":
            return {name: self.state[name]["x"] for name in self.weights}
        return self.weights if self.ema is None else self.ema

    def _decay(self, name: str, rate: float) -> None:
        # Decoupled weight decay (Loshchilov and Hutter 2017).
        self.weights[name].mul_(1 - rate * self.weight_decay(name))

    def _second_moment(self, name: str, gradient: Tensor) -> Tensor:
        """Return the corrected root of the average of squared gradients, plus eps."""
        state, beta = self.state[name], self.betas[1]
        square = state.setdefault("square", torch.zeros_like(gradient))
        square.mul_(beta).add_((1 - beta) * gradient**2)
        return (square / (1 - beta ** state["step"])).sqrt() + self.keys["eps"]

    def _adamw(self, name: str, gradient: Tensor, rate: float) -> None:
        state, beta = self.state[name], self.betas[0]
        mean = state.setdefault("mean", torch.zeros_like(gradient))
        mean.mul_(beta).add_((1 - beta) * gradient)
        update = mean / (1 - beta ** state["step"]) / self._second_moment(name, gradient)
        self._decay(name, rate)
        self.weights[name].sub_(rate * update)

    def _lion(self, name: str, gradient: Tensor, rate: float) -> None:
        # Chen et al. 2023, algorithm 2.
        state, (beta1, beta2) = self.state[name], self.betas
        mean = state.setdefault("mean", torch.zeros_like(gradient))
        update = (beta1 * mean + (1 - beta1) * gradient).sign()
        self._decay(name, rate)
        self.weights[name].sub_(rate * update)
        mean.mul_(beta2).add_((1 - beta2) * gradient)

    def _muon(self, name: str, gradient: Tensor, rate: float) -> None:
        # Keller Jordan 2024; "match_rms_adamw" of Liu et al. 2025.
        state, keys = self.state[name], self.keys["muon"]
        momentum = keys["momentum"]
        mean = state.setdefault("mean", torch.zeros_like(gradient))
        mean.mul_(momentum).add_((1 - momentum) * gradient)
        ahead = momentum * mean + (1 - momentum) * gradient if keys["nesterov"] else mean

        # A stack of matrices is orthogonalized matrix by matrix.
        dtype = torch.bfloat16 if keys["ns_dtype"] == "bf16" else gradient.dtype
        rows, columns = gradient.shape[-2:]
        matrices = ahead.reshape(-1, rows, columns).to(dtype)
        update = torch.stack([orthogonalize(m, keys["ns_steps"]) for m in matrices])
        if keys["adjust"] == "original":
            # Weights of linear layers are (outputs, inputs), those in stacks (inputs, outputs).
            outputs, inputs = (rows, columns) if gradient.dim() == 2 else (columns, rows)
            size = math.sqrt(max(1.0, outputs / inputs))
        else:
            size = 0.2 * math.sqrt(max(rows, columns))
        self._decay(name, rate)
        self.weights[name].sub_(rate * size * update.to(gradient.dtype).reshape(gradient.shape))

    def _schedule_free(self, name: str, gradient: Tensor, rate: float) -> None:
        # Defazio et al. 2024, with the weights of the average in the package schedulefree.
        state, keys, beta = self.state[name], self.keys["schedule_free"], self.betas[0]
        state["peak"] = max(state.get("peak", 0.0), rate)
        weight = state["step"] ** keys["r"] * state["peak"] ** keys["weight_lr_power"]
        state["total"] += weight
        part = weight / state["total"] if state["total"] > 0 else 0.0

        y, z, x = self.weights[name], state["z"], state["x"]
        update = gradient / self._second_moment(name, gradient) + self.weight_decay(name) * y
        z.sub_(rate * update)
        x.mul_(1 - part).add_(part * z)
        y.copy_((1 - beta) * z + beta * x)
