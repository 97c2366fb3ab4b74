"""What must hold after every fault, checked with the standard library alone: bytes, digests, rows, processes."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

SAME = ("step", "loss", "val_loss", "grad_norm", "lr", "tokens", "flops", "instances")
_CAUSE = re.compile(
    r"^forge-train: |died by SIG|ended with code|another rank is gone",  # prose: causes are looked for
    re.MULTILINE,
)
_STEP = re.compile(r"step-\d{8}")


def committed(run: Path) -> list[Path]:
    """Checkpoints of a run that have a manifest, oldest first."""
    found = (run / "checkpoints").glob("step-*/manifest.json")
    return sorted(path.parent for path in found if _STEP.fullmatch(path.parent.name))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def content(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds, verified: the digest of each file's bytes, and the objects but for the seconds.

    Raises ValueError for one that is not what its manifest says.
    """
    text = (checkpoint / "manifest.json").read_text()
    body = json.loads(text)
    manifest = body["manifest"]
    if manifest["step"] != step_of(checkpoint):
        raise ValueError(f"{checkpoint} holds step {manifest['step']}")
    files = {}
    for name, entry in manifest["files"].items():
        data = (checkpoint / name).read_bytes()
        if len(data) > manifest["block_bytes"]:
            raise ValueError("this reader knows files of one block")
        if [hashlib.sha256(data).hexdigest()] != entry["blocks"] or len(data) != entry["bytes"]:
            raise ValueError(f"{checkpoint / name} is not what the manifest says")
        files[name] = entry["blocks"]
    objects = re.sub(
        r'"(device_)?seconds": ?[-+.e\d]+', "", json.dumps(manifest.get("objects"), sort_keys=True)
    )
    return {"files": files, "objects": objects}


class Reference:
    """The run that nothing disturbed, with a checkpoint of every step."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.contents = {step_of(path): content(path) for path in committed(run)}
        self.rows = rows(run)

    def problem_of_newest(self, run: Path, damaged: set[str]) -> str:
        """Why the newest sound checkpoint is not that of the reference; `damaged` are those that we hurt."""
        paths = [path for path in committed(run) if path.name not in damaged]
        if not paths:
            return ""
        try:
            found = content(paths[-1])
        except (OSError, ValueError, KeyError) as error:
            return f"newest checkpoint: {type(error).__name__}: {error}"
        if found != self.contents.get(step_of(paths[-1])):
            return f"{paths[-1].name} has other bits than the undisturbed run"
        return ""

    def problem_of_rows(self, run: Path) -> str:
        """Why the log of a finished run is not the reference's."""
        found = rows(run)
        if found == self.rows:
            return ""
        first = next((i for i, (a, b) in enumerate(zip(found, self.rows)) if a != b), len(found))
        return f"rows differ from row {first} on, {len(found)} of {len(self.rows)}"


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: row.get(name) for name in SAME} for row in map(json.loads, lines)]


def events(run: Path) -> list[dict[str, Any]]:
    """The journal, without torn lines."""
    found = []
    path = run / "events.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def unexplained_traceback(text: str) -> bool:
    """Whether the output of a life has a traceback and no line that names a cause."""
    return "Traceback (most recent call last)" in text and not _CAUSE.search(text)
