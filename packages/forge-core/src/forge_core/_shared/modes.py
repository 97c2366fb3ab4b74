# Copied from scripts/shared/modes.py; edit that file, then run scripts/copy_shared.py.
"""Evaluation inside of training: each module gets back the mode that it had."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and restore the mode of each of its modules afterwards.

    Only `model.train(model.training)` would put modules into training mode that the caller had in eval mode.
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(before[0][1])  # a model may define `train` and do more there
        for module, training in before:
            module.training = training
