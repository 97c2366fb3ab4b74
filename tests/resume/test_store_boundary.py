"""What goes wrong around the store of a run is one line with an exit code, and harms no checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forge_ckpt.store
from forge_ckpt import directories
from forge_testing import flip_bit, write_job
from forge_testing.problems import assert_problem, rejects
from forge_train import Callback, Trainer, load_job, load_trained, read_run
from forge_train.errors import JobError

pytestmark = pytest.mark.lane("test")

ERROR, CORRUPT, CONFIG = 1, 66, 78
QUIET = {
    "metrics.console": "off",
    "eval.every_steps": 0,
    "checkpoint.every_steps": 2,
    "sample.max_new_tokens": 0,
}


def run(folder: Path, steps: int, *callbacks: Callback) -> int:
    """The last step of the job of `folder` trained in this process."""
    job = load_job(write_job(folder), {**QUIET, "train.steps": steps})
    return Trainer(job, callbacks).fit().step


def refused(folder: Path, steps: int = 6, *callbacks: Callback) -> tuple[int, JobError]:
    """(exit code, error) of a run that cannot go on."""
    with pytest.raises(JobError) as caught:
        run(folder, steps, *callbacks)
    assert not any("\n" in line for line in caught.value.lines)
    return int(caught.value.exit_code), caught.value


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the steps 2 and 4."""
    folder = tmp_path_factory.mktemp("original")
    assert run(folder, 4) == 4
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original / "run", tmp_path / "run")
    return tmp_path


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """`change` the objects of step 4 and give its manifest a digest that fits."""
    path = folder / "run/checkpoints/step-00000004/manifest.json"
    table = json.loads(path.read_bytes())["manifest"]
    change(table["objects"])
    body = json.dumps(table, separators=(",", ":")).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    path.write_bytes(b'{"sha256": "' + digest + b'", "manifest": ' + body + b"}\n")


UNUSABLE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "step_text": (lambda o: o["progress"]["value"].update(step="15"), "progress: "),
    "step_negative": (lambda o: o["progress"]["value"].update(step=-5), "progress: "),
    "step_fraction": (lambda o: o["progress"]["value"].update(step=2.5), "progress: "),
    "step_of_another": (
        lambda o: o["progress"]["value"].update(step=10**9),
        "progress.step 1000000000 ",
    ),
    "tokens_null": (lambda o: o["progress"]["value"].update(tokens=None), "progress: "),
    "seconds_gone": (lambda o: o["progress"]["value"].pop("seconds"), "progress: "),
    "cursor_off_by_one": (lambda o: o["loader"]["value"].update(cursor=17), "cursor 17 "),
    "cursor_2_to_80": (lambda o: o["loader"]["value"].update(cursor=2**80), "Loader.state_dict"),
    "optimizer_step_a_list": (
        lambda o: next(v for k, v in o.items() if k.startswith("optimizer.")).update(value=[1]),
        ".step [1] ",
    ),
    "fingerprint_gone": (lambda o: o["loader"]["value"].pop("fingerprint"), "Loader.state_dict"),
}


@pytest.mark.lane("quick")
@pytest.mark.parametrize("name", UNUSABLE)
def test_F97_F102_a_checkpoint_that_no_run_saved_falls_back(folder: Path, name: str) -> None:
    change, says = UNUSABLE[name]
    reseal(folder, change)
    assert run(folder, 4) == 4
    events = read_run(folder / "run").events
    (aside,) = [event for event in events if event["event"] == "quarantine"]
    assert says in aside["reason"]
    assert aside["step"] == 4
    assert [event["step"] for event in events if event["event"] == "resume"] == [2]


def test_F103_checkpoints_is_a_file(folder: Path) -> None:
    shutil.rmtree(folder / "run/checkpoints")
    (folder / "run/checkpoints").write_text("in the way")
    code, error = refused(folder)
    assert code == CONFIG
    path = str(folder / "run/checkpoints")
    assert_problem(error, "path", path, "file")
    with rejects("path", path, "file", JobError):
        load_trained(folder / "run")


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_F103_the_lock_is_no_file_of_ours(folder: Path, kind: str) -> None:
    lock = folder / "run/checkpoints/lock"
    lock.unlink()
    {"directory": os.mkdir, "fifo": os.mkfifo, "link": lambda p: os.symlink("/dev/null", p)}[kind](
        lock
    )
    code, error = refused(folder)
    assert code == CONFIG
    assert_problem(error, "path", str(lock.parent), "not_writable")
    assert str(lock) in str(error)


def deny(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, part: str) -> None:
    """`owner.name` refuses paths that hold `part`, as another user's would (root may do all)."""
    real = getattr(owner, name)

    def denied(path: Any, *args: Any, **kwargs: Any) -> Any:
        if part in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(owner, name, denied)


def test_F103_checkpoints_that_cannot_be_written_are_found_before_a_step_is_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deny(monkeypatch, os, "mkdir", "checkpoints/step-")
    deny(monkeypatch, Path, "mkdir", "checkpoints/step-")
    monkeypatch.setattr(Trainer, "train_step", lambda self: pytest.fail("a step was trained"))
    code, error = refused(folder)
    assert code == CONFIG
    assert_problem(error, "path", str(folder / "run/checkpoints"), "not_writable")
    assert "(Permission denied" in str(error)


def test_F103_checkpoints_that_cannot_be_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deny(monkeypatch, os, "listdir", "checkpoints")
    code, error = refused(folder)
    assert code == CONFIG
    assert "Permission denied" in str(error)


def test_F103_the_newest_step_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deny(monkeypatch, os, "open", "data-0.bin")
    code, error = refused(folder)
    assert code == CORRUPT
    assert "step 4 " in str(error)
    assert ": Permission denied; " in str(error)
    assert not (folder / "run/checkpoints/quarantine").exists()


@pytest.mark.lane("quick")
@pytest.mark.parametrize("kind", ["file", "link"])
def test_F103_a_quarantine_that_is_no_directory_takes_nothing(folder: Path, kind: str) -> None:
    place, elsewhere = folder / "run/checkpoints/quarantine", folder / "elsewhere"
    elsewhere.mkdir()
    if kind == "file":
        place.write_text("in the way")
    else:
        place.symlink_to(elsewhere)
    flip_bit(folder / "run/checkpoints/step-00000004/data-0.bin")
    code, error = refused(folder)
    assert code == CORRUPT
    assert "step 4 " in str(error)
    assert f"({place})" in str(error)
    assert list(elsewhere.iterdir()) == []
    assert (folder / "run/checkpoints/step-00000004").is_dir()


class At(Callback):
    """Does something after a step."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.step:
            self.action()


def last_event(folder: Path) -> dict[str, Any]:
    return read_run(folder / "run").events[-1]


@pytest.mark.lane("quick")
def test_F103_checkpoints_moved_while_the_run_writes(folder: Path) -> None:
    here, there = folder / "run/checkpoints", folder / "moved"
    code, error = refused(folder, 6, At(5, lambda: here.rename(there)))
    assert code == ERROR
    assert f"({here})" in str(error)
    assert not here.exists(), "a new one beside the old would hide it"
    assert last_event(folder)["event"] == "save_failed"
    there.rename(here)
    assert run(folder, 6) == 6


@pytest.mark.lane("quick")
def test_F103_checkpoints_removed_and_made_again_from_outside(folder: Path) -> None:
    here = folder / "run/checkpoints"

    def replace() -> None:
        shutil.rmtree(here)
        here.mkdir()
        (here / "lock").touch()

    code, error = refused(folder, 6, At(5, replace))
    assert code == ERROR
    assert f"({here})" in str(error)


@pytest.mark.lane("quick")
def test_F103_a_disk_that_does_not_hold_what_was_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = directories.committed_steps

    def damaged(root: Path) -> list[int]:
        for file in root.glob("step-00000008/data-0.bin"):
            flip_bit(file)
        return real(root)

    monkeypatch.setattr(forge_ckpt.store.directories, "committed_steps", damaged)
    code, error = refused(folder, 8)  # the fourth checkpoint: one more than are kept
    assert code == ERROR, "F189: only CORRUPT means that none is sound"
    assert_problem(error, "step", 8, "new")
    assert_problem(error, "block", 0, "digest")
    assert last_event(folder)["event"] == "save_failed"


@pytest.mark.lane("quick")
def test_F188_a_run_whose_checkpoints_are_gone_does_not_start_over(folder: Path) -> None:
    files = [folder / "run/metrics.jsonl", folder / "run/events.jsonl"]
    before = [file.read_bytes() for file in files]
    shutil.rmtree(folder / "run/checkpoints")
    code, error = refused(folder)
    assert code == CORRUPT
    assert_problem(error, "", str(folder / "run/checkpoints"), "lost")
    assert "step 4" in str(error)
    assert [file.read_bytes() for file in files] == before
    files[1].unlink()  # as the message says
    assert run(folder, 2) == 2


def test_F103_a_callback_that_cannot_be_saved(folder: Path) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"at": time.localtime()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    shutil.rmtree(folder / "run")
    code, error = refused(folder, 2, Odd())
    assert code == CONFIG, "nothing is trained"
    (problem,) = error.problems
    assert (problem.code, problem.value) == ("type", "time.struct_time")
