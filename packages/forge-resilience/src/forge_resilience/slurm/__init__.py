"""Batch jobs of Slurm that survive stops: `batch_script` makes the text, of any command.

Nothing here imports torch or reads a configuration file of Forge.
"""

from forge_resilience.slurm.config import JobFacts, SlurmConfig
from forge_resilience.slurm.script import batch_script, interactive_commands

__all__ = ["JobFacts", "SlurmConfig", "batch_script", "interactive_commands"]
