"""Batch jobs of Slurm that survive stops: `batch_script` makes the text, of any command.

Nothing here imports torch or reads a configuration file of Forge's runner.
"""

from forge_resilience.slurm.commands import QueueRefusal
from forge_resilience.slurm.config import JobFacts, SlurmConfig, seconds_of
from forge_resilience.slurm.job_scripts import (
    SlurmFlags,
    check_limits,
    make_scripts,
    queued_jobs,
    with_retries,
)
from forge_resilience.slurm.orchestrate import OrchestratorConfig, chain_name, orchestrate
from forge_resilience.slurm.queue import clean_environ, jobs_of, replace_process, submit, two_jobs
from forge_resilience.slurm.script import batch_script, interactive_commands
from forge_resilience.slurm.shared import NoNodes, controller, shared_files, unseen_files
from forge_resilience.slurm.site import (
    find_site,
    grace_warnings,
    job_warnings,
    limit_problem,
    read_site,
    site_path,
    site_text,
)
from forge_resilience.slurm.small_job import orchestrator_command, small_job

__all__ = [
    "JobFacts",
    "NoNodes",
    "OrchestratorConfig",
    "QueueRefusal",
    "SlurmConfig",
    "SlurmFlags",
    "batch_script",
    "chain_name",
    "check_limits",
    "clean_environ",
    "controller",
    "find_site",
    "grace_warnings",
    "interactive_commands",
    "job_warnings",
    "jobs_of",
    "limit_problem",
    "make_scripts",
    "orchestrate",
    "orchestrator_command",
    "queued_jobs",
    "read_site",
    "replace_process",
    "seconds_of",
    "shared_files",
    "site_path",
    "site_text",
    "small_job",
    "submit",
    "two_jobs",
    "unseen_files",
    "with_retries",
]
