"""Faults of a run at five places, and the exit code of each: the rows and columns of docs/exit-codes.md.

`life` runs in a child of a warm process: a job of six steps that saves every second one.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from forge_testing.faults import truncate
from forge_testing.jobs import write_job

PLACES = ("start", "step", "save", "last save", "report")
KILLED = -signal.SIGKILL


class World:
    """What a fault may touch. `trainer` is None before one is built."""

    trainer: Any = None
    checkpoints: Any = None
    is_down = False  # the service of Tracker

    def __init__(self, folder: Path, place: str) -> None:
        self.folder, self.place, self.run = folder, place, folder / "run"
        self.held: Any = None


class Fault(NamedTuple):
    """`act(world)` does harm, and returns what ends it, if it ends with the write that it met.

    codes: the exit code at each place; a text where the fault makes no sense says why. problem: key and code of the first
    problem, where a run is rejected. inside: within the write of a checkpoint, not before it. toml: of the job.
    again: the code of the same command afterwards, without the fault. trained: a run with a checkpoint is there before.
    """

    name: str
    act: Callable[[World], Callable[[], object] | None]
    codes: tuple[int | str, ...]
    problem: tuple[str, str] | None = None
    inside: bool = False
    toml: str = ""
    again: int = 0
    trained: bool = False
    traceback: bool = False
    opened: bool = False  # "start" is behind the opening of the run's files


class Tracker:
    """A sink that asks a service for each row."""

    def __init__(self, directory: Path, resume_step: int) -> None:
        self._ask()

    def write(self, row: Any) -> None:
        self._ask()

    def close(self) -> None:
        self._ask()

    @staticmethod
    def _ask() -> None:
        if World.is_down:
            socket.create_connection(("127.0.0.1", 1), 1.0).close()  # nobody listens there


def _full_stdout(world: World) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def _full_stderr(world: World) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)


def _closed_stdout(world: World) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def _full_records(world: World) -> None:
    """metrics.jsonl and events.jsonl on a disk without room."""
    full = os.open("/dev/full", os.O_WRONLY)
    for name in os.listdir("/proc/self/fd"):
        link = Path("/proc/self/fd") / name
        if link.is_symlink() and os.readlink(link).endswith("/metrics.jsonl"):
            os.dup2(full, int(name))
    events = world.run / "events.jsonl"
    events.rename(world.run / "kept.jsonl")
    events.symlink_to("/dev/full")


def _tracker_down(world: World) -> None:
    World.is_down = True


def _late(world: World) -> None:
    """A process that does not answer for a while."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(0.2)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def _no_room(world: World) -> Callable[[], object] | None:
    """Of files that grow; a save that is the last one finds none either when it is tried again."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    return (
        (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
        if world.place == "save"
        else None
    )


def _no_descriptors(world: World) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _raise(world: World) -> None:
    raise KeyError("of a user's code")


def _data_lost(world: World) -> None:
    shutil.rmtree(world.folder / "tokens")


def _data_damaged(world: World) -> None:
    """Another byte in the tokens; what is open is opened again, as after a start on another node."""
    from forge_data import TokenFiles

    path = world.folder / "tokens/tokens.bin"
    path.write_bytes(path.read_bytes().replace(b"w", b"v", 1))
    if world.trainer is not None:
        world.trainer.loader.stream.source = TokenFiles(path.parent)


def _checkpoints_damaged(world: World) -> None:
    if world.place == "step":
        world.checkpoints.settle()  # else the save in flight is whole afterwards
    for number, path in enumerate(sorted(world.run.glob("checkpoints/step-????????/*.bin"))):
        truncate(path, number)
    if world.place == "step":
        _nan(world)


def _nan(world: World) -> None:
    import torch

    def fill(model: Any, _: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))

    # in the next forward: a writer thread that filled them might do so just before the next save
    world.trainer.model.register_forward_pre_hook(fill)


def _broken_device(world: World) -> None:
    from forge_resilience.health import BROKEN, Finding, check

    check.known_answer = lambda device, seed: Finding("computing", BROKEN, "cpu", "made up")


def _wrong_value(world: World) -> None:
    job = world.folder / "job.toml"
    job.write_text(job.read_text().replace("lr = 1e-2", "lr = -1"))


def _in_use(world: World) -> None:
    from forge_ckpt import Store

    world.held = Store(world.run / "checkpoints")


def send(number: int) -> Callable[[World], None]:
    return lambda world: os.kill(os.getpid(), number)


def lives(world: World) -> None:
    """Ranks that die at a place in every life, under the supervisor."""
    from forge_resilience.supervise import WatchConfig, supervise

    phase = {"start": "start", "report": "exit"}.get(world.place, world.place.split()[-1])
    program = (
        "import os; from forge_resilience.heartbeat import Heartbeat as H; "
        f"H.from_environ().enter({phase!r}, 3); os._exit(1)"
    )
    sys.exit(
        supervise(
            [sys.executable, "-c", program],
            1,
            config=WatchConfig("restart"),
            expects_heartbeats=True,
        ).code
    )


ONCE = "what a run reads there is read once, at its start"
FAULTS = (
    Fault("stdout on a full disk", _full_stdout, (0,) * 5),  # prose: a row of the page
    Fault("stderr on a full disk", _full_stderr, (0,) * 5),  # prose: a row of the page
    Fault("stdout whose reader is gone", _closed_stdout, (0,) * 5),
    Fault("metrics.jsonl and events.jsonl on a full disk", _full_records, (0,) * 5, opened=True),
    Fault(
        "a tracker that is down", _tracker_down, (0,) * 5,
        toml=f'[metrics.sinks.mine]\nname = "{__name__}:Tracker"\n',
    ),
    Fault("a process that stands still for a while", _late, (0,) * 5, inside=True),
    Fault(
        "no room for a checkpoint", _no_room,
        (1, "a step writes no file but rows", 0, 1, 0), inside=True,
    ),
    Fault("an exception in a callback", _raise, (1, 1, 1, 1, 1), traceback=True, opened=True),
    Fault(
        "no descriptors left", _no_descriptors, (1, 1, 1, 1, 0), ("RLIMIT_NOFILE", "limit"),
    ),
    Fault("data that is gone", _data_lost, (65, 0, 0, 0, 0), ("data.sources.a.path", "not_found"), again=65),
    Fault("data that is damaged", _data_damaged, (65, 65, 65, 0, 0), again=65),
    Fault(
        "checkpoints that are damaged", _checkpoints_damaged,
        (66, 66, "a load finds them, and a save loads none", 0, 0), again=66, trained=True,
        toml='[resilience.nonfinite]\naction = "rollback"\nmax_in_a_row = 0\n',
    ),
    Fault("ranks that die in every life", lives, (70, 70, 70, 70, 70)),
    Fault(
        "a device that computes wrong", _broken_device, (71, 71, 71, 0, 0),
        toml="[health]\nevery_steps = 1\n",
    ),
    Fault("SIGTERM", send(signal.SIGTERM), (75, 75, 75, 0, 0), inside=True),
    Fault("SIGINT", send(signal.SIGINT), (75, 75, 75, 0, 0), inside=True),
    Fault("SIGUSR1", send(signal.SIGUSR1), (75, 75, 75, 0, 0), inside=True),
    Fault("weights that are not finite", _nan, (76, 76, 76, 0, 0), inside=True, opened=True),  # prose: a row of the page
    Fault("a wrong value in the configuration", _wrong_value, (78, 0, 0, 0, 0), ("optimizer.lr", "range"), again=78),
    Fault("a run directory in use", _in_use, (78, ONCE, ONCE, ONCE, ONCE), ("run.dir", "in_use")),
    Fault("SIGKILL", send(signal.SIGKILL), (KILLED,) * 5, inside=True),
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}
CELLS = [
    (fault.name, place, code)
    for fault in FAULTS
    for place, code in zip(PLACES, fault.codes, strict=True)
    if isinstance(code, int)
]


def prepare(folder: str) -> None:
    """What every life begins with: the tokens of a job, and, in `trained`, a run of two steps of it."""
    from forge_data.prepare import prepare as tokenize

    root = Path(folder)
    (root / "text.txt").write_text("".join(f"some words {i}\n" for i in range(400)))
    tokenize([root / "text.txt"], root / "tokens", document="line")
    changes = {
        '[data.sources.text]\nname = "builtin"': '[data.sources.a]\nname = "tokens"\npath = "tokens"',
        str(root / "run"): "run", "steps = 12": "steps = 6", "max_new_tokens = 8": "max_new_tokens = 4",
        "[eval]\nevery_steps = 6": "[eval]\nevery_steps = 0", "every_steps = 3": "every_steps = 2",
    }  # fmt: skip
    job = write_job(root)
    text = job.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    job.write_text(text)


def warm_up() -> None:
    """What a first run reads, once for all."""
    from forge_train import load_job

    with tempfile.TemporaryDirectory() as folder:
        load_job(write_job(Path(folder)))


def life(name: str, place: str, folder: str) -> None:
    """`forge-train run` in `folder` with a fault at a place; key and code of its problems are left in `.problems`."""
    from forge_train import cli
    from forge_train._shared.limits import limit_problem

    fault, world = BY_NAME[name], World(Path(folder), place)
    with (world.folder / "job.toml").open("a") as job:
        job.write(fault.toml)
    if fault.act is lives:
        lives(world)
    run_verb, problems = cli.run_verb, []
    files, size = (resource.getrlimit(x) for x in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE))

    def run(args: list[str]) -> int:
        if place == "start" and not fault.opened:
            fault.act(world)
        try:
            return run_verb(args)
        except Exception as error:
            limit = limit_problem(error)
            found = getattr(error, "problems", ()) if limit is None else (limit,)
            problems.extend((problem.key, problem.code) for problem in found)
            raise

    cli.run_verb = run
    _plant(fault, world)
    try:
        cli.main(["run", "job.toml"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        resource.setrlimit(resource.RLIMIT_FSIZE, size)
        (world.folder / ".problems").write_text(json.dumps(problems))


def elsewhere(program: str, args: list[str], full: list[int], limits: dict[str, int]) -> None:
    """A command of `program`, `module:function`, with descriptors on a full disk, or under limits of the process."""
    module, _, name = program.partition(":")
    main = getattr(importlib.import_module(module), name)
    for descriptor in full:
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
    kept = {}
    for limit, value in limits.items():
        kind = getattr(resource, limit)
        kept[kind] = resource.getrlimit(kind)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        used = pages * resource.getpagesize() if limit == "RLIMIT_AS" else 0
        resource.setrlimit(kind, (used + value, kept[kind][1]))
    try:
        sys.exit(main(args))
    finally:
        for kind, before in kept.items():
            resource.setrlimit(kind, before)


def _plant(fault: Fault, world: World) -> None:
    """Call the fault where a run comes to the place."""
    import forge_ckpt.write.blocks as blocks
    from forge_train.extensions.built_in import Health
    from forge_train.loop.trainer import Trainer
    from forge_train.report import summary
    from forge_train.run.checkpoints import Checkpoints
    from forge_train.run.extension import Extensions

    done = False
    place = world.place
    step = {"save": 2, "last save": 6}.get(place, -1)

    def act() -> Callable[[], object] | None:
        nonlocal done
        if done:
            return None
        done = True
        return fault.act(world)

    def before(owner: Any, name: str, when: Callable[..., bool]) -> None:
        function = getattr(owner, name)

        def planted(*args: Any, **named: Any) -> Any:
            end = act() if when(*args) else None
            try:
                return function(*args, **named)
            finally:
                if end is not None:
                    end()

        setattr(owner, name, planted)

    def built(trainer: Trainer, *_: Any) -> bool:
        world.trainer = trainer
        return place == "start" and fault.opened

    def saves(descriptor: int) -> bool:
        return f"step-{step:08d}" in os.readlink(f"/proc/self/fd/{descriptor}")

    before(Trainer, "fit", lambda trainer, *_: bool(built(trainer)) and False)
    before(Checkpoints, "load", lambda own, *_: bool(setattr(world, "checkpoints", own)))
    before(Health, "start", lambda *_: place == "start" and fault.opened)
    if fault.inside:
        before(blocks, "write_at", lambda descriptor, *_: saves(descriptor))
    else:
        before(Checkpoints, "save", lambda _, number, *__: number == step)
    before(
        Extensions,
        "call",
        lambda _, hook, *args: (
            (place == "step" and (hook, *args) == ("after_step", 3))
            or (place == "report" and hook == "finish" and fault.traceback)
        ),
    )
    before(summary, "print_summary", lambda *_: place == "report")
