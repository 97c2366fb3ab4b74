"""The order in which a model is prepared, checked by marks on its modules.

Steps in another order leave a model that runs and trains wrong numbers: float8 after tensor parallelism removes the
communication, tensor parallelism after FSDP2 would shard shards.
"""

from __future__ import annotations

from torch import nn

STEPS = ("float8", "split", "tensor", "context", "recompute", "compile", "fsdp")
_MARK = "_forge_steps"


class OrderError(RuntimeError):
    """`step` was called on a model after `after`, which must follow it (or is the same step)."""

    def __init__(self, step: str, after: str) -> None:
        self.step, self.after = step, after
        if step == after:
            text = f"{step} was done on this model; do it once"
        else:
            text = (
                f"{step} must come before {after}, which was done; the order is {', '.join(STEPS)}"
            )
        super().__init__(text)


def mark(model: nn.Module, step: str) -> None:
    """Record on every module of `model` with parameters that `step` is done; call it at the start of the step.

        mark(model, "tensor")

    Raises OrderError, and marks nothing, if a later step or the same one was done on any of them. The
    mark is a plain attribute: not in the state dict, but in copies. No cost beyond a walk.
    """
    number = STEPS.index(step)
    # modules without parameters are not marked: stages that are prepared one after another may share them
    modules = [m for m in model.modules() if m is model or any(True for _ in m.parameters())]
    done = {name for module in modules for name in module.__dict__.get(_MARK, ())}
    for later in (*STEPS[number + 1 :], step):
        if later in done:
            raise OrderError(step, after=later)
    for module in modules:
        module.__dict__[_MARK] = (*module.__dict__.get(_MARK, ()), step)
