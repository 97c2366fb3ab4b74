"""Mixed precision of one process: what FSDP2 computes on one rank, without its buffers and collectives."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from forge_parallel._torch_compat import at_end_of_backward, foreach_to, map_tensors, tensors_of

#: Elements that are cast at once. More take several launches, and more memory until all gradients of a batch are there.
BATCH = 2**24
_CASTS = "_forge_casts"


def own_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype in which a module must compute (attribute `compute_dtype`), if any."""
    value = getattr(module, "compute_dtype", None)
    return value if isinstance(value, torch.dtype) else None


def casts_suffice(model: nn.Module) -> bool:
    """Whether `compute_in` gives what FSDP2 does on one rank: all parameters are fp32 masters and not sharded."""
    own = {own_dtype(module) for module in model.modules()} <= {None, torch.float32}
    unsharded = not any(hasattr(p, "device_mesh") for p in model.parameters())
    return own and unsharded and all(p.dtype == torch.float32 for p in model.parameters())


def compute_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Let forward and backward of `model` compute in `dtype`; parameters and their gradients stay fp32. Same object.

        model = compute_in(model, torch.bfloat16)

    For the time of a forward, and again of its backward, whose recomputation reads them, the parameters of all
    modules are replaced by casts; those of a module with a `compute_dtype` of its own (fp32) stay. Float inputs of the
    model are cast, too. A gradient is computed in `dtype`, and cast and summed in fp32, bit by bit as by FSDP2's mixed
    precision on one rank. A module below that is called outside of the model's forward computes in fp32.

    Cost: memory of the parameters in `dtype` until the graph of the forward is freed. Casts of a forward without
    gradients are kept for the next one, and are made again when a parameter was changed (in place, through itself;
    after a change through `.data` call `reshard(model)`).
    """
    casts = _Casts(model, dtype)
    model.register_forward_pre_hook(casts.before_forward, prepend=True, with_kwargs=True)
    model.register_forward_hook(casts.after_forward, always_call=True)
    model.__dict__[_CASTS] = casts
    return model


def drop_casts(model: nn.Module) -> None:
    """Let the next forward cast all parameters anew; a model without `compute_in` is not changed."""
    if casts := model.__dict__.get(_CASTS):
        casts.kept.clear()


class _Casts:
    """The parameters of a model and their casts, which take turns in its modules."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.places: list[tuple[dict[str, Any], str]] = []
        #: Of forwards without gradients: {parameter: (its version, its cast)}.
        self.kept: dict[nn.Parameter, tuple[int, Tensor]] = {}
        self.masters: list[Tensor] = []  # in the order of places, while casts are in the modules

    def before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Put casts into the modules, and cast the float inputs."""
        self.restore()  # after a backward that ended with an error
        if not self.places:
            self.places = self._find_places()
        # a tied parameter has one cast, where its gradients are summed
        parameters = dict.fromkeys(parameters[name] for parameters, name in self.places)
        made = self._cast(parameters)
        casts = [made[parameters[name]] for parameters, name in self.places]
        self._put(casts)
        return map_tensors(self._cast_input, args), map_tensors(self._cast_input, kwargs)

    def _find_places(self) -> list[tuple[dict[str, Any], str]]:
        """The modules' dicts and names of all fp32 parameters but those of modules with a dtype of their own."""
        special = {
            p for m in self.model.modules() if own_dtype(m) is not None for p in m.parameters()
        }
        return [
            (module._parameters, name)
            for module in self.model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
            and parameter.dtype == torch.float32
            and parameter not in special
        ]

    def after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """Put the parameters back; the backward of an output takes the casts once more."""
        casts = [parameters[name] for parameters, name in self.places]
        self.restore()
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                # the graph holds the casts, and frees them with itself
                tensor.register_hook(partial(self._before_backward, casts))

    def _before_backward(self, casts: list[Tensor], grad: Tensor) -> None:
        # another output may have put them there; those of another forward have the same values
        if not self.masters:
            self._put(casts)
            at_end_of_backward(self.restore)

    def _put(self, casts: list[Tensor]) -> None:
        self.masters = [parameters[name] for parameters, name in self.places]
        for (parameters, name), cast in zip(self.places, casts):
            parameters[name] = cast

    def restore(self) -> None:
        """Put the parameters back into the modules, if casts are there."""
        for (parameters, name), master in zip(self.places, self.masters):
            parameters[name] = master
        self.masters = []

    def _cast(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The cast of each parameter: with gradients a new one, else the kept one of its version."""
        if torch.is_grad_enabled():
            self.kept.clear()
        found = {p: cast for p, (version, cast) in self.kept.items() if version == p._version}
        for batch in _batches([p for p in parameters if p not in found]):
            found.update(zip(batch, _Cast.apply(self.dtype, *batch)))
        if not torch.is_grad_enabled():
            self.kept = {p: (p._version, cast) for p, cast in found.items()}
        return found

    def _cast_input(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x


class _Cast(torch.autograd.Function):
    """Casts tensors of one dtype to another, and their gradients back, each way at once."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = tensors[0].dtype
        return tuple(foreach_to(tensors, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [grad for grad in grads if grad is not None]
        # all are None where no gradient reaches any of them
        casts = iter(_Cast.apply(ctx.dtype, *given) if given else ())
        return None, *(None if grad is None else next(casts) for grad in grads)


def _batches(parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Parameters that are cast at once: neighbors of `BATCH` elements or so, trained or frozen; a larger one by itself."""
    batches: dict[Any, list[nn.Parameter]] = {}
    for parameter, end in zip(parameters, accumulate(p.numel() for p in parameters)):
        large = parameter.numel() >= BATCH
        key = parameter if large else (parameter.requires_grad, end // BATCH)
        batches.setdefault(key, []).append(parameter)
    return batches.values()
