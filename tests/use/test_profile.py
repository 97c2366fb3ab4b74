"""[profile] of a run: files per rank, spans of each phase, the same numbers, and refusals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.autograd.profiler import record_function

from forge_parallel.profile import PREFIX, read_trace
from forge_testing import write_job
from forge_testing.problems import rejects
from forge_testing.runs import assert_same_bits, columns, fit_on_ranks, make_job, together
from forge_train import Callback, ConfigError, Trainer, load_job, read_run

pytestmark = pytest.mark.lane("test")

WINDOW = {"profile.start_step": 5, "profile.num_steps": 2, "sample.max_new_tokens": 0}


@pytest.mark.distributed
@pytest.mark.slow
def test_a_profiled_run_has_the_same_bits_and_files_of_the_ranks_that_profile(
    tmp_path: Path,
) -> None:
    """Step 6 is evaluated and saved, so both are in the window."""
    plain, seen = make_job(tmp_path / "plain"), make_job(tmp_path / "seen")
    wanted = together(fit_on_ranks(2, plain, Callback, sample__max_new_tokens=0))
    options: dict[str, Any] = {**WINDOW, "profile.ranks": [1], "profile.memory": True}
    found = together(fit_on_ranks(2, seen, Callback, **options))
    assert_same_bits(found, wanted)
    assert columns(seen) == columns(plain)
    folder = seen.parent / "run/profile"
    files = {str(p.relative_to(folder)) for p in folder.rglob("*.*")}
    assert files == {f"step-5/rank-1.{end}" for end in ("trace.json.gz", "json", "md")}
    table = json.loads((folder / "step-5/rank-1.json").read_text())
    steps = {name: span["count"] / table["steps"] for name, span in table["spans"].items()}
    assert steps == {
        **dict.fromkeys(("data", "forward_backward", "forward", "backward"), 1),
        **dict.fromkeys(("grad_norm", "optimizer"), 1),
        **dict.fromkeys(("evaluate", "save"), 0.5),
        "hooks": steps["hooks"],
    }
    assert steps["hooks"] >= 2  # on_log and on_step_end of each
    assert all(table["kinds"][kind] > 0 for kind in ("gemm", "attention", "optimizer"))
    assert 0 < table["memory"]["gradients"] == table["memory"]["parameters"]
    assert table["memory"]["optimizer"] >= 2 * table["memory"]["parameters"]


def test_a_step_has_six_spans_and_one_for_each_call_of_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their cost, 4 microseconds each, is all that [profile] adds to a step outside of windows."""
    names: list[str] = []
    enter = record_function.__enter__

    def count(self: record_function) -> Any:
        names.append(self.name)
        return enter(self)

    monkeypatch.setattr(record_function, "__enter__", count)
    keys = {"train.steps": 6, "eval.every_steps": 0, "checkpoint.every_steps": 0}
    job = load_job(
        write_job(tmp_path), {**keys, "metrics.console": "off", "metrics.every_steps": 9}
    )
    Trainer(job, [Callback()]).fit()
    found = Counter(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))
    step = ("data", "forward_backward", "forward", "backward", "grad_norm", "optimizer")
    # on_start, six times on_step_end, then on_log and on_checkpoint of the last step, and on_end
    assert found == {**dict.fromkeys(step, 6), "load": 1, "save": 1, "hooks": 6 + 4}


@pytest.mark.lane("quick")
def test_a_window_is_written_next_to_the_rows_and_recorded(tmp_path: Path) -> None:
    options = {**WINDOW, "profile.every_steps": 3, "train.steps": 8, "metrics.console": "off"}
    Trainer(load_job(write_job(tmp_path), options)).fit()
    run = tmp_path / "run"
    assert sorted(p.name for p in (run / "profile").iterdir()) == [
        "step-5"
    ]  # that of step 8 is cut
    (event,) = [e for e in read_run(run).events if e["event"] == "profile"]
    assert (event["step"], event["rank"]) == (6, 0)
    trace = read_trace(run / "profile/step-5/rank-0.trace.json.gz")
    assert any(e.get("name") == "forge.optimizer" for e in trace)
    assert "matrix products" in (run / "profile/step-5/rank-0.md").read_text()


def test_a_folder_that_cannot_be_written_costs_only_the_profile(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path), {**WINDOW, "train.steps": 7, "metrics.console": "off"})
    trainer = Trainer(job)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/profile").write_text("a file")
    assert trainer.fit().step == 7
    (event,) = [e for e in read_run(tmp_path / "run").events if e["event"] == "profile"]
    assert "profile" in event["error"]


@pytest.mark.parametrize(
    ("keys", "value", "code", "shown"),
    [
        ({"profile.start_step": 12}, 12, "window", "12 to 13"),
        ({"profile.ranks": [0, 3]}, [3], "world", "[3]"),
        ({"profile.ranks": []}, [], "range", "[]"),
        ({"profile.start_step": 1}, 1, "range", "2"),
        ({"profile.every_steps": 2}, 2, "range", "num_steps 2"),
    ],
)
def test_windows_that_no_run_comes_to_are_rejected(
    tmp_path: Path, keys: dict[str, Any], value: Any, code: str, shown: str
) -> None:
    (key,) = keys
    with rejects(key, value, code, ConfigError, where=shown):
        Trainer(load_job(write_job(tmp_path), {**WINDOW, **keys}))
