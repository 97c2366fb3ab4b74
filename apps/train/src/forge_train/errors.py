"""Errors that a user can cause, each with the exit code that the shell and the scheduler see: `forge_resilience.errors`."""

from forge_resilience.errors import *  # noqa: F403  # the list of names is there
from forge_resilience.errors import __all__ as __all__
