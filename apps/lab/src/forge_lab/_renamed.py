"""Keywords of 0.1, taken until 0.3.0 with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def renamed_argument(old: str, new: str) -> Callable[[Function], Function]:
    """A decorator: the keyword `old` is taken as `new`, with a DeprecationWarning."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            if old in named:
                text = f"{function.__name__}({old}=): use {new}="
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                named[new] = named.pop(old)
            return function(*args, **named)

        return call  # type: ignore[return-value]

    return decorate
