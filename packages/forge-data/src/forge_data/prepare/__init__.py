"""Text files to token files."""

from forge_data.prepare.pipeline import Prepared, Progress, merge, prepare

__all__ = ["Prepared", "Progress", "merge", "prepare"]
