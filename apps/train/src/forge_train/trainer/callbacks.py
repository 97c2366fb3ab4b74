"""Callback, where it was in version 0.1."""

from forge_train.run.callback import Callback

__all__ = ["Callback"]
