"""Schedule-free AdamW: gradients at one point, an average at another, and no decay of the rate to plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.optim.base import Group, NamedOptimizer, Slots, rounds
from forge_core.optim.config import OptimizerConfig
from forge_core.optim.local import gradient_shard, pieces, shard

_NUMBERS = ("step", "lr_max", "weight_sum")
_TINY = 1e-38


class ScheduleFreeAdamW(NamedOptimizer):
    """ "The Road Less Scheduled" (Defazio et al. 2024), with Adam's denominator and decoupled decay at y.

        optimizer = ScheduleFreeAdamW(model, OptimizerConfig("schedule_free_adamw", lr=2.5e-3))
        loss.backward(); optimizer.step()                     # the model's weights are y
        optimizer.eval(); evaluate(model); optimizer.train()  # they are x, the average, in between

    With gradient g at y, betas (b1, b2), rate lr and the share c of this step in the average:

        v <- b2 v + (1 - b2) g^2;   z <- z - lr (g / (sqrt(v / (1 - b2^t)) + eps) + weight_decay y)
        x <- (1 - c) x + c z;       y <- (1 - b1) z + b1 x

    c is this step's weight t^r (greatest lr so far)^weight_lr_power over the sum of all: nearly 1 / t. The rate
    warms up and then usually stays constant; any other is used as it is set, as in the authors' package. Both points begin at the weights as they are at the first update.

    Between `eval()` and `train()` the weights are x, the model to evaluate, to save and to give away. What
    is written into them then is the new x, so a checkpoint is loaded there: `named_state()` (z, v and numbers, not
    x) and `load_named_state()` want it, and `step` refuses it. y always comes from x and z by the same
    operations, so a look at x changes no bits, and weights and named state are enough to go on with the same
    ones. Torch's form of state has x, too. Under FSDP2 call `forge_parallel.reshard(model)` before either call.

    Cost: 12 bytes of state per trainable parameter, of which named state has 8 (10 and 6 with the squares in bf16); no communication, no host
    sync. `weight_sum` is in units of the greatest weight, so that fp32 counts every step of a long run.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        own = config.schedule_free
        self._begun: set[Tensor] = set()
        super().__init__(
            model,
            config,
            betas=config.resolved_betas,
            eps=config.eps,
            r=own.r,
            weight_lr_power=own.weight_lr_power,
            train_mode=True,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Torch calls it for a copy and behind `load_state_dict`: the points may be others."""
        super().__setstate__(state)
        self._begun = set()

    rounds_state = True

    def slots(self, group: Group) -> Slots:
        return Slots(("z", "exp_avg_sq"), _NUMBERS)

    def fresh(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        points = {name: parameter.detach().clone() for name in ("x", "z")}
        return {**super().fresh(parameter, group), **points}

    @torch.no_grad()
    def eval(self) -> None:
        """Put x, the average, into the weights, if they are not there."""
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] else ():
                state = self.state_of(parameter, group)
                self._begin(parameter, state)
                shard(parameter).copy_(shard(state["x"]))
            group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Take the weights as x, and put y into them, if they are not there."""
        for group in self.param_groups:
            for parameter in group["params"] if not group["train_mode"] else ():
                state = self.state_of(parameter, group)
                shard(state["x"]).copy_(shard(parameter))
                self._begun.discard(parameter)  # x may be another run's first
                self._begin(parameter, state)
                rows = (shard(parameter), shard(state["x"]), shard(state["z"]))
                for columns in pieces([rows]):
                    for y, x, z in zip(*columns):
                        y.copy_(_training_point(x, z, group["betas"][0]))
            group["train_mode"] = True

    def named_state(self) -> dict[str, dict[str, Tensor | float]]:
        """As `NamedOptimizer.named_state`; RuntimeError unless the weights are x."""
        self._refuse(True, "named state belongs to the average", "eval")
        return super().named_state()

    def load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """As `NamedOptimizer.load_named_state`; RuntimeError unless the weights are x."""
        self._refuse(True, "named state belongs to the average", "eval")
        super().load_named_state(state)

    def update_groups(self, skip: Tensor | None) -> None:
        self._refuse(False, "a step needs gradients of the training point", "train")
        super().update_groups(skip)

    def update(self, group: Group, parameters: list[Tensor], skip: Tensor | None) -> None:
        states = [self.state_of(parameter, group) for parameter in parameters]
        for parameter, state in zip(parameters, states):
            self._begin(parameter, state)
        numbers = zip(*_count(group, states, skip))
        if rounds(group):
            self._update_widened(group, parameters, states, numbers, skip)
            return
        for parameter, state, of_step in zip(parameters, states, numbers):
            tensors = (state[name] for name in ("x", "z", "exp_avg_sq"))
            row = (shard(parameter), gradient_shard(parameter), *map(shard, tensors))
            for columns in pieces([row]):
                for piece in zip(*columns):
                    _update(group, piece, of_step, skip)

    def _update_widened(
        self,
        group: Group,
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        numbers: Iterable[tuple[Tensor, ...]],
        skip: Tensor | None,
    ) -> None:
        """As `update`, where the average of squares is in bf16; the points are not."""
        for parameter, state, of_step in zip(parameters, states, numbers):
            points = (
                shard(parameter),
                gradient_shard(parameter),
                shard(state["x"]),
                shard(state["z"]),
            )
            squares = [shard(state["exp_avg_sq"])]
            for square, *others in self.widened(parameter, group, squares, points):
                _update(group, (*others, square), of_step, skip)

    def _begin(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Until its first update both points are the weights, which may have changed since this was built."""
        if parameter in self._begun:
            return
        self._begun.add(parameter)
        weights, untouched = shard(parameter), state["step"] == 0
        for name in ("x", "z"):
            point = shard(state[name])
            point.copy_(torch.where(untouched, weights, point))

    def _refuse(self, train_mode: bool, what: str, call: str) -> None:
        if any(group["train_mode"] == train_mode for group in self.param_groups):
            text = f"{what}, and the weights are the other point; call optimizer.{call}() first"
            raise RuntimeError(text)


def _count(
    group: Group, states: list[dict[str, Tensor]], skip: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Count a step of each parameter; (rate, share in the average, bias correction), each (N,) fp32.

    Where it is skipped the counts stay, and rate and share are 0. Nothing is divided by zero: the correction is
    that of step 1 or later, and the sum holds this step's weight.
    """
    old = {name: torch.stack([state[name] for state in states]) for name in _NUMBERS}  # (N,)
    step = old["step"] + 1
    highest = old["lr_max"].clamp_min(group["lr"])
    weight = step ** group["r"]  # in units of highest ** weight_lr_power
    scale = (old["lr_max"] / highest.clamp_min(_TINY)) ** group["weight_lr_power"]
    total = old["weight_sum"] * scale + weight
    correction = -torch.expm1(step * math.log(max(group["betas"][1], _TINY)))
    rate, share = torch.full_like(step, group["lr"]), weight / total
    new = {"step": step, "lr_max": highest, "weight_sum": total}
    if skip is not None:
        new = {name: torch.where(skip != 0, old[name], value) for name, value in new.items()}
        rate, share = (torch.where(skip != 0, 0.0, value) for value in (rate, share))
    for name, values in new.items():
        torch._foreach_copy_([state[name] for state in states], list(values.unbind()))
    return rate, share, correction


def _update(
    group: Group, piece: tuple[Tensor, ...], of_step: tuple[Tensor, ...], skip: Tensor | None
) -> None:
    """One update in place of a piece (y, gradient, x, z, v), with (rate, share, correction) of the step."""
    (y, gradient, x, z, square), (rate, share, correction) = piece, of_step
    beta1, beta2 = group["betas"]
    squared, part = gradient * gradient, 1 - beta2
    if skip is not None:
        squared, part = _zeroed(squared, skip), torch.where(skip != 0, 0.0, part)
    square.lerp_(squared, part)
    direction = gradient / ((square / correction).sqrt_().add_(group["eps"]))
    direction.add_(y, alpha=group["weight_decay"])
    if skip is not None:  # a rate of 0 would not undo what is not finite
        direction = _zeroed(direction, skip)
    z.sub_(direction.mul_(rate))
    x.lerp_(z, share)
    y.copy_(_training_point(x, z, beta1))


def _zeroed(values: Tensor, skip: Tensor) -> Tensor:
    """fp32 values, in their own memory, or zeros where `skip` is 1, whatever they hold. Their bits and all or
    no bits: on a CPU a fifth of the time of `torch.where` with one condition for all."""
    values.view(torch.int32).bitwise_and_((skip == 0).to(torch.int32).neg())
    return values


def _training_point(x: Tensor, z: Tensor, beta1: float) -> Tensor:
    """y of x and z. Each operation rounds once, which a fused one does in some elements and layouts only: so y
    can be made again, with the same bits."""
    return (z - x).mul_(1 - beta1).add_(x)


def build_schedule_free_adamw(model: nn.Module, config: OptimizerConfig) -> ScheduleFreeAdamW:
    """The builder behind the name `schedule_free_adamw`."""
    return ScheduleFreeAdamW(model, config)
