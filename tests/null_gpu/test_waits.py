"""The table of host waits, kernels and collectives may only shrink, and a planted wait turns its layout red."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.null_gpu import device
from tests.null_gpu.jobs import JOBS
from tests.null_gpu.layouts import measure, waits_of_rank
from tests.null_gpu.ranks import NullRanks
from tests.null_gpu.waits import fewer, page, problems

pytestmark = pytest.mark.lane("test")

WHY_NOT = device.why_not()
needs_null_gpu = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
PLANTS = "tests.null_gpu.plants"


def main(arguments: list[str]) -> int:
    """These tests, as a campaign of `hatch run null-gpu`."""
    return int(pytest.main([__file__, "--lane", "everything", *arguments]))


def row(**waits: dict[str, int]) -> dict[str, Any]:
    return {"layout": "tp 2", "ranks": 2, "kernels": 9, "collectives": {"all_gather": 4}, "waits": waits,
            "commit": "abc", "torch": "2.13.0"}  # fmt: skip


def test_a_wait_that_is_new_or_more_frequent_is_red_and_one_that_is_gone_is_reported() -> None:
    kept = row(row={"m:read": 2}, save={"m:stage": 3, "m:values": 1})
    assert list(problems(kept, kept, "")) == fewer(kept, kept) == []
    now = row(row={"m:read": 3}, save={"m:stage": 1}, evaluation={"m:score": 1})
    assert list(problems(now, kept, "")) == [
        "tp 2: a logged row waits 3 times in m:read, 2 in the kept table",
        "tp 2: an evaluation waits 1 times in m:score, 0 in the kept table",
    ]
    assert fewer(now, kept) == [
        "tp 2: a save waits 1 times in m:stage, 3 in the kept table",
        "tp 2: a save waits 0 times in m:values, 1 in the kept table",
    ]
    assert list(problems(now, None, "")) == []
    more = kept | {"collectives": {"all_gather": 3, "all_reduce": 1}}
    said = "tp 2: a step makes all_{} times, {} in the kept table"
    assert list(problems(more, kept, "")) == [said.format("reduce 1", 0)]
    assert fewer(more, kept) == [said.format("gather 3", 4)]


def test_a_step_with_more_kernels_is_red_and_one_with_fewer_is_reported() -> None:
    kept = row()
    assert list(problems(kept, kept, "")) == fewer(kept, kept) == []
    assert len(list(problems(kept | {"kernels": 10}, kept, ""))) == 1
    assert fewer(kept | {"kernels": 10}, kept) == []
    assert list(problems(kept | {"kernels": 8}, kept, "")) == []
    assert len(fewer(kept | {"kernels": 8}, kept)) == 1


def test_waits_are_those_of_steady_steps_and_of_evaluations_whose_kernels_are_compiled() -> None:
    found = waits_of_rank(
        {"waits": [["step", 1, "m:f", 3], ["step", 6, "m:f", 1], ["step", 7, "m:f", 2], ["evaluation", 4, "m:f", 5],
                   ["evaluation", 8, "m:f", 1], ["row", 4, "m:f", 1], ["row", 5, "m:f", 1], ["save", 8, "m:f", 1]]}
    )  # fmt: skip
    assert found == {"step": {"m:f": 2}, "evaluation": {"m:f": 1}, "row": {"m:f": 2}}


def test_a_step_that_waits_is_red_without_a_reason_whatever_the_table_holds() -> None:
    found = row(step={"m:item": 1})
    wrong = "tp 2: a step waits 1 times in m:item, and a step waits for nothing"
    assert list(problems(found, found, "")) == list(problems(found, None, "")) == [wrong]
    assert list(problems(found, found, "split sizes")) == []
    assert len(list(problems(row(step={"m:item": 2}), found, "split sizes"))) == 1


def test_the_page_has_every_wait_and_every_reason() -> None:
    text = page([row(step={"m:item": 1}), row() | {"layout": "plain"}], {"tp 2": "split sizes"})
    assert "| tp 2 | 2 | 9 | 4 all-gather | 1 | 0 | 0 | 0 | 0 |" in text
    assert "| `m:item` | 1 | tp 2 |" in text
    assert "- **tp 2**: split sizes." in text
    assert "1 of the 2 layouts" in text


def test_every_phase_is_a_function_of_the_sources() -> None:
    """A phase of a name that is gone would count no wait."""
    root = Path(__file__).parents[2]
    found = set()
    for path in [*root.glob("packages/*/src/**/*.py"), *root.glob("apps/*/src/**/*.py")]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                functions = (n.name for n in node.body if isinstance(n, ast.FunctionDef))
                found |= {f"{node.name}.{name}" for name in functions}
    assert phases() <= found


def phases() -> set[str]:
    """The names that record.py reads; it can be imported on the null GPU only."""
    tree = ast.parse(Path(__file__).with_name("record.py").read_text())
    (table,) = (
        n.value
        for n in tree.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "PHASES"
    )
    return set(ast.literal_eval(table))


def test_F182_no_source_makes_tensors_of_numbers_on_a_device() -> None:
    """torch.tensor(numbers, device=cuda) waits for the device; `.to(device, non_blocking=True)` of one does not."""
    root = Path(__file__).parents[2]
    found = []
    for path in [*root.glob("packages/*/src/**/*.py"), *root.glob("apps/*/src/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")
                makes = name[::2] in {
                    ("torch", n) for n in ("tensor", "as_tensor", "scalar_tensor")
                }
                if name[2] == "new_tensor" or (
                    makes and "device" in {k.arg for k in node.keywords}
                ):
                    found.append(f"{path}:{node.lineno}")
    assert found == []


# ---- on the null GPU


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NullRanks]:
    found = NullRanks(tmp_path_factory.mktemp("caches"))
    yield found
    found.close()


@needs_null_gpu
@pytest.mark.slow
def test_a_planted_item_in_the_step_is_red(ranks: NullRanks, tmp_path: Path) -> None:
    plain = JOBS["plain"]
    before, wrong = measure("plain", plain, ranks, tmp_path / "plain")
    assert not wrong, wrong
    assert "step" not in before["waits"]
    planted = replace(plain, keys={"train.loss": f"{PLANTS}:loss_that_waits"})
    after, wrong = measure("plain", planted, ranks, tmp_path / "planted")
    assert not wrong, wrong
    (function,) = after["waits"]["step"]
    assert after["waits"]["step"] == {function: 2}  # micro-batches of a step
    said = list(problems(after, before, ""))
    assert f"plain: a step waits 2 times in {function}, 0 in the kept table" in said


@needs_null_gpu
@pytest.mark.slow
def test_a_signal_saves_and_ends_as_on_a_cpu(ranks: NullRanks, tmp_path: Path) -> None:
    job = replace(JOBS["fsdp 2"], keys={"callbacks.stop.name": f"{PLANTS}:Stopped"})
    (tmp_path / "job.toml").write_text(job.toml())
    ended = ranks.run(["run", "job.toml"], folder=tmp_path, ranks=2)
    assert ended.codes == [75, 75], ended.texts
    steps = [set(map(int, record["steps"])) for record in ended.records]
    assert steps[0] == steps[1] < set(range(1, 8))
    again = ranks.run(["run", "job.toml"], folder=tmp_path, ranks=2)
    assert again.good, again.texts
    assert min(map(int, again.records[0]["steps"])) == max(steps[0]) + 1


@needs_null_gpu
@pytest.mark.slow
def test_verbs_that_use_a_device_end_there(ranks: NullRanks, tmp_path: Path) -> None:
    """doctor finds that the sum is wrong, where others told a device that computes nothing from a good one."""
    (tmp_path / "job.toml").write_text(JOBS["fsdp 2"].toml())
    assert ranks.run(["run", "job.toml"], folder=tmp_path, ranks=2).good
    doctor = ranks.run(["doctor"], folder=tmp_path)
    assert doctor.codes == [2]
    assert "broken" in doctor.texts[0]
    for number, words in (
        (1, ["plan", "job.toml", "--gpus", "2"]),
        (2, ["eval", "run"]),
        (1, ["eval", "run"]),
    ):
        ended = ranks.run(words, folder=tmp_path, ranks=number)
        assert ended.good, ended.texts
