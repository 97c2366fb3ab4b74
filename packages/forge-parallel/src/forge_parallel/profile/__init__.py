"""Time and memory of a step: windows of torch.profiler, a breakdown by kind of work, bytes by category."""

from forge_parallel.profile.breakdown import PREFIX, breakdown, markdown, read_trace, span, tables
from forge_parallel.profile.config import ProfileConfig
from forge_parallel.profile.memory import memory_by_category
from forge_parallel.profile.window import ProfileWindow, window_problems

__all__ = [
    "PREFIX",
    "ProfileConfig",
    "ProfileWindow",
    "breakdown",
    "markdown",
    "memory_by_category",
    "read_trace",
    "span",
    "tables",
    "window_problems",
]
