"""Exponential moving average of the weights: trained are the weights; evaluated, saved and distributed is the average."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from forge_core._shared.problems import Problem, invalid, raise_problems
from forge_core._shared.shards import local_tensor
from forge_core.optim.base import pieces
from forge_core.optim.config import EMAConfig
from forge_core.optim.groups import named_parameters
from forge_core.optim.rounding import in_fp32, offset_of

#: Slots of named state next to those of the optimizer: the weights that are trained, and the number of updates so far.
_TRAINED, _UPDATES = "trained", "ema_updates"
_WHERE = "state of an average"
#: Warm-up of the decay, t / (t + 9) after t updates: an early average forgets the initial weights. TensorFlow's
#: ExponentialMovingAverage has the same, as (1 + n) / (10 + n).
_WARM_UP = 9.0


class EMA:
    """Exponential moving average of the weights that `optimizer` trains: average <- d average + (1 - d) weights, after each update.

        optimizer = EMA(AdamW(param_groups(model), lr=1e-3), EMAConfig(decay=0.999))
        loss.backward(); optimizer.step()
        optimizer.eval(); evaluate(model); optimizer.train()      # the weights are the average in between

    d is the smaller of `decay` and t / (t + 9) after t updates: the first average is the first updated weights. A masked
    update (`skip`) changes neither. Attributes that are not defined here are those of the optimizer, and a
    scheduler of torch takes `ema.optimizer`.

    Between `eval()` and `train()` the model's weights are the average, and the trained ones are kept here. Weights that
    are written there are the new average, so load a checkpoint there: `named_state()` holds the optimizer's slots,
    "trained" and "ema_updates", and with the weights a run continues with the same bits. Under FSDP2 call
    `forge_parallel.reshard(model)` before either call.

    The average has the dtype of the weights; in bf16 it is rounded stochastically (see `rounding`), with `seed`. Raises
    ValueError for an optimizer without `named_state`, or whose groups have no parameter names.

    Cost: 4 bytes per trained parameter (2 in bf16), and within `step` 128 MiB of temporary tensors at most on a GPU; no
    communication; one host sync only where `skip` is given and the optimizer's own step takes none.
    """

    def __init__(self, optimizer: Any, config: EMAConfig, *, seed: int = 0) -> None:
        groups = getattr(optimizer, "param_groups", [{}])
        named = all("param_names" in group for group in groups)
        if not (hasattr(optimizer, "named_state") and named):
            raise unnamed(config, type(optimizer).__name__)
        assert config.decay is not None
        self.optimizer: Any = optimizer
        self._takes_skip = "skip" in inspect.signature(optimizer.step).parameters
        self.decay = config.decay

        self._parameters = named_parameters(optimizer)
        self._others = {n: p.detach().clone() for n, p in self._parameters.items()}
        self._updates = torch.zeros((), device=next(iter(self._parameters.values())).device)
        self._evaluating = False
        self._offsets = {
            n: offset_of(p, f"ema of {n}", seed)
            for n, p in self._parameters.items()
            if p.dtype == torch.bfloat16
        }

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet set, while an EMA is built or copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, skip: Tensor | None = None) -> Any:
        """Call the optimizer's step, then update the average. RuntimeError between `eval()` and `train()`."""
        if self._evaluating:
            raise RuntimeError(
                "a step trains, and the weights are the average; call optimizer.train() first"
            )

        if skip is not None and not self._takes_skip:
            if float(skip):
                return None
            skip = None
        arguments = () if closure is None else (closure,)
        masked = {} if skip is None else {"skip": skip}
        found = self.optimizer.step(*arguments, **masked)

        # 1 - d, or 0 where the update is masked: on the device, so that the host does not wait
        fraction = 1.0 - (self._updates / (self._updates + _WARM_UP)).clamp_max(self.decay)
        done = torch.ones_like(fraction)
        if skip is not None:
            done = 1.0 - skip.to(fraction.device, fraction.dtype)
        fraction *= done
        begins = (self._updates == 0) & (done != 0)

        for averages, weights in self._fp32_columns():
            for average, weight in zip(averages, weights):
                # not by a difference: the average may hold infinities or NaN before the first update
                average.copy_(torch.where(begins, weight, average))
            change = torch._foreach_sub(weights, averages)
            torch._foreach_mul_(change, fraction)
            torch._foreach_add_(averages, change)
        self._updates += done
        return found

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average into the weights, if it is not there."""
        if not self._evaluating:
            self._swap()
        self._evaluating = True

    @torch.no_grad()
    def train(self) -> None:
        """Take the weights as the average, and put the trained weights into the model, if they are not there."""
        if self._evaluating:
            self._swap()
        self._evaluating = False

    def _swap(self) -> None:
        """Exchange the model's weights and those kept here; before the first update both are the model's."""
        fresh = self._updates == 0
        for others, weights in pieces([self._tensors_of(name) for name in self._parameters]):
            for other, weight in zip(others, weights):
                kept = torch.where(fresh, weight, other)
                other.copy_(weight)
                weight.copy_(kept)

    def _fp32_columns(self) -> Iterator[tuple[list[Tensor], ...]]:
        """Pieces of averages and weights; of those in bf16, in fp32: their averages are rounded as they are stored."""
        yield from pieces([self._tensors_of(n) for n in self._parameters if n not in self._offsets])
        for name, offset in self._offsets.items():
            average, weight = self._tensors_of(name)
            for own, piece in in_fp32([average], [weight], offset, self._updates):
                yield [own], [piece.float()]

    def _tensors_of(self, name: str) -> tuple[Tensor, Tensor]:
        """This rank's part of the weights kept here and of the model's."""
        return local_tensor(self._others[name]), local_tensor(self._parameters[name].detach())

    def named_state(self) -> dict[str, dict[str, Tensor | float]]:
        """Return the optimizer's named state with two more slots; RuntimeError unless the weights are the average.

        One host sync.
        """
        self._require_eval_mode()
        updates = float(self._updates)
        own: dict[str, dict[str, Tensor | float]] = self.optimizer.named_state()
        return {
            name: {**slots, _TRAINED: self._others[name], _UPDATES: updates}
            for name, slots in own.items()
        }

    def load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy in a named state of the same parameters; the weights must be the average that was saved with it.

        ValueError as the optimizer's, and for parameters without the two slots; then nothing is changed.
        RuntimeError unless the weights are the average.
        """
        self._require_eval_mode()
        lost = [
            f"{name}.{slot}"
            for name, slots in state.items()
            for slot in (_TRAINED, _UPDATES)
            if slot not in slots
        ]
        raise_problems(_WHERE, map(_missing, lost))
        self._check_others({name: slots[_TRAINED] for name, slots in state.items()}, f".{_TRAINED}")

        rest = {
            name: {slot: v for slot, v in slots.items() if slot not in (_TRAINED, _UPDATES)}
            for name, slots in state.items()
        }
        self.optimizer.load_named_state(rest)
        with torch.no_grad():
            for name, slots in state.items():
                self._others[name].copy_(slots[_TRAINED])
                self._updates.fill_(float(slots[_UPDATES]))

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in torch's form, with the weights kept here by parameter name."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "others": dict(self._others),
            "updates": self._updates,
            "evaluating": self._evaluating,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; the model's weights must be those that were saved with it.

        ValueError for the state of an optimizer without an average, or of other parameters.
        """
        if not {"optimizer", "others", "updates", "evaluating"} <= state.keys():
            fix = "build the optimizer without ema, or load one that an average was saved with"
            raise invalid("", "no_average", ..., "holds no average of weights", fix, where="state")
        self._check_others(state["others"], "")
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for name, other in self._others.items():
                other.copy_(state["others"][name])
            self._updates.copy_(torch.as_tensor(state["updates"]))
        self._evaluating = bool(state["evaluating"])

    def _check_others(self, others: Mapping[str, Any], slot: str) -> None:
        """ValueError unless `others` has a tensor of the right shape for every parameter."""
        problems = [_missing(f"{name}{slot}") for name in self._others if name not in others]
        for name, own in self._others.items():
            if name in others and _shape(others[name]) != tuple(own.shape):
                rule = f"must have the shape of the parameter {tuple(own.shape)}"
                problems.append(Problem(f"{name}{slot}", "shape", _shape(others[name]), rule))
        raise_problems(_WHERE, problems)

    def _require_eval_mode(self) -> None:
        """RuntimeError unless the weights are the average."""
        if not self._evaluating:
            raise RuntimeError(
                "named state belongs to the average, and the weights are the trained ones; call optimizer.eval() first"
            )


def _shape(value: Any) -> Any:
    """The shape of a tensor, or the type of another value, for messages."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _missing(key: str) -> Problem:
    return Problem(key, "missing", ..., "is missing")


def unnamed(config: EMAConfig, what: str) -> ValueError:
    """Return the error of an average for an optimizer `what`, whose state has no names."""
    rule = f"must go with an optimizer that has named state, and {what!r} has none"
    fix = "use one of Forge, or leave it out"
    found: ValueError = invalid("optimizer.ema.decay", "unsupported", config.decay, rule, fix)
    return found
