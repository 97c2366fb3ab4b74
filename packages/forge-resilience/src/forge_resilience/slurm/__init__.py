"""Batch jobs of Slurm that survive stops: `batch_script` makes the text, of any command.

Nothing here imports torch or reads a configuration file of Forge's runner.
"""

from forge_resilience.slurm.commands import QueueRefusal
from forge_resilience.slurm.config import JobFacts, SlurmConfig, seconds_of
from forge_resilience.slurm.orchestrate import OrchestratorConfig, chain_name, orchestrate
from forge_resilience.slurm.queue import clean_environ, jobs_of, submit
from forge_resilience.slurm.script import batch_script, interactive_commands
from forge_resilience.slurm.shared import NoNodes, unseen_files
from forge_resilience.slurm.site import (
    find_site,
    grace_warnings,
    limit_problem,
    read_site,
    site_path,
    site_text,
)

__all__ = [
    "JobFacts",
    "NoNodes",
    "OrchestratorConfig",
    "QueueRefusal",
    "SlurmConfig",
    "batch_script",
    "chain_name",
    "clean_environ",
    "find_site",
    "grace_warnings",
    "interactive_commands",
    "jobs_of",
    "limit_problem",
    "orchestrate",
    "read_site",
    "seconds_of",
    "site_path",
    "site_text",
    "submit",
    "unseen_files",
]
