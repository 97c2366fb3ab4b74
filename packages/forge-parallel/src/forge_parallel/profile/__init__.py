"""Where the time and the memory of a step go: windows of torch.profiler, one table, bytes by category."""

from forge_parallel.profile.breakdown import breakdown, read_trace
from forge_parallel.profile.memory import memory_by_category
from forge_parallel.profile.span import PREFIX, span
from forge_parallel.profile.table import markdown, tables
from forge_parallel.profile.window import ProfileWindow, window_problems

__all__ = [
    "PREFIX",
    "ProfileWindow",
    "breakdown",
    "markdown",
    "memory_by_category",
    "read_trace",
    "span",
    "tables",
    "window_problems",
]
