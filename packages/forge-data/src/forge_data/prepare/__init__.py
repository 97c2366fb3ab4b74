"""Text files to token files."""

from forge_data.prepare.pipeline import Prepared, prepare

__all__ = ["Prepared", "prepare"]
