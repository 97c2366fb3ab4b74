"""Schedule-free AdamW: gradients at one point, an average at another, and no decay of the learning rate to plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from forge_core._renamed import config_form
from forge_core._shared.shards import local_tensor
from forge_core.optim.base import (
    Group,
    NamedOptimizer,
    Params,
    Slots,
    is_rounded,
    local_gradient,
    pieces,
)
from forge_core.optim.config import ScheduleFreeConfig

_NUMBERS = ("step", "lr_max", "weight_sum")
_TINY = 1e-38


class ScheduleFreeAdamW(NamedOptimizer):
    """Schedule-free AdamW ("The Road Less Scheduled", Defazio et al. 2024, algorithm 1), with decoupled decay at y.

        optimizer = ScheduleFreeAdamW(param_groups(model), lr=2.5e-3)
        loss.backward(); optimizer.step()                     # the model's weights are y
        optimizer.eval(); evaluate(model); optimizer.train()  # they are x, the average, in between

    With gradient g at y, betas (b1, b2), learning rate lr and the fraction c of this step in the average:

        v <- b2 v + (1 - b2) g^2;   z <- z - lr (g / (sqrt(v / (1 - b2^t)) + eps) + weight_decay y)
        x <- (1 - c) x + c z;       y <- (1 - b1) z + b1 x

    c is the weight of this step, t^r (greatest lr so far)^weight_lr_power, over the sum of all weights: nearly 1 / t.
    The learning rate usually warms up and then stays constant; any other is used as it is set, as in the authors'
    package. x and z start at the weights as they are at the first update.

    Between `eval()` and `train()` the weights are x: to evaluate, to save, and to distribute. Weights that are written
    there are the new x, so load a checkpoint there. `named_state()` (z, v and numbers, not x) and `load_named_state()`
    raise RuntimeError elsewhere, and `step` raises there. y is always computed from x and z by the same operations, so
    `eval()` and `train()` change no bits, and weights and named state are enough to continue with the same bits. Torch's
    form of state has x, too. Under FSDP2 call `forge_parallel.reshard(model)` before either call.

    Args:
        betas: fraction of x in y, and decay of the squares. r, weight_lr_power: the weight of a step, above.
        state_dtype: "bf16" stores the squares in bf16, rounded stochastically. Weights must be fp32.

    Cost: 12 bytes of state per parameter with a gradient, of which named state has 8 (10 and 6 with the squares in bf16); no
    communication, no host sync. `weight_sum` is in units of the greatest weight, so that fp32 counts every step of a
    long run.
    """

    rounds_state = True

    @config_form
    def __init__(
        self,
        params: Params,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        state_dtype: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        self._started: set[Tensor] = set()
        ScheduleFreeConfig(r, weight_lr_power)  # raises for what is out of range
        own = {"r": r, "weight_lr_power": weight_lr_power, "train_mode": True}
        super().__init__(
            params, lr, weight_decay, state_dtype=state_dtype, betas=betas, eps=eps, **own
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Torch calls it for a copy and in `load_state_dict`: x and z may be other tensors."""
        super().__setstate__(state)
        self._started = set()

    def slots(self, group: Group) -> Slots:
        return Slots(("z", "exp_avg_sq"), _NUMBERS)

    def fresh(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        weights = {name: parameter.detach().clone() for name in ("x", "z")}
        return {**super().fresh(parameter, group), **weights}

    @torch.no_grad()
    def eval(self) -> None:
        """Put x, the average, into the weights, if it is not there."""
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] else ():
                state = self.state_of(parameter, group)
                self._start(parameter, state)
                local_tensor(parameter).copy_(local_tensor(state["x"]))
            group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Take the weights as x, and put y into them, if it is not there."""
        for group in self.param_groups:
            for parameter in group["params"] if not group["train_mode"] else ():
                state = self.state_of(parameter, group)
                local_tensor(state["x"]).copy_(local_tensor(parameter))
                self._started.discard(parameter)  # x may be the first of a fork of another run
                self._start(parameter, state)

                tensors = tuple(map(local_tensor, (parameter, state["x"], state["z"])))
                for lists in pieces([tensors]):
                    for y, x, z in zip(*lists):
                        y.copy_(_training_point(x, z, group["betas"][0]))
            group["train_mode"] = True

    def named_state(self) -> dict[str, dict[str, Tensor | float]]:
        """Return the named state, as `NamedOptimizer` does; RuntimeError unless the weights are x."""
        self._require_mode(False, "named state belongs to the average", "eval")
        return super().named_state()

    def load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy in a named state, as `NamedOptimizer` does; RuntimeError unless the weights are x."""
        self._require_mode(False, "named state belongs to the average", "eval")
        super().load_named_state(state)

    def update_groups(self, skip: Tensor | None) -> None:
        """Update all groups; RuntimeError unless the weights are y."""
        self._require_mode(True, "a step needs gradients of the training point", "train")
        super().update_groups(skip)

    def update(self, group: Group, parameters: list[Tensor], skip: Tensor | None) -> None:
        states = [self.state_of(parameter, group) for parameter in parameters]
        for parameter, state in zip(parameters, states):
            self._start(parameter, state)

        for parameter, state, numbers in zip(parameters, states, zip(*_count(group, states, skip))):
            y, x, z = map(local_tensor, (parameter, state["x"], state["z"]))
            gradient, squares = local_gradient(parameter), local_tensor(state["exp_avg_sq"])
            if is_rounded(group):  # the squares are in bf16; y, x and z never
                others = (y, gradient, x, z)
                for square, *rest in self.in_fp32(parameter, group, [squares], others):
                    _update(group, (*rest, square), numbers, skip)
            else:
                for lists in pieces([(y, gradient, x, z, squares)]):
                    for piece in zip(*lists):
                        _update(group, piece, numbers, skip)

    def _start(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Copy the weights to x and z before the first update: they may have changed since this was built."""
        if parameter in self._started:
            return
        self._started.add(parameter)
        weights, untouched = local_tensor(parameter), state["step"] == 0
        for name in ("x", "z"):
            other = local_tensor(state[name])
            other.copy_(torch.where(untouched, weights, other))

    def _require_mode(self, train_mode: bool, reason: str, call: str) -> None:
        """RuntimeError unless the weights are y (`train_mode`) or x."""
        if any(group["train_mode"] != train_mode for group in self.param_groups):
            text = f"{reason}, and the weights are the other point; call optimizer.{call}() first"
            raise RuntimeError(text)


def _count(
    group: Group, states: list[dict[str, Tensor]], skip: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Count a step of each of N parameters; return (learning rate, fraction c, bias correction), each (N,) fp32.

    Where the step is skipped the counts stay, and rate and fraction are 0. No division by zero: the correction is at
    least that of step 1, and the sum contains the weight of this step.
    """
    old = {name: torch.stack([state[name] for state in states]) for name in _NUMBERS}  # (N,)
    step = old["step"] + 1

    # c = weight / total, both in units of highest ** weight_lr_power: the sum so far moves to the new unit
    highest = old["lr_max"].clamp_min(group["lr"])
    weight = step ** group["r"]
    scale = (old["lr_max"] / highest.clamp_min(_TINY)) ** group["weight_lr_power"]
    total = old["weight_sum"] * scale + weight

    # 1 - b2^t: expm1 keeps its digits where b2^t is nearly 1
    correction = -torch.expm1(step * math.log(max(group["betas"][1], _TINY)))
    rate, fraction = torch.full_like(step, group["lr"]), weight / total

    new = {"step": step, "lr_max": highest, "weight_sum": total}
    if skip is not None:
        new = {name: torch.where(skip != 0, old[name], value) for name, value in new.items()}
        rate, fraction = (torch.where(skip != 0, 0.0, value) for value in (rate, fraction))
    for name, values in new.items():
        torch._foreach_copy_([state[name] for state in states], list(values.unbind()))
    return rate, fraction, correction


def _update(
    group: Group, piece: tuple[Tensor, ...], numbers: tuple[Tensor, ...], skip: Tensor | None
) -> None:
    """Update a piece (y, gradient, x, z, v) in place, with the numbers (rate, fraction, correction) of the step."""
    (y, gradient, x, z, square), (rate, fraction, correction) = piece, numbers
    beta1, beta2 = group["betas"]

    # v <- b2 v + (1 - b2) g^2
    squared, weight = gradient * gradient, 1 - beta2
    if skip is not None:
        squared, weight = _zeroed(squared, skip), torch.where(skip != 0, 0.0, weight)
    square.lerp_(squared, weight)

    # z <- z - lr (g / (sqrt(v / correction) + eps) + weight_decay y)
    direction = gradient / ((square / correction).sqrt_().add_(group["eps"]))
    direction.add_(y, alpha=group["weight_decay"])
    if skip is not None:  # a rate of 0 does not cancel infinities and NaN
        direction = _zeroed(direction, skip)
    z.sub_(direction.mul_(rate))

    x.lerp_(z, fraction)
    y.copy_(_training_point(x, z, beta1))


def _zeroed(values: Tensor, skip: Tensor) -> Tensor:
    """fp32 values, in place, or zeros where `skip` is 1, whatever they hold.

    A bitwise and with all ones or zeros: on a CPU a fifth of the time of `torch.where` with one condition for all.
    """
    values.view(torch.int32).bitwise_and_((skip == 0).to(torch.int32).neg())
    return values


def _training_point(x: Tensor, z: Tensor, beta1: float) -> Tensor:
    """y = (1 - b1) z + b1 x. Each operation rounds once, where a fused one does so in some elements and layouts only:
    so y can be computed again, with the same bits."""
    return (z - x).mul_(1 - beta1).add_(x)
