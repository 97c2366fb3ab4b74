"""Files next to a batch script that outlive a killed orchestrator: its state, and the ends of jobs.

`orchestrator-NAME.json` is written here only. `ends-NAME` is written by the section `record_end` of batch.sh, with a line
`JOB CODE` for each end, and read here. (`lives-CHAIN`, a line for each attempt of the jobs of
one chain, is written and read by batch.sh only. The chain of an orchestrated run is its name, else its first job.)
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge_resilience._shared.atomic import write_file

_JOB_IDS = range(2**32 - 2)  # 32 bits, of which the two highest values mean no job


@dataclass(frozen=True)
class OrchestratorState:
    """What an orchestrator must remember in addition to Slurm's records.

    handled: the newest job whose end was acted upon. withdrawn: waiting jobs that the orchestrator cancelled itself.
    resizes: times of the last moves to another size. excluded: nodes that were found broken.
    """

    handled: int
    restarts: int = 0
    withdrawn: tuple[int, ...] = ()
    resizes: tuple[float, ...] = ()
    excluded: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> OrchestratorState:
        """Read the state of any version; unknown keys are ignored.

        Raises FileNotFoundError, and any other exception for a damaged file.
        """
        found: Any = json.loads(path.read_bytes())
        lists = {"withdrawn": int, "resizes": float, "excluded": str}
        entries = {name: tuple(map(kind, found.get(name, ()))) for name, kind in lists.items()}
        handled, restarts = int(found["handled"]), int(found.get("restarts", 0))
        if handled not in _JOB_IDS or restarts < 0:
            raise ValueError(f"job {handled} after {restarts} restarts cannot be")
        return cls(handled, restarts, **entries)

    def write(self, path: Path) -> None:
        """Replace the file; a kill leaves the old one or the new one."""
        write_file(path, json.dumps(asdict(self)))


def state_path(script: Path, name: str) -> Path:
    """The path of the state of the orchestrator of a script's jobs."""
    return script.parent / f"orchestrator-{name}.json"


def read_ends(script: Path, name: str) -> list[tuple[int, int]]:
    """Return (job id, exit code) of the ends that the jobs of a script wrote; torn lines are left out."""
    try:
        text = (script.parent / f"ends-{name}").read_text(errors="replace")
    except FileNotFoundError:
        return []
    lines = re.findall(r"^(\d+) (\d{1,3})$", text, re.MULTILINE | re.ASCII)
    return [(int(job), int(code)) for job, code in lines if int(job) in _JOB_IDS]
