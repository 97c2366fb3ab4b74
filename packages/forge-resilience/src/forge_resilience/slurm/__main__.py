"""`python -m forge_resilience.slurm job.sh --sizes 4,3,2`: keep a job running on as many nodes as there are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from forge_resilience._shared.streams import tolerate
from forge_resilience.exit_codes import ExitCode
from forge_resilience.slurm.client import QueueRefusal
from forge_resilience.slurm.config import FLAGS, OrchestratorConfig
from forge_resilience.slurm.orchestrate import orchestrate
from forge_resilience.stop import StopSignal

_DESCRIPTION = (
    "Submits the job at the largest size that starts soon, again when it was stopped or lost a node, and at a larger "
    "size when nodes are free. Ends with the job's exit code; may be killed and started again at any time."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Orchestrate the job of a script as the arguments say; its exit code, 75 after a signal, 78 if Slurm rejects the job."""
    parser = argparse.ArgumentParser("python -m forge_resilience.slurm", description=_DESCRIPTION)
    add = parser.add_argument
    add("script", help="batch script, made with SlurmConfig(on_stop='leave')")
    add("--sizes", required=True, type=_sizes, help="numbers of nodes: 4,3,2")
    add("--name", required=True, help="name of the run's jobs in the queue, of no other jobs")
    add("--journal", help="file that gets an event for each action")
    add("--max-restarts", type=int, default=1000, help="submissions after a stop or a lost job")
    for key in fields(OrchestratorConfig):
        if key.name in FLAGS:
            kind: Any = type(key.default)
            name, text = f"--{key.name.replace('_', '-')}", key.metadata["help"]
            add(name, type=kind, default=key.default, help=text)

    flags = parser.parse_args(argv)
    tolerate()

    with StopSignal(announce=False) as stop:
        try:
            config = OrchestratorConfig(**{key: getattr(flags, key) for key in FLAGS})
            more = {"max_restarts": flags.max_restarts, "journal": flags.journal}
            more["stopped"] = lambda: stop.requested
            return orchestrate(flags.script, flags.sizes, flags.name, config, **more)
        except (ValueError, QueueRefusal) as error:
            print(f"forge_resilience.slurm: {error}", file=sys.stderr)
            return int(ExitCode.CONFIG_ERROR)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
