"""Each fault at each place ends a run with the code of docs/exit-codes.md, and leaves sound records."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_resilience import ExitCode
from forge_testing.warm import WarmProcess

from .grid import BY_NAME, CELLS, KILLED, PLACES, Fault
from .page import PAGE, table, warm_process

#: A fault of each code; the others run with every test.
_OFTEN = (
    "stdout on a full disk", "no room for a checkpoint", "data that is damaged", "checkpoints that are damaged",  # prose: rows of the page
    "ranks that die in every life", "a device that computes wrong", "SIGTERM", "weights that are not finite",  # prose: rows of the page
    "a wrong value in the configuration", "SIGKILL",
)  # fmt: skip


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmProcess]:
    process = warm_process()
    yield process
    process.close()


@pytest.fixture(scope="module")
def begun(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The folder that a life begins in, without a run and with one."""
    fresh, trained = (tmp_path_factory.mktemp(name) for name in ("fresh", "trained"))
    assert warm.call("tests.exit_codes.grid:prepare", str(fresh), folder=fresh).code == 0
    shutil.copytree(fresh, trained, dirs_exist_ok=True)
    call = warm.call("forge_train.cli:main", ["run", "job.toml"], folder=trained, limited=False)
    assert call.code == 0, call.err
    return {False: fresh, True: trained}


def records(run: Path, name: str) -> list[dict]:
    path = run / name
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def live(warm: WarmProcess, begun: dict[bool, Path], fault: Fault, place: str, folder: Path) -> str:
    """One life, whose code and records are compared; what it printed on stderr."""
    code = fault.codes[PLACES_OF[place]]
    shutil.copytree(begun[fault.trained and place == "start"], folder, dirs_exist_ok=True)
    life = "tests.exit_codes.grid:life"
    called = warm.call(life, fault.name, place, str(folder), folder=folder, limited=False)
    assert called.code == code, called.err
    assert ("Traceback" in called.err) == (fault.traceback and code == ExitCode.ERROR), called.err
    problems = folder / ".problems"
    found = json.loads(problems.read_text()) if problems.is_file() else []
    if fault.problem and code:
        assert tuple(found[0]) == fault.problem
        assert fault.problem[0] in called.err  # in the line that a user reads
    steps = [row["step"] for row in records(folder / "run", "metrics.jsonl")]
    assert steps == [*range(1, len(steps) + 1)]
    events = [event["event"] for event in records(folder / "run", "events.jsonl")]
    if code == ExitCode.REQUEUE and place != "start":
        assert events[-2:] == ["save", "stop"]
    if code == ExitCode.DONE and "full disk" not in fault.name:
        assert steps[-1:] == [6]
        assert events[-1] == "done"
    return called.err


PLACES_OF = {place: number for number, place in enumerate(PLACES)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=[pytest.mark.lane("ci")] if name in _OFTEN else [])
        for name, place, _ in CELLS
    ],
)
def test_a_fault_ends_with_its_code(
    tmp_path: Path, warm: WarmProcess, begun: dict[bool, Path], name: str, place: str
) -> None:
    live(warm, begun, BY_NAME[name], place, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place", "code"), [cell for cell in CELLS if cell[2]])
def test_the_same_command_afterwards(
    tmp_path: Path, warm: WarmProcess, begun: dict[bool, Path], name: str, place: str, code: int
) -> None:
    fault = BY_NAME[name]
    live(warm, begun, fault, place, tmp_path)
    again = warm.call("forge_train.cli:main", ["run", "job.toml"], folder=tmp_path, limited=False)
    assert again.code == fault.again, again.err
    if fault.again == 0:
        rows = records(tmp_path / "run", "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


TRAIN, DATA, CKPT = "forge_train.cli:main", "forge_data.cli:main", "forge_ckpt.cli:main"


@pytest.mark.slow
@pytest.mark.parametrize("full", [[1], [2], pytest.param([1, 2], marks=pytest.mark.lane("ci"))])
@pytest.mark.parametrize(
    ("program", "args", "code"),
    [
        (TRAIN, ["run", "job.toml"], 0),
        (TRAIN, ["explain", "job.toml"], 0),
        (TRAIN, ["goodput", "run"], 0),
        (TRAIN, ["run", "none.toml"], 78),
        (DATA, ["inspect", "tokens"], 0),
        (DATA, ["inspect", "none"], 65),
        (CKPT, ["ls", "run/checkpoints"], 0),
        (CKPT, ["ls", "none"], 78),
        ("forge_vlm.data.command:main", ["verify", "none"], 65),
    ],
)
def test_F186_a_full_disk_under_the_output_changes_no_code(
    warm: WarmProcess, begun: dict[bool, Path], program: str, args: list, code: int, full: list
) -> None:
    call = "tests.exit_codes.grid:elsewhere"
    called = warm.call(call, program, args, full, {}, folder=begun[True], limited=False)
    assert called.code == code, called.err
    assert "Traceback" not in called.err


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize(
    ("program", "args", "limit", "value"),
    [
        (TRAIN, ["run", "job.toml", "--run.dir=new"], "RLIMIT_NOFILE", 3),
        (TRAIN, ["generate", "run"], "RLIMIT_NOFILE", 3),
        (TRAIN, ["run", "job.toml", "--run.dir=new"], "RLIMIT_AS", 5_000_000),
        (DATA, ["inspect", "tokens"], "RLIMIT_NOFILE", 3),
        (CKPT, ["verify", "run/checkpoints"], "RLIMIT_NOFILE", 3),
        ("forge_vlm.data.command:main", ["verify", "tokens"], "RLIMIT_NOFILE", 3),
    ],
)
def test_F192_a_limit_of_the_process_is_named_and_no_fault_of_the_data(
    warm: WarmProcess, begun: dict[bool, Path], program: str, args: list, limit: str, value: int
) -> None:
    call = "tests.exit_codes.grid:elsewhere"
    called = warm.call(call, program, args, [], {limit: value}, folder=begun[True], limited=False)
    assert called.code == 1, called.err
    assert limit in called.err
    assert "Traceback" not in called.err


def test_the_page_has_a_row_of_each_code_and_the_grid() -> None:
    text = PAGE.read_text()
    assert table() in text, "python -m tests.exit_codes.page writes it"
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", text, re.MULTILINE)
    assert rows == [(str(code.value), code.name) for code in ExitCode]
    met = {code for _, _, code in CELLS}
    assert met == {*map(int, ExitCode), KILLED}
