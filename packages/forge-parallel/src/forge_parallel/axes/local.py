"""Change a module's forward without hooks or wrappers: its class becomes a subclass of itself.

Names of parameters, `isinstance` and attributes stay as they were, and later steps (FSDP2, recomputation,
compile) see an ordinary module.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from forge_parallel._shared.problems import invalid


def add_mixin(module: nn.Module, mixin: type) -> None:
    """Put `mixin` before the class of `module`, in place.

        class Twice:
            def forward(self, x):
                return 2 * super().forward(x)
        add_mixin(linear, Twice)

    `super()` in the mixin is the old class, and its forward shows the old one's signature. Modules of
    one class get the same subclass.
    """
    cls: Any = type(module)  # Any: mypy takes the class for a module here
    module.__class__ = _mixed_class(mixin, cls)


def use_local(
    module: nn.Module, name: str, grad_placements: tuple[Placement, ...] | None = None
) -> None:
    """Let the code of `module` see this rank's shard of a DTensor parameter, in place.

        use_local(norm, "weight", (Partial(),))     # gradients of the ranks add up
        use_local(linear, "weight")                 # the gradient has the placements of the parameter

    `module.weight` is then `parameter.to_local(grad_placements=...)`, while `named_parameters`, the
    state dict and optimizers see the DTensor. A sharded parameter is local only while the module's own forward
    runs: other code, which skips the communication around that forward, gets the DTensor, and torch raises if it
    is mixed with plain tensors. A replicated one is always local. Under FSDP2 this holds inside its forward, where a
    parameter is a DTensor of one mesh axis; a DTensor of several axes (FSDP2's sharded state) and a plain tensor
    are returned unchanged. Raises ValueError for a name that is no parameter of the module.
    """
    if name not in module._parameters:
        fix = f"it has {', '.join(module._parameters) or 'none'}"
        rule = f"must be a parameter of {type(module).__name__}"
        raise invalid("name", "not_found", name, rule, fix)
    if not isinstance(module, OwnForward):
        add_mixin(module, OwnForward)
    cls: Any = type(module)
    module.__class__ = _with_local(cls, name, grad_placements)


class OwnForward(nn.Module):
    """Records whether its own forward runs."""

    in_forward = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outer, self.in_forward = self.in_forward, True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.in_forward = outer


def local_value(
    module: nn.Module, name: str, grad_placements: tuple[Placement, ...] | None
) -> Tensor | None:
    """The value of a parameter under `use_local`; None if the module has no such parameter."""
    parameter = module._parameters.get(name)
    if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:
        return parameter
    if parameter.placements[0].is_shard() and not module.in_forward:
        return parameter
    local: Tensor = parameter.to_local(grad_placements=grad_placements)
    return local


@functools.cache
def _mixed_class(mixin: type, cls: type) -> type:
    """The subclass of `cls` with `mixin` first; one per pair."""
    names: dict[str, Any] = {"__module__": mixin.__module__}
    if "forward" in vars(mixin):  # generate() of transformers reads the signature
        names["forward"] = _with_signature(mixin.forward, cls.forward)  # type: ignore[attr-defined]
    return type(f"{mixin.__name__}{cls.__name__}", (mixin, cls), names)


def _with_signature(function: Any, other: Any) -> Any:
    """A copy of `function`, its `super()` included, that shows the signature of `other`."""
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    copied.__signature__ = inspect.signature(other)  # type: ignore[attr-defined]
    return copied


@functools.cache
def _with_local(cls: type, name: str, grad_placements: tuple[Placement, ...] | None) -> type:
    """The subclass of `cls` whose attribute `name` is `local_value`; one per pair."""
    value = property(lambda module: local_value(module, name, grad_placements))
    return type(cls.__name__, (cls,), {name: value, "__module__": cls.__module__})
