"""The base of Forge's optimizers: named state, groups, a mask for the update, and pieces of what this rank holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from forge_core._renamed import config_form
from forge_core._shared.problems import Problem, invalid, raise_problems
from forge_core._shared.shards import local_tensor
from forge_core.kinds import stacked_vectors
from forge_core.optim.config import DTYPES, OptimizerConfig, class_settings
from forge_core.optim.groups import (
    freeze_by_multiplier,
    invalid_dtype,
    keep_settings,
    named_parameters,
    param_groups,
    set_group_lrs,
)
from forge_core.optim.rounding import RoundedTensors, in_fp32, offset_of
from forge_core.random_bits import ElementOffset

#: A group of `torch.optim.Optimizer.param_groups`.
Group = Mapping[str, Any]
#: What a torch optimizer is built over.
Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
#: Key of groups whose optimizer stores something in bf16: the seed of the random bits by which it is rounded.
_SEED = "rounding_seed"
#: Elements of a piece on a CPU: 512 KiB in fp32, so that weights, gradients and momentum of one fit a core's cache.
_PIECE = 2**17
#: Elsewhere: 64 MiB in fp32. Its kernels run some thousand times as long as they take to start.
_LARGE_PIECE = 2**24


class Slots(NamedTuple):
    """Names of the state of one parameter: `tensors` are of its shape and layout, `numbers` 0-dim fp32."""

    tensors: tuple[str, ...]
    numbers: tuple[str, ...] = ()


class NamedOptimizer(torch.optim.Optimizer):
    """Base of Forge's optimizers: a `torch.optim.Optimizer` with state by parameter name.

        class Momentum(NamedOptimizer):
            def slots(self, group): return Slots(("momentum",))
            def update(self, group, parameters, skip): ...

        optimizer = Momentum(param_groups(model), lr=1e-3)

    A subclass names its slots, which start as zeros (`fresh` may start them otherwise), and updates the parameters of a
    group that have a gradient. The base does the rest:

    - Parameters. `params` are tensors, (name, tensor) pairs or groups, as torch takes them. All of a group decay by its
      weight_decay, as in torch; `param_groups(model)` makes groups in which only matrices and embeddings do. `step` does
      not touch a parameter without a gradient.
    - Dtypes. Parameters are the fp32 masters, and state is fp32. A subclass that computes in the pieces of `in_fp32`,
      in a group for which `is_rounded` is true, sets `rounds_weights`, so that weights may be bf16, and `rounds_state`,
      so that `state_dtype` may be.
    - Learning rates. A group's "lr" may be its own. "lr_multiplier" and "lr_scale" multiply the rate of the constructor,
      and "lr_multiplier" 0 freezes the group's parameters. torch's schedulers start from the resulting rates.

    State is allocated in the first step, as in torch, or by `create_state`. `state_dict` and `load_state_dict` have
    torch's form, by index, so torch's schedulers, GradScaler and `torch.distributed.checkpoint` work. `named_state` and
    `load_named_state` hold the same by parameter name, which fits any layout of ranks, and need named parameters.

    `defaults` are settings of every group next to lr and weight_decay. Raises ValueError for a setting out of range, for
    parameters and a state_dtype in bf16 that the subclass does not round, parameters in other dtypes, and parameters on
    the meta device.
    """

    rounds_weights = False
    rounds_state = False
    #: Whether the groups of `param_groups` have the key "muon".
    splits_matrices = False
    _offsets: dict[Tensor, ElementOffset] | None = None
    _stacked_vectors: frozenset[str] = frozenset()

    @config_form
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        *,
        state_dtype: Literal["fp32", "bf16"] = "fp32",
        **defaults: Any,
    ) -> None:
        groups = as_groups(params)
        half = state_dtype == "bf16"
        if half and not self.rounds_state:
            rule = f"must be 'fp32', in which {type(self).__name__} keeps its state"
            fix = "leave it out, or use AdamW, Lion, Muon or ScheduleFreeAdamW"
            raise invalid("optimizer.state_dtype", "unsupported", "bf16", rule, fix)

        # only groups that round have these keys: state saved in fp32 keeps its form
        settings = {"lr": lr, "weight_decay": weight_decay, **defaults}
        trained = [tensor for tensor in tensors_of(groups) if tensor.requires_grad]
        if half or any(tensor.dtype != torch.float32 for tensor in trained):
            settings |= {"state_dtype": state_dtype, _SEED: 0}
        super().__init__(groups, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does; "lr_multiplier" and "lr_scale" multiply its learning rate.

        Raises ValueError as the constructor, and for names in some groups only. The given dict is not changed.
        """
        super().add_param_group(dict(param_group))
        group, lr = self.param_groups[-1], self.defaults["lr"]
        try:
            self._check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise

        if "lr" not in param_group:
            for key in ("lr_multiplier", "lr_scale"):
                if key in group:
                    group["lr"] = group["lr"] * group[key]
        elif lr and group["lr"] and group["lr"] != lr:
            # set_lr keeps the ratio of the group's own rate
            ratio = float(group["lr"] / lr) / group.get("lr_scale", 1.0)
            group.setdefault("lr_multiplier", ratio)
        if param_group.get("lr_multiplier") == 0.0:
            freeze_by_multiplier(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """ValueError for parameters that cannot be trained and settings out of range; bf16 weights get their seed."""
        names = group.get("param_names") or [f"params[{i}]" for i in range(len(group["params"]))]
        allowed = (torch.float32, *([torch.bfloat16] if self.rounds_weights else []))
        for name, parameter in zip(names, group["params"]):
            if not parameter.requires_grad:
                continue
            if parameter.is_meta:
                rule = "is on the meta device and has no values"
                fix = "materialize the model first"
                raise invalid(name, "meta", ..., rule, fix, where="parameter")
            if parameter.dtype not in allowed:
                raise invalid_dtype(name, parameter.dtype)
            if parameter.dtype != torch.float32:
                group.setdefault("state_dtype", "fp32")
                group.setdefault(_SEED, 0)

        # the ranges of the configuration; a rate of 0 is a schedule's
        ranges = ("betas", "eps", "weight_decay", "state_dtype")
        given = {key: value for key, value in group.items() if key in ranges}
        OptimizerConfig(lr=float(group["lr"]) or 1.0, **given)

    @classmethod
    def config_arguments(
        cls, init: Callable[..., Any], model: nn.Module, config: OptimizerConfig
    ) -> dict[str, Any]:
        """Return the arguments of the constructor `init` for the trainable parameters of a model and a configuration."""
        taken = inspect.signature(init).parameters
        settings = {key: v for key, v in class_settings(config).items() if key in taken}
        muon, rounds = cls.splits_matrices, cls.rounds_weights
        return {"params": param_groups(model, config, muon=muon, rounds=rounds), **settings}

    def follow_model(self, model: nn.Module) -> None:
        """Allocate all state, and load that of versions which took stacks of vectors of `model` for matrices (F146)."""
        self._stacked_vectors = stacked_vectors(model)
        self.create_state()

    def create_state(self) -> None:
        """Allocate the state of all parameters now, which the first step does otherwise; it starts as it does there.

        So memory does not grow in the first step, and `state_dict` is complete before it.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state_of(parameter, group)

    def slots(self, group: Group) -> Slots:
        """Return the names of the state of each parameter of a group."""
        raise NotImplementedError

    def update(self, group: Group, parameters: list[Tensor], skip: Tensor | None) -> None:
        """Update `parameters` in place: those of the group that have a gradient, at least one.

        `skip` is None, or a 0-dim tensor on the parameters' device: where it is 1.0, nothing may change.
        """
        raise NotImplementedError

    @property
    def masks_on_device(self) -> bool:
        """Whether `update` reads `skip` on the device; else `step` reads it on the host."""
        return True

    @property
    def lr(self) -> float:
        """Learning rate of the next step, of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step, in each group times its "lr_multiplier"."""
        set_group_lrs(self.param_groups, lr)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, skip: Tensor | None = None) -> Any:
        """Update every parameter that has a gradient, in place; return the result of `closure`, if any.

        Where `skip` (0-dim, 1.0 or 0.0) is 1 it masks the whole update: parameters, state, decay and step counts stay as
        they are, whatever the gradients hold. It is read on the device without a wait; on another device than the
        parameters', or where `masks_on_device` is False, it costs one host sync.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        if skip is not None and not self.masks_on_device:
            if float(skip):
                return loss
            skip = None
        device = self.param_groups[0]["params"][0].device
        if skip is not None and skip.device != device:
            skip = skip.to(
                device
            )  # torch's fused kernels copy it without a wait, and would read it too early
        self.update_groups(skip)
        return loss

    def update_groups(self, skip: Tensor | None) -> None:
        """Call `update` for each group with the parameters that have a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self.update(group, parameters, skip)

    def state_of(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        """Return the state of one parameter; made here where a loaded state has none for it."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state.update(self.fresh(parameter, group))
        return state

    def fresh(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        """Return the state before the first step: zeros, sharded like the parameter."""
        tensors, numbers = self.slots(group)
        made = {
            name: torch.zeros((), dtype=torch.float32, device=parameter.device) for name in numbers
        }
        dtype = DTYPES[group.get("state_dtype", "fp32")]
        for name in tensors:
            made[name] = torch.zeros_like(
                parameter, dtype=dtype, memory_format=torch.preserve_format
            )
        return made

    def in_fp32(
        self,
        parameter: Tensor,
        group: Group,
        stored: Sequence[Tensor],
        others: Sequence[Tensor],
        first: int = 0,
    ) -> Iterator[list[Tensor]]:
        """`rounding.in_fp32` over this rank's parts of a parameter's tensors, at its "step"; call `count_step` after it."""
        return in_fp32(*self.rounded(parameter, group, stored, others), first)

    def rounded(
        self, parameter: Tensor, group: Group, stored: Sequence[Tensor], others: Sequence[Tensor]
    ) -> RoundedTensors:
        """Arguments of `rounding.lists_in_fp32` for a parameter at its "step"; call `count_step` after it."""
        if self._offsets is None:
            self._offsets = {}
        if parameter not in self._offsets:
            (name,) = (n for n, p in self._names_or_indices() if p is parameter)
            self._offsets[parameter] = offset_of(parameter, name, group[_SEED])
        step = self.state_of(parameter, group)["step"]
        return RoundedTensors(stored, others, self._offsets[parameter], step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's form of state. Each tensor keeps its dtype, where torch would cast all to that of the parameter.

        Groups, factors of learning rates, dtype of state and seed stay those of this optimizer; all other settings are
        those of the state, as in torch.
        """
        kept = keep_settings(self, state_dict, keys=(), moved=self._stacked_vectors)
        super().load_state_dict(kept)
        members = [(p, group) for group in self.param_groups for p in group["params"]]
        for parameter, group in members:
            slots = {slot for names in self.slots(group) for slot in names}
            own = self.state.get(parameter)
            if own and not slots <= own.keys():  # of a version that took it for another kind (F146)
                self.state[parameter] = self.fresh(parameter, group)

        # torch has cast what is stored in bf16 or fp32 to the dtype of the weights: copy it again from the given state
        ids = [i for group in kept["param_groups"] for i in group["params"]]
        for i, (parameter, group) in zip(ids, members):
            if not is_rounded(group) or i not in state_dict["state"]:
                continue
            saved, fresh = state_dict["state"][i], self.fresh(parameter, group)
            with torch.no_grad():
                for name in fresh.keys() & saved.keys():
                    fresh[name].copy_(torch.as_tensor(saved[name]))
            self.state[parameter].update(fresh)

    def named_state(self) -> dict[str, dict[str, Tensor | float]]:
        """Return `{name: {slot: tensor, ..., number: float}}` for all parameters, such as AdamW's
        `{"exp_avg": tensor, "exp_avg_sq": tensor, "step": 3.0}`.

        The tensors are the optimizer's own, not copies. It is complete before the first update. The learning rate is not
        part of it: it is a function of the step. One host sync on a GPU where there are numbers.
        """
        found: dict[str, dict[str, Tensor | float]] = {}
        numbers: list[Tensor] = []
        for name, (parameter, group) in self._named_members():
            own = self.state_of(parameter, group)
            found[name] = {slot: own[slot] for slot in self.slots(group).tensors}
            numbers += [own[slot] for slot in self.slots(group).numbers]

        # all numbers in one host sync
        first = numbers[0].device if numbers else None
        values = iter(torch.stack([n.to(first) for n in numbers]).tolist() if numbers else [])
        for name, (_, group) in self._named_members():
            found[name].update((slot, next(values)) for slot in self.slots(group).numbers)
        return found

    def load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy in a named state of the same parameters; the next step is as if never interrupted.

        Raises ValueError, before anything is changed, listing every parameter or slot that is missing, extra, of another
        shape, or a plain tensor where this optimizer holds a DTensor.
        """
        members = dict(self._named_members())
        missing = (name for name in members if name not in state)
        problems = [Problem(n, "missing", ..., "is missing; the model has it") for n in missing]
        problems += [
            Problem(name, "extra", ..., "is extra; the model has no such parameter")
            for name in state
            if name not in members
        ]
        for name in (name for name in members if name in state):
            parameter, group = members[name]
            problems += _state_problems(name, parameter, self.slots(group), state[name])
        raise_problems("optimizer state", problems)

        for name, (parameter, group) in members.items():
            own = self.state_of(parameter, group)
            with torch.no_grad():
                for slot in self.slots(group).tensors:
                    own[slot].copy_(state[name][slot])
                for slot in self.slots(group).numbers:
                    own[slot].fill_(float(state[name][slot]))

    def _names_or_indices(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter with its name, or without names its index in torch's form of state."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        yield from zip(names or map(str, range(len(parameters))), parameters)

    def _named_members(self) -> Iterator[tuple[str, tuple[nn.Parameter, Group]]]:
        """Each parameter with its group, by name."""
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        for name, parameter in named_parameters(self).items():
            yield name, (parameter, group_of[parameter])


def as_groups(params: Any) -> list[dict[str, Any]]:
    """The groups of `params` in any of torch's forms, with lists: generators are read once. Without any, torch raises."""
    if isinstance(params, Tensor | nn.Module):
        raise _invalid_params(params)
    groups = list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    return [{**group, "params": _members(group["params"])} for group in groups]


def _members(params: Any) -> Any:
    """The parameters of a group; torch raises for a set, which has no order."""
    if isinstance(params, Tensor):
        return [params]
    return params if isinstance(params, set) else list(params)


def tensors_of(groups: Iterable[Group]) -> list[Tensor]:
    """The tensors of groups whose members may be (name, tensor) pairs."""
    members = [entry for group in groups for entry in group["params"]]
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in members]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise _invalid_params(tensor)
    return tensors


def _invalid_params(given: Any) -> ValueError:
    rule = "must be tensors, (name, tensor) pairs or groups of them"
    fix = "pass model.parameters(), or param_groups(model)"
    return invalid("params", "type", type(given).__name__, rule, fix, where="optimizer")


def is_rounded(group: Group) -> bool:
    """Whether weights or state of a group are stored in bf16, so that updates go through `in_fp32`."""
    return _SEED in group


def set_rounding_seed(optimizer: NamedOptimizer, seed: int) -> None:
    """Set the seed of all random bits from the next step on; without effect where everything is fp32."""
    optimizer._offsets = None
    for group in optimizer.param_groups:
        if is_rounded(group):
            group[_SEED] = seed


def count_steps(states: Sequence[Mapping[str, Tensor]], skip: Tensor | None) -> None:
    """Count an update of parameters, unless it was masked."""
    steps = [state["step"] for state in states]
    if skip is None:
        torch._foreach_add_(steps, 1)
    else:
        # a tensor in place of the list would become a number, for which the host waits
        torch._foreach_add_(steps, [(skip == 0).to(steps[0])] * len(steps))


def count_step(state: Mapping[str, Tensor], skip: Tensor | None) -> None:
    """`count_steps` of one parameter."""
    count_steps([state], skip)


def _state_problems(
    name: str, parameter: Tensor, slots: Slots, state: Mapping[str, Any]
) -> Iterator[Problem]:
    """Problems of the state of one parameter: slots, and shape and layout of its tensors."""
    known = (*slots.tensors, *slots.numbers)
    for slot in (slot for slot in known if slot not in state):
        yield Problem(f"{name}.{slot}", "missing", ..., "is missing")
    for slot in (slot for slot in state if slot not in known):
        yield Problem(f"{name}.{slot}", "extra", ..., "is extra")

    for slot in (slot for slot in slots.tensors if slot in state):
        key, value, kind = f"{name}.{slot}", state[slot], type(state[slot]).__name__
        if not isinstance(value, Tensor):
            yield Problem(key, "type", value, f"is of type {kind} and must be a tensor")
        elif value.shape != parameter.shape:
            rule = f"must have the shape of the parameter {tuple(parameter.shape)}"
            yield Problem(key, "shape", tuple(value.shape), rule)
        # the attribute and not the type: a process without ranks does not import torch.distributed.tensor
        elif hasattr(value, "placements") != hasattr(parameter, "placements"):
            rule = f"is of type {kind} and must be distributed like the parameter"
            yield Problem(key, "placements", ..., rule, "load into the tensors of named_state()")


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter's gradient; communicates if that has other placements than the parameter."""
    gradient: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
    return local_tensor(gradient)


def pieces(tuples: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield lists of tensors for functions over lists, such as `torch._foreach_*`, from tuples of tensors of one shape.

        for weights, gradients in pieces([(p, p.grad) for p in parameters]): ...

    On a CPU each function is a pass over memory, so a piece is of one tuple and fits a core's cache: an update of five
    passes then costs about as much as one. On a GPU, where each function is one kernel, a piece is as many tuples as have
    `_LARGE_PIECE` elements, and longer ones are split: temporary tensors are small, however large the model.
    """
    found: list[tuple[Tensor, ...]] = []
    count = 0
    for views in (views for tensors in tuples for views in _split(tensors)):
        if found and (_on_cpu(views) or count + views[0].numel() > _LARGE_PIECE):
            yield tuple(map(list, zip(*found)))
            found, count = [], 0
        found.append(views)
        count += views[0].numel()
    if found:
        yield tuple(map(list, zip(*found)))


def _split(tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors with the elements of a piece at most; along dim 0 if one is not contiguous."""
    limit = _PIECE if _on_cpu(tensors) else _LARGE_PIECE
    if tensors[0].numel() <= limit:
        yield tensors
    elif all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.view(-1).split(limit) for tensor in tensors))
    else:
        count = max(1, limit * len(tensors[0]) // tensors[0].numel())
        yield from zip(*(tensor.split(count) for tensor in tensors))


def _on_cpu(tensors: tuple[Tensor, ...]) -> bool:
    return tensors[0].device.type == "cpu"


class IdleOptimizer:
    """The optimizer of a model whose parameters are all frozen, such as a pipeline stage. It has no state."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []

    def step(self, *, skip: Tensor | None = None) -> None:
        """Do nothing."""

    def zero_grad(self) -> None:
        """Do nothing."""

    def set_lr(self, lr: float) -> None:
        """Do nothing."""


def trains_nothing(model: nn.Module) -> bool:
    """Whether all parameters of `model` are frozen."""
    return not any(parameter.requires_grad for parameter in model.parameters())
