"""What Forge's optimizers share: named state, groups, a mask; each adds its slots and its update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge_core._shared.problems import Problem, invalid, raise_problems
from forge_core.optim.config import OptimizerConfig
from forge_core.optim.groups import parameter_groups, take_part
from forge_core.optim.named import named_parameters, set_group_lrs
from forge_core.optim.rounding import Place, place_of, widened

#: A group of `torch.optim.Optimizer.param_groups`.
Group = Mapping[str, Any]


class Slots(NamedTuple):
    """Names of the state of one parameter: `tensors` are of its shape and layout, `numbers` 0-dim fp32."""

    tensors: tuple[str, ...]
    numbers: tuple[str, ...] = ()


class NamedOptimizer(torch.optim.Optimizer):
    """An optimizer over the trainable parameters of a model, with state by parameter name.

        class Momentum(NamedOptimizer):
            def slots(self, group): return Slots(("momentum",))
            def update(self, group, parameters, skip): ...

    A subclass names its slots, which are made here as zeros (`fresh` may start them otherwise), and
    updates the parameters of a group that have a gradient. What stands here holds for each of them:

    Parameters are the fp32 masters, and state is fp32. A subclass that computes in `widened` pieces, in a group of
    which `rounds` is true, may say that it `rounds_weights`, then they may be bf16, and that it `rounds_state`, for
    `config.state_dtype`. Weight decay applies to matrices, embeddings
    included, not to vectors, norms, biases and stacks of them (`forge_core.kinds`). A tied parameter counts once, under its first name; frozen ones
    (`requires_grad` False when this is built) are left out. A parameter without a gradient is not
    touched by `step`. Groups of the configuration have a learning rate and decay of their own (see
    `parameter_groups`); `set_multipliers` freezes and unfreezes them.

    It is a torch optimizer: `state_dict` and `load_state_dict` have torch's form, and torch's
    schedulers, GradScaler and `torch.distributed.checkpoint` take it. `named_state` and
    `load_named_state` hold the same by parameter name, which fits any layout of ranks.

    `groups` default to `parameter_groups(model, config)`; `defaults` are settings of every group beside
    lr and weight_decay. Raises: ValueError without a trainable parameter, for parameters and a state_dtype in bf16
    that it does not round, and for parameters that are still on the meta device.
    """

    rounds_weights = False
    rounds_state = False
    _places: dict[Tensor, Place] | None = None

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        groups: list[dict[str, Any]] | None = None,
        **defaults: Any,
    ) -> None:
        if groups is None:
            groups = parameter_groups(model, config, rounds=self.rounds_weights)
        half = config.state_dtype == "bf16"
        if half and not self.rounds_state:
            rule = f"must be 'fp32', in which {config.name} keeps its state"
            fix = "leave it out, or use adamw, lion, muon or schedule_free_adamw"
            raise invalid("optimizer.state_dtype", "unsupported", "bf16", rule, fix)
        for name, parameter in (pair for group in groups for pair in group["params"]):
            if parameter.is_meta:
                rule = "is on the meta device and has no values"
                fix = "materialize the model first"
                raise invalid(name, "meta", ..., rule, fix, where="parameter")
        settings = {"lr": config.lr, "weight_decay": config.weight_decay, **defaults}
        if half or any(p.dtype != torch.float32 for group in groups for _, p in group["params"]):
            settings |= {"state_dtype": config.state_dtype, _SEED: 0}
        super().__init__(groups, settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state_of(parameter, group)
        take_part(self, model, config)
        set_group_lrs(self, config.lr)

    def slots(self, group: Group) -> Slots:
        """Names of the state of each parameter of a group."""
        raise NotImplementedError

    def update(self, group: Group, parameters: list[Tensor], skip: Tensor | None) -> None:
        """Update `parameters`, those of the group that have a gradient and at least one, in place.

        `skip` is None, or a 0-dim tensor on the parameters' device: where it is 1.0, nothing may change.
        """
        raise NotImplementedError

    @property
    def masks(self) -> bool:
        """Whether `update` reads `skip` on the device; else `step` does, on the host."""
        return True

    @property
    def lr(self) -> float:
        """Learning rate of the next step, of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step, in each group times its "lr_multiplier"."""
        set_group_lrs(self, lr)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, skip: Tensor | None = None) -> Any:
        """Update every parameter that has a gradient, in place.

        `skip` (0-dim, 1.0 or 0.0) masks the whole update where it is 1: parameters, state, decay and step
        counts stay as they are, whatever the gradients hold. It is read on the device, so nothing waits;
        on another device than the parameters', or where `masks` is False, it costs one host sync. Returns
        what `closure` does, None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if skip is not None and not self.masks:
            if float(skip):
                return loss
            skip = None
        device = self.param_groups[0]["params"][0].device
        if skip is not None and skip.device != device:
            skip = skip.to(device)  # torch's own copy would not be waited for
        self.update_groups(skip)
        return loss

    def update_groups(self, skip: Tensor | None) -> None:
        """`update` of each group that is not frozen."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self.update(group, parameters, skip)

    def state_of(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        """State of one parameter; made here where a loaded state has none for it."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state.update(self.fresh(parameter, group))
        return state

    def fresh(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        """State before the first step: zeros, sharded like the parameter."""
        tensors, numbers = self.slots(group)
        made = {
            name: torch.zeros((), dtype=torch.float32, device=parameter.device) for name in numbers
        }
        dtype = _DTYPES[group.get("state_dtype", "fp32")]
        for name in tensors:
            made[name] = torch.zeros_like(
                parameter, dtype=dtype, memory_format=torch.preserve_format
            )
        return made

    def widened(
        self,
        parameter: Tensor,
        group: Group,
        kept: Sequence[Tensor],
        others: Sequence[Tensor],
        first: int = 0,
    ) -> Iterator[list[Tensor]]:
        """`rounding.widened` of a parameter's tensors on this rank, at its "step"; `count_step` comes behind."""
        if self._places is None:
            self._places = {}
        if parameter not in self._places:
            (name,) = (n for n, p in named_parameters(self).items() if p is parameter)
            self._places[parameter] = place_of(parameter, name, group[_SEED])
        step = self.state_of(parameter, group)["step"]
        return widened(kept, others, self._places[parameter], step, first)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch's, which would cast all state to the dtype of the parameter; here each keeps its own."""
        super().load_state_dict(state_dict)
        for _, (parameter, group) in self._members():
            slots = {slot for names in self.slots(group) for slot in names}
            own = self.state.get(parameter)
            if own and not slots <= own.keys():  # those of another kind of parameter (F146)
                self.state[parameter] = self.fresh(parameter, group)
        if not rounds(self.param_groups[0]):
            return
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        members = [(p, group) for group in self.param_groups for p in group["params"]]
        for i, (parameter, group) in zip(ids, members):
            saved, fresh = state_dict["state"].get(i, {}), self.fresh(parameter, group)
            with torch.no_grad():
                for name in fresh.keys() & saved.keys():
                    fresh[name].copy_(torch.as_tensor(saved[name]))
            self.state[parameter].update(fresh)

    def named_state(self) -> dict[str, dict[str, Tensor | float]]:
        """Return `{name: {slot: tensor, ..., number: float}}` for all parameters, such as AdamW's
        `{"exp_avg": tensor, "exp_avg_sq": tensor, "step": 3.0}`.

        The tensors are the optimizer's own, not copies. A parameter that was never updated gets what its
        first update starts from, so no update is needed beforehand. The learning rate is not part of it:
        it is a function of the step. One host sync on a GPU where there are numbers.
        """
        found: dict[str, dict[str, Tensor | float]] = {}
        numbers: list[Tensor] = []
        for name, (parameter, group) in self._members():
            own = self.state_of(parameter, group)
            found[name] = {slot: own[slot] for slot in self.slots(group).tensors}
            numbers += [own[slot] for slot in self.slots(group).numbers]
        values = iter(_values(numbers))
        for name, (_, group) in self._members():
            found[name].update((slot, next(values)) for slot in self.slots(group).numbers)
        return found

    def load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over a named state of the same parameters; the next step is as if never interrupted.

        Values are copied. Raises ValueError, before anything is changed, listing every parameter or slot
        that is missing, extra, of another shape, or a plain tensor where this one holds a DTensor.
        """
        members = dict(self._members())
        missing = (name for name in members if name not in state)
        problems = [Problem(n, "missing", ..., "is missing; the model has it") for n in missing]
        problems += [
            Problem(name, "extra", ..., "is extra; the model has no such parameter")
            for name in state
            if name not in members
        ]
        for name in (name for name in members if name in state):
            parameter, group = members[name]
            problems += _differences(name, parameter, self.slots(group), state[name])
        raise_problems("optimizer state", problems)
        for name, (parameter, group) in members.items():
            own = self.state_of(parameter, group)
            with torch.no_grad():
                for slot in self.slots(group).tensors:
                    own[slot].copy_(state[name][slot])
                for slot in self.slots(group).numbers:
                    own[slot].fill_(float(state[name][slot]))

    def _members(self) -> Iterator[tuple[str, tuple[nn.Parameter, Group]]]:
        """Each parameter with its group, by name."""
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        for name, parameter in named_parameters(self).items():
            yield name, (parameter, group_of[parameter])


#: Key of groups whose optimizer stores something in bf16: the seed of the chance.
_SEED = "rounding_seed"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def rounds(group: Group) -> bool:
    """Whether weights or state are stored in bf16, so that updates go through `widened`."""
    return _SEED in group


def set_rounding_seed(optimizer: NamedOptimizer, seed: int) -> None:
    """Of all chance from the next step on; without effect where everything is fp32."""
    optimizer._places = None
    for group in optimizer.param_groups:
        if rounds(group):
            group[_SEED] = seed


def count_step(state: Mapping[str, Tensor], skip: Tensor | None) -> None:
    """Count an update of a parameter, unless it was masked."""
    state["step"].add_(1 if skip is None else skip == 0)


def _values(numbers: list[Tensor]) -> list[float]:
    """Of 0-dim tensors, with one host sync."""
    if not numbers:
        return []
    found: list[float] = torch.stack([n.to(numbers[0].device) for n in numbers]).tolist()
    return found


def _differences(
    name: str, parameter: Tensor, slots: Slots, state: Mapping[str, Any]
) -> Iterator[Problem]:
    known = (*slots.tensors, *slots.numbers)
    for slot in (slot for slot in known if slot not in state):
        yield Problem(f"{name}.{slot}", "missing", ..., "is missing")
    for slot in (slot for slot in state if slot not in known):
        yield Problem(f"{name}.{slot}", "extra", ..., "is extra")
    for slot in (slot for slot in slots.tensors if slot in state):
        yield from _unlike(f"{name}.{slot}", parameter, state[slot])


def _unlike(name: str, parameter: Tensor, value: object) -> Iterator[Problem]:
    kind = type(value).__name__
    if not isinstance(value, Tensor):
        yield Problem(name, "type", value, f"is of type {kind} and must be a tensor")
    elif value.shape != parameter.shape:
        rule = f"must have the shape of the parameter {tuple(parameter.shape)}"
        yield Problem(name, "shape", tuple(value.shape), rule)
    # Duck-typed, so that torch.distributed.tensor is not imported by those who do not use it.
    elif hasattr(value, "placements") != hasattr(parameter, "placements"):
        rule = f"is of type {kind} and must be distributed like the parameter"
        yield Problem(name, "placements", ..., rule, "load into the tensors of named_state()")
