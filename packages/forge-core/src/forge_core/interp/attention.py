"""What a model attends to, seen from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forge_core._shared.problems import invalid


@contextmanager
def attention_weights(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Weights of each attention of a model, of the last call: {module: (B, H, S, T) fp32 at least, no graph}.

        with attention_weights(model) as weights:
            model(tokens)
        weights["layers.0.mixer"][:, :, -1]  # (B, H, T): what the last token of each row looked at

    T are the tokens of a row, or those of its images in a block of cross-attention. A row sums to 1, to less with
    sinks, and to 0 where a token sees no image. The output is the same as without; each layer holds its weights and
    computes them a second time.

    Self-attention is read in calls without a cache. Read are modules with an `attend` that offers `weights(q, k, ctx, *sinks)`, whoever calls it, and those that offer
    `attention_weights(x, ctx, cache)` beside their forward. Raises ValueError where there is none, or where ranks share
    the tokens of a row, so that none has all keys.
    """
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        watched = [_watch(name, m, found, stack) for name, m in model.named_modules()]
        if not any(watched):
            rule = f"of type {type(model).__name__} must have a module with `attend` or `attention_weights`"
            raise invalid("model", "missing", ..., rule, "see forge_core.interp")
        yield found


def _watch(name: str, module: Any, found: dict[str, Tensor], stack: ExitStack) -> bool:
    if hasattr(module, "attention_weights"):

        def hook(module: Any, inputs: Any, kwargs: Any, _: Any) -> None:
            with torch.no_grad():
                found[name] = module.attention_weights(*inputs, **kwargs)

        stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        return True
    attend = getattr(module, "attend", None)
    if attend is None:
        return False
    if not hasattr(attend, "weights"):
        rule = f"of type {type(attend).__name__} must have a method `weights`"
        fix = "use one process without context parallelism"
        raise invalid(f"{name}.attend", "unsupported", ..., rule, fix)

    def attend_and_keep(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        with torch.no_grad():
            found[name] = attend.weights(q, k, *rest)
        out: Tensor = attend(q, k, v, *rest)
        return out

    module.attend = attend_and_keep
    stack.callback(setattr, module, "attend", attend)
    return True
