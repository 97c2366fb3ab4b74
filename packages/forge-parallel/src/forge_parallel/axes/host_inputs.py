"""Inputs of a model that stay on the host although FSDP2 moves what its root is called with."""

from __future__ import annotations

from typing import Any

from torch import nn


class _Kept:
    """Hides a tensor from FSDP2, which moves tensors in lists, dicts and tuples alone."""

    def __init__(self, value: Any) -> None:
        self.value = value


def keep_on_host(model: nn.Module) -> None:
    """Let keywords named in `model.host_inputs` reach its forward on the device they are given on.

    What a model reads on the host (where documents end) would otherwise be moved to the accelerator and
    read back, which waits for all that runs there. To be called after FSDP2.
    """
    names = frozenset(getattr(model, "host_inputs", ()))
    if not names:
        return

    def hide(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {k: _Kept(v) if k in names else v for k, v in kwargs.items()}

    def show(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {k: v.value if isinstance(v, _Kept) else v for k, v in kwargs.items()}

    model.register_forward_pre_hook(hide, prepend=True, with_kwargs=True)
    model.register_forward_pre_hook(show, with_kwargs=True)
