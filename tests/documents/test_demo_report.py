"""The recorded run of the demo report was preempted ten times, and its page needs no other file and no network."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from scripts import record_demo_run

from forge_resilience import read_events
from forge_resilience.goodput import read_goodput_table
from forge_train import read_run

pytestmark = pytest.mark.lane("test")

RECORD = record_demo_run.RECORD


def test_the_run_was_preempted_ten_times_and_ended() -> None:
    events = list(read_events(RECORD / "events.jsonl"))
    kinds = Counter(event["event"] for event in events)
    table = read_goodput_table(events)
    assert (kinds["start"], kinds["resume"], kinds["done"]) == (1, 10, 1)
    assert len(record_demo_run.PREEMPTED_AFTER) == table.stops + table.losses == 10
    assert table.stops == kinds["stop"] > table.losses > 0

    metrics, every = read_run(RECORD).metrics, record_demo_run.FLAGS["metrics.every_steps"]
    assert metrics["step"] == [*range(every, record_demo_run.FLAGS["train.steps"] + 1, every)]
    assert None not in metrics["loss"]


def test_the_page_is_small_without_its_library_and_loads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(record_demo_run.ROOT / "scripts"))
    from docs_hooks import REPORTS, report_page
    from plotly.offline import get_plotlyjs

    ((folder, command),) = REPORTS.values()
    assert (record_demo_run.ROOT / folder, command.split()[1]) == (
        RECORD,
        "scripts/record_demo_run.py",
    )
    page = report_page(folder, command)
    assert command in page
    own = page.replace(get_plotlyjs(), "")
    assert len(own) < 500_000 < len(page)
    assert "default-src 'none'" in own
    assert "http" not in own.replace("http-equiv", "")
    assert sum(file.stat().st_size for file in RECORD.iterdir()) < 300_000


def test_the_record_names_no_folder_of_the_machine_that_wrote_it() -> None:
    for file in RECORD.glob("*.*"):
        absolute = re.findall(r'"/[^"]*"', file.read_text(encoding="utf-8"))
        assert file.name == "sample.txt" or absolute == [], file
