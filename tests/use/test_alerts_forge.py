"""Who follows the journal of a run, and who is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_testing import forge_train, write_job
from forge_train import read_run


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--nproc", "2")], ids=["one process", "two ranks"])
def test_one_process_follows_a_run_and_sends_each_event_once(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    script = tmp_path / "note.sh"
    script.write_text(f"cat >> {tmp_path}/notes; echo >> {tmp_path}/notes\n")
    alerts = f"""
[resilience.alerts]
command = "bash {script}"
events = ["start", "evaluation", "done"]
"""
    done = forge_train(
        "run", write_job(tmp_path, alerts), *arguments, "--sample.max_new_tokens", "0"
    )
    assert done.code == 0, done.err
    told = [json.loads(line)["event"] for line in (tmp_path / "notes").read_text().splitlines()]
    events = [e["event"] for e in read_run(tmp_path / "run").events]
    assert told == [e for e in events if e in ("start", "evaluation", "done")]
    assert "alert_failed" not in events
