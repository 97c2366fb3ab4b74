"""MetricRows: the numbers of a row come a step later, pauses do not count, nan is null."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_parallel import metric_rows
from forge_parallel.metric_rows import MetricRows

pytestmark = pytest.mark.lane("test")


class Progress(SimpleNamespace):
    def count(self, seconds: float) -> None:
        self.seconds += seconds
        self.device_seconds += 2 * seconds


def test_a_row_has_the_speed_of_its_window_and_the_numbers_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(metric_rows, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def columns(numbers: list[float]) -> dict[str, Any]:
        return {"a": numbers[0], "loads": numbers}

    rows = MetricRows(
        torch.device("cpu"),
        2,
        total_steps=10,
        schema=1,
        flops=lambda tokens: 50.0 * tokens,
        columns={"sums": columns, "absent": columns},
        evaluated=["eval/a/loss"],
        peak=100.0,
    )
    progress = Progress(step=2, tokens=80, seconds=0.0, device_seconds=0.0)
    for _ in range(2):
        rows.meter.count(40)
    now[0] += 3
    rows.count_seconds(progress)  # a checkpoint in between
    assert progress.seconds == 3
    with rows.meter.timed("pause") as pause:
        now[0] += 5
    with rows.meter.timed("wait"):
        now[0] += 1
    assert pause.seconds == 5
    assert not rows.is_waiting
    loss, sums = torch.tensor(2.5), torch.tensor([math.nan, 1.0])
    numbers = {"loss": loss, "grad_norm": loss * math.inf, "verdicts": sums[1:], "sums": sums}
    rows.begin(progress, 0.1, "digest", numbers)
    rows.update({"val_loss": math.inf, "eval/a/loss": 3.0})
    assert rows.verdicts() == [1.0]

    row = rows.finish(skipped=1)
    assert not rows.is_waiting
    assert (row["loss"], row["grad_norm"], row["val_loss"]) == (2.5, None, None)
    assert (row["tokens_per_second"], row["mfu"], row["data_wait_seconds"]) == (20.0, 5.0, 1.0)
    assert (row["seconds"], row["device_hours"], row["seconds_left"]) == (4.0, 8 / 3600, 16.0)
    assert (row["eval/a/loss"], row["skipped_steps"], row["a"]) == (3.0, 1, None)
    assert math.isnan(row["loads"][0])
    first = rows.at_start({"val_loss": 1.0})
    assert first.keys() == row.keys() - {"a", "loads"}
    assert (first["step"], first["loss"], first["val_loss"], first["tokens"]) == (0, None, 1.0, 0)
