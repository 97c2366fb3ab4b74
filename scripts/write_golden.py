"""Write the golden files of a release, before its tag: hatch run python scripts/write_golden.py 0.2.0

A job, its checkpoints, token files and the rows read from them, as this release writes them. Later releases load
them (tests/resume/test_golden.py). They never change, so an existing folder is refused.

Seen to fail: a version whose folder exists.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import torch

from forge_data import Loader, PackedStream, SourceConfig, open_source
from forge_data.cli import main as forge_data
from forge_train import Trainer, load_job

GOLDEN = Path(__file__).resolve().parent.parent / "tests/resume/golden"


def rows_of(tokens: Path) -> list[list[str]]:
    """[digest of the instances, digest of the four arrays] of the first six batches of four rows."""
    stream = PackedStream(open_source(SourceConfig(name="tokens", path=str(tokens))), 16, seed=0)
    loader, found = Loader(stream, global_batch=4), []
    for _ in range(6):
        batch = next(loader)
        arrays = torch.stack([batch.tokens, batch.labels, batch.positions, batch.document_ids])
        found.append([batch.digest, hashlib.sha256(arrays.numpy().tobytes()).hexdigest()])
    return found


def main(version: str) -> int:
    target, first = GOLDEN / version, GOLDEN / "0.1.0"
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        print(f"{version} is not a version; give one such as 0.2.0")
        return 1
    if target.exists():
        print(f"{target} exists, and golden files never change; give the version to be released")
        return 1
    target.mkdir()
    for name in ("job.toml", "text.jsonl"):
        shutil.copy(first / name, target / name)
    text, tokens = str(target / "text.jsonl"), target / "tokens"
    forge_data(["prepare", text, "--output", str(tokens), "--validation_every", "4"])
    (target / "rows.json").write_text(json.dumps(rows_of(tokens), indent=1) + "\n")
    run = target / "run"
    Trainer(load_job(target / "job.toml", {"run.dir": str(run)})).fit()
    for step in sorted((run / "checkpoints").glob("step-*")):
        shutil.move(step, target / step.name)
    shutil.rmtree(run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
