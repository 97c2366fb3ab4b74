"""Batch jobs of Slurm that survive stops: `batch_script` makes the text, of any command.

Nothing here imports torch or reads a configuration file of Forge's runner.
"""

from forge_resilience.slurm.client import (
    QueueRefusal,
    clean_environ,
    exclude_nodes,
    jobs_of,
    replace_process,
    submit,
    two_jobs,
)  # fmt: skip
from forge_resilience.slurm.config import JobFacts, OrchestratorConfig, SlurmConfig, seconds_of
from forge_resilience.slurm.job_scripts import (
    SlurmFlags,
    check_limits,
    make_scripts,
    orchestrator_command,
    queued_jobs,
    small_job,
    with_retries,
)  # fmt: skip
from forge_resilience.slurm.orchestrate import chain_name, orchestrate
from forge_resilience.slurm.script import batch_script, interactive_commands
from forge_resilience.slurm.site import (
    NoNodes,
    controller,
    find_site,
    grace_warnings,
    job_warnings,
    limit_problem,
    read_site,
    shared_files,
    site_path,
    site_text,
    unseen_files,
)  # fmt: skip

__all__ = [
    "JobFacts", "NoNodes", "OrchestratorConfig", "QueueRefusal", "SlurmConfig", "SlurmFlags", "batch_script", "chain_name",
    "check_limits", "clean_environ", "controller", "exclude_nodes", "find_site", "grace_warnings", "interactive_commands",
    "job_warnings", "jobs_of", "limit_problem", "make_scripts", "orchestrate", "orchestrator_command", "queued_jobs",
    "read_site", "replace_process", "seconds_of", "shared_files", "site_path", "site_text", "small_job", "submit", "two_jobs",
    "unseen_files", "with_retries",
]  # fmt: skip
