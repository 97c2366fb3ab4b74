"""Record docs/data/demo-run, of which the site shows the report: a real run that is preempted ten times.

    python scripts/record_demo_run.py                           # about three minutes on two cores
    forge-train report docs/data/demo-run --output demo.html    # the page of the site, from the record

Each attempt is a process, forked after the imports. After a given number of steps it gets SIGTERM, or SIGKILL without notice, and
the same command starts again. Losses are the same in each recording, as a run that is resumed has the bits of one that was not stopped. Times are not:
record on a quiet machine. The record is the run directory without checkpoints; names of this machine are left out.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from forge_testing.processes import exit_code, forked, last_step
from forge_train.cli import run_verb

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs/data/demo-run"
#: Steps that an attempt makes before it is preempted; every third time without notice.
PREEMPTED_AFTER = (70, 120, 80, 130, 60, 110, 90, 120, 100, 80)
_JOB = "apps/train/configs/moe_debug.toml"
FLAGS = {
    "run.dir": "runs/demo-run", "train.steps": 1100, "data.seq_len": 64, "metrics.every_steps": 10, "eval.every_steps": 50,
    "checkpoint.every_steps": 40, "model.dim": 64, "model.num_layers": 3, "model.moe.num_experts": 4, "metrics.console": "plain",
}  # fmt: skip
_FILES = ("config.toml", "metrics.jsonl", "events.jsonl", "sample.txt")


def main() -> None:
    for module in ("forge_train.loop.trainer", "forge_train.report.summary"):
        importlib.import_module(module)  # once, not in each attempt
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "apps").symlink_to(ROOT / "apps")
        run = work / str(FLAGS["run.dir"])
        command = [
            "run",
            _JOB,
            *(str(w) for key, value in FLAGS.items() for w in (f"--{key}", value)),
        ]

        os.chdir(work)
        for number, steps in enumerate((*PREEMPTED_AFTER, 0), 1):
            step = last_step(run / "metrics.jsonl") + steps
            pid = forked(lambda: os._exit(run_verb(command)))
            sent = None if not steps else signal.SIGTERM if number % 3 else signal.SIGKILL
            if sent:
                _wait_for(pid, run, number, step)
                os.kill(pid, sent)
            assert exit_code(pid) == {None: 0, signal.SIGTERM: 75, signal.SIGKILL: -9}[sent]

        RECORD.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            shutil.copy(run / name, RECORD / name)
        _write_environment(run / "environment.json", command)


def _wait_for(pid: int, run: Path, attempt: int, step: int) -> None:
    """Return when so many attempts have begun and the last one has logged a step, or its process has ended."""
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        events = (run / "events.jsonl").read_text() if (run / "events.jsonl").exists() else ""
        begun = len(re.findall('"event": "(?:start|resume)"', events))
        if begun == attempt and last_step(run / "metrics.jsonl") >= step:
            return
        time.sleep(0.02)


def _write_environment(file: Path, command: list[str]) -> None:
    """Copy what describes the run, with neutral names for this machine."""
    found = json.loads(file.read_text())
    host = found["host"]
    neutral = {
        "host": "node-1",
        "hosts": ["node-1"],
        "command": ["forge-train", *command],
        "platform": sys.platform,
    }
    text = json.dumps({**found, **neutral}, indent=2)
    (RECORD / file.name).write_text(text + "\n")
    events = RECORD / "events.jsonl"
    events.write_text(
        re.sub(rf'"host": "{re.escape(host)}"', '"host": "node-1"', events.read_text())
    )


if __name__ == "__main__":
    main()
