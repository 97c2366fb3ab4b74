"""One run directory that faults strike: its lives, and what must hold after each fault."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forge_resilience.chaos import FIRST, PROCESS_KINDS, Fault, Injection, Injector, damage
from forge_resilience.heartbeat import FOLDER, read_heartbeats

from . import plants
from .invariants import Reference, committed, events, step_of, unexplained_traceback
from .lives import ForkedLife, in_child
from .srun import SrunLife
from .suites import BETWEEN, DAMAGE, DISK, EVERY, JOB, STEPS, Suite, allowed_codes

_LIMIT = 60.0


class Failed(Exception):
    """An invariant does not hold."""


class Job:
    """One run directory, its lives, and what struck it."""

    def __init__(self, suite: Suite, folder: Path, reference: Reference) -> None:
        self.suite, self.folder, self.reference = suite, folder, reference
        self.run, self.log = folder / "run", folder / "log"
        folder.mkdir(parents=True)
        self.toml = folder / "job.toml"
        self.toml.write_text(JOB.format(run_dir=self.run, steps=STEPS, every=EVERY))
        self.striker = Injector(folder / "beats", start_seconds=suite.start_seconds)
        self.life: ForkedLife | SrunLife | None = None
        self.struck: list[tuple[dict[str, Any], int, float]] = []  # not yet recovered from
        self.rows: list[dict[str, Any]] = []
        self.damaged: set[str] = set()
        self.log_from = 0
        self.worlds, self.nproc = 0, 0
        self.done = False
        self.graceful = False  # how the life before ended

    # ---- lives

    def start(
        self, plant: Callable[[int], None] | None = None, flags: Sequence[str] = ()
    ) -> ForkedLife | SrunLife:
        if self.life is not None:
            return self.life
        if plant is None:
            plant = (
                plants.poison
                if "--resilience.nonfinite.action" in self.suite.numbers
                else plants.slow_data
            )
        shutil.rmtree(self.striker.folder, ignore_errors=True)
        self.striker.folder.mkdir()
        self.log_from = self.log.stat().st_size if self.log.exists() else 0
        self.nproc = nproc = self.suite.nproc[self.worlds % len(self.suite.nproc)]
        layout = self.suite.layouts[self.worlds % len(self.suite.layouts)]
        self.worlds += 1
        command = ["run", self.toml, *self.suite.flags, *self.suite.numbers, *layout, *flags]
        if self.suite.launcher == "forge":
            command += ["--nproc", str(nproc)]
        environ = {FOLDER: str(self.striker.folder)}
        if self.suite.launcher == "srun":
            self.life = SrunLife(command, environ, self.log, nproc)
            return self.life
        self.life = ForkedLife(
            command, environ, self.folder, self.log, plant, self.suite.launcher, nproc
        )
        return self.life

    def end(self, limit: float = 0.0) -> int:
        """Wait for the life; its code. All of the life's processes are gone, and its output is explained."""
        limit = limit or self.suite.limit
        life, deadline = self.life, time.monotonic() + limit
        assert life is not None
        while life.poll() is None:
            if time.monotonic() > deadline:
                raise Failed(f"still ran after {limit:g} s")
            time.sleep(0.002)  # polling a process
        gone = time.monotonic() + 20.0
        while life.living():
            if time.monotonic() > gone:
                raise Failed(f"left {len(life.living())} processes behind")
            time.sleep(0.005)  # polling processes
        self.life = None
        if unexplained_traceback(self.output()):
            raise Failed("a traceback without a cause")
        code = life.poll()
        assert code is not None
        return code

    def output(self) -> str:
        """Of the newest life."""
        text = self.log.read_bytes()[self.log_from :] if self.log.exists() else b""
        return text.decode(errors="replace")

    def abandon(self) -> None:
        """Kill what there is."""
        if self.life is not None:
            for pid in [self.life.pid, *self.life.living()]:
                with_no_process(pid)
            deadline = time.monotonic() + 10
            while (self.life.poll() is None or self.life.living()) and time.monotonic() < deadline:
                time.sleep(0.01)
            self.life = None

    # ---- progress

    def newest_step(self) -> int:
        return max((beat.step or 0 for beat in read_heartbeats(self.striker.folder)), default=0)

    def recover(self) -> bool:
        """Run on until the steps that faults struck are passed; False if the run is complete."""
        goal = max((step for _, step, _ in self.struck), default=-1)
        life, deadline = self.start(), time.monotonic() + self.suite.limit
        while life.poll() is None and self.newest_step() <= goal + 1:  # one may be ahead of another
            if time.monotonic() > deadline:
                raise Failed(f"stayed at step {goal} for {self.suite.limit:g} s")
            time.sleep(0.002)  # polling memory
        if life.poll() is not None:
            self.complete()
            return False
        self.recovered()
        return True

    def recovered(self) -> None:
        for row, _, at in self.struck:
            row["recovery_seconds"] = round(time.monotonic() - at, 3)
        self.struck.clear()

    def complete(self) -> None:
        """The life ended by itself: the run is done, and is the undisturbed one."""
        code = self.end()
        if code != 0:
            raise Failed(f"ended with {code} undisturbed: {self.output()[-400:]}")
        self.recovered()
        self.done = True
        self.compare()

    def compare(self) -> None:
        if len(self.suite.nproc) == 1:
            problem = self.reference.problem_of_newest(self.run, set())
            problem = problem or self.reference.problem_of_rows(self.run)
        else:
            problem = in_child(close_enough, str(self.run), str(self.reference.run))
        if not problem and step_of(committed(self.run)[-1]) != STEPS:
            problem = "done, last checkpoint missing"
        if problem:
            raise Failed(problem)

    # ---- faults

    def strike(self, fault: Fault) -> dict[str, Any] | None:
        """The row of a fault that struck; None if it missed."""
        how = {"points": self.point, "files": self.file, "disk": self.disk, "odd": self.odd}
        return how.get(self.suite.name, self.process)(fault)

    def process(self, fault: Fault) -> dict[str, Any] | None:
        if fault.phase in FIRST:
            if self.life is not None or len(self.struck) > 2:
                if self.life is None and not self.recover():
                    return None
                self.kill()
            if fault.phase == "load" and not self.has_checkpoint(1):
                return None
        elif fault.phase != "exit" and not self.recover():
            return None
        life, kind = self.start(), PROCESS_KINDS[fault.kind]
        struck = self.striker.inject(life, fault, kind, self.suite.limit)
        if struck is None:
            if life.poll() is not None:
                self.complete()
            return None
        row = self.row(fault, struck)
        if not kind.ends or self.suite.name == "supervised":  # its ranks are started again in place
            return row
        code = row["code"] = self.end(_LIMIT)
        allowed = allowed_codes(fault.kind, fault.phase, self.suite.launcher, self.nproc)
        if code not in allowed:
            raise Failed(f"ended with {code}, not {sorted(allowed)}: {self.output()[-600:]}")
        self.after(code, row)
        return row

    def point(self, fault: Fault) -> dict[str, Any] | None:
        """A rank kills itself inside a save or a load."""
        loads, removes = fault.phase == "load", "remov" in fault.kind or "reading" in fault.kind
        if (loads and not self.has_checkpoint(1)) or (removes and not self.has_checkpoint(4)):
            return None
        if len(self.struck) > 2 and not self.recover():
            return None
        self.kill()
        marker = self.folder / "marker"
        marker.unlink(missing_ok=True)
        wait = ("false", "true")[fault.seed % 2]
        plant = plants.dies_at(fault.kind, fault.rank, marker)
        self.start(plant, ("--checkpoint.wait", wait))
        code = self.end()
        if not marker.exists():
            self.done = code == 0
            return None
        rank = int(marker.read_text().split()[0])
        row = self.row(fault, Injection(fault.phase, self.newest_step(), rank, 0, time.monotonic()))
        row["code"] = code
        if code != 1:
            raise Failed(f"ended with {code}, not 1")
        self.after(code, row)
        return row

    def file(self, fault: Fault) -> dict[str, Any] | None:
        """Damage to the newest checkpoint between two lives: the one before it is loaded."""
        if not self.has_checkpoint(2) or not self.recover():
            return None
        self.kill()
        paths = committed(self.run)
        newest = paths[-1]
        manifest = "manifest" in fault.kind or fault.kind not in {k for k in DAMAGE if "data" in k}
        names = ["manifest.json"] if manifest else sorted(p.name for p in newest.glob("data-*"))
        path = newest / random.Random(fault.seed).choice(names)
        damage(DAMAGE[fault.kind], path, fault.seed)
        harmless = fault.kind in ("clock", "stale_folders", "dangling_latest")
        if not harmless:
            self.damaged.add(newest.name)
        expected = step_of(newest if harmless else paths[-2])
        row = self.row(fault, Injection(BETWEEN, step_of(newest), 0, 0, time.monotonic()))
        before = len(events(self.run))
        if not self.recover() and not self.done:
            return row
        self.damaged.discard(newest.name)  # set aside, or written anew
        resumed = [e for e in events(self.run)[before:] if e["event"] == "resume"]
        if not resumed or resumed[0]["step"] != expected:
            raise Failed(f"resumed {[e.get('step') for e in resumed]}, not {expected}")
        self.check(row)
        return row

    def disk(self, fault: Fault) -> dict[str, Any] | None:
        """The file system fails one save of a life; the run goes on and saves again."""
        if not self.has_checkpoint(4):
            return None
        if self.life is not None or self.struck:
            if not self.recover():
                return None
            self.kill()
        step = step_of(committed(self.run)[-1]) + EVERY
        if step >= STEPS:
            self.recover()
            self.finish()
            return None
        text = DISK[fault.kind].format(step=f"step-{step:08d}", old=committed(self.run)[0].name)
        victim, marker = fault.rank, self.folder / "marker"
        marker.unlink(missing_ok=True)

        def plant(rank: int) -> None:
            plants.slow_data(rank)
            if (
                rank == victim
                or "manifest" in text
                or not text.startswith(("pwrite", "fsync", "close"))
            ):
                os.environ.update(FORGE_FAULT=text, FORGE_FAULT_MARK=str(marker))

        self.start(plant)
        at, deadline = time.monotonic(), time.monotonic() + _LIMIT
        life = self.life
        assert life is not None
        while (
            life.poll() is None and self.newest_step() <= step + 2 and time.monotonic() < deadline
        ):
            time.sleep(0.005)  # polling memory
        ended = life.poll() is not None
        row = self.row(fault, Injection("save", step, victim, 0, at))
        if ended:
            row["code"] = self.end()
            if row["code"] not in (0, 1, 66):
                raise Failed(f"ended with {row['code']}: {self.output()[-400:]}")
            self.done = row["code"] == 0
        else:
            self.kill()
        if not marker.exists():  # the call was not made: nothing struck
            self.forget()
            return None
        self.check(row)
        return row

    def odd(self, fault: Fault) -> dict[str, Any] | None:
        if len(self.struck) > 2 and not self.recover():
            return None
        if fault.kind == "second job":
            return self.second_job(fault)
        self.kill()
        marker, rank = self.folder / "marker", fault.rank
        marker.unlink(missing_ok=True)
        plant = {
            "exit 0 in a rank": plants.exits(rank, 1 + fault.entry, marker),
            "file size limit": plants.limited(fault.seed % 4000, rank, marker),
            "stdout closed": plants.output(None),
            "stdout full": plants.output("/dev/full"),
        }[fault.kind]
        life = self.start(plant)
        row = self.row(fault, Injection(fault.phase, self.newest_step(), rank, 0, time.monotonic()))
        if fault.kind.startswith("stdout"):
            first, deadline = None, time.monotonic() + _LIMIT
            while life.poll() is None and time.monotonic() < deadline:
                first = self.newest_step() if first is None else first
                if self.newest_step() > first + EVERY:
                    break
                time.sleep(0.005)  # polling memory
            if life.poll() is not None:
                self.complete()
            else:
                self.kill()
            self.check(row)
            return row
        row["code"] = self.end()
        if not marker.exists():
            self.forget()
            self.done = row["code"] == 0
            return None
        if row["code"] != 1:
            raise Failed(f"ended with {row['code']}, not 1: {self.output()[-600:]}")
        self.after(row["code"], row)
        return row

    def second_job(self, fault: Fault) -> dict[str, Any] | None:
        """Another job on the same directory is refused, and harms nothing."""
        if not self.recover():
            return None
        row = self.row(fault, Injection("step", self.newest_step(), 0, 0, time.monotonic()))
        log = self.folder / "second.log"
        log.unlink(missing_ok=True)
        environ = {FOLDER: str(self.folder / "beats-2")}
        second = ForkedLife(["run", self.toml], environ, self.folder / "second", log)
        deadline = time.monotonic() + _LIMIT
        while second.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)  # polling a process
        alive = self.life is not None and self.life.poll() is None
        row["code"] = second.poll()
        if second.poll() != 78 and alive:
            raise Failed(f"a second job ended with {second.poll()}, not 78")
        row["recovery_seconds"] = 0.0  # the first one was not disturbed
        return row if alive else None

    # ---- around a fault

    def row(self, fault: Fault, struck: Injection) -> dict[str, Any]:
        row = {
            "suite": self.suite.name, "number": fault.number, "kind": fault.kind, "phase": struck.phase,
            "rank": struck.rank, "step": struck.step, "seed": fault.seed, "misses": struck.misses, "code": None,
            "steps_lost": None, "recovery_seconds": None, "problem": "",
        }  # fmt: skip
        self.struck.append((row, struck.step or 0, struck.time))
        self.rows.append(row)
        return row

    def forget(self) -> None:
        """The newest fault did not strike."""
        self.struck.pop()
        self.rows.pop()

    def after(self, code: int, row: dict[str, Any]) -> None:
        """A life has ended by a fault: what is on disk is sound, and not too old."""
        self.check(row)
        reached = max((row["step"] or 0), self.newest_step())
        saved = max((step_of(p) for p in committed(self.run)), default=0)
        row["steps_lost"] = max(0, reached - saved)
        if code == 0 and self.suite.launcher != "torchrun":
            self.done = True
            self.recovered()
            self.compare()
        if code == 75:
            stops = [e for e in events(self.run) if e["event"] in ("stop", "start", "resume")]
            if stops and stops[-1]["event"] == "stop" and stops[-1]["step"] != saved:
                raise Failed(f"stopped at step {stops[-1]['step']} and saved {saved}")
        # one save may be on its way; of a disk that refuses them three in a row are tried
        most = (3 if row["kind"] == "file size limit" else 0) + 2
        if code != 75 and saved and row["steps_lost"] > most * EVERY + 1:
            raise Failed(f"lost {row['steps_lost']} steps")

    def check(self, row: dict[str, Any]) -> None:
        if len(self.suite.nproc) == 1:
            problem = self.reference.problem_of_newest(self.run, self.damaged)
            if problem:
                raise Failed(problem)

    def has_checkpoint(self, count: int) -> bool:
        """Run on until there are so many committed ones; False if the run is complete instead."""
        deadline = time.monotonic() + self.suite.limit
        while len(committed(self.run)) < count:
            life = self.start()
            if life.poll() is not None:
                self.complete()
                return False
            if time.monotonic() > deadline:
                raise Failed(f"no {count} checkpoints in {self.suite.limit:g} s")
            time.sleep(0.01)  # polling a folder
        return True

    def kill(self) -> None:
        """End the life without counting it."""
        if self.life is None:
            return
        for pid in self.life.ranks().values():
            with_no_process(pid)
        code = self.end()
        self.done = self.done or code == 0

    def finish(self) -> None:
        if not self.done:
            self.start()
            self.complete()


def with_no_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def close_enough(run: str, reference: str) -> str:
    """After a change of world size: weights to 1e-5, instances and steps exactly."""
    from forge_train import load_trained

    weights, truth = (load_trained(path)[0].state_dict() for path in (run, reference))
    for name, value in truth.items():
        error = float((weights[name] - value).abs().max())
        if error > 1e-5 * float(value.abs().max()):
            return f"{name} is off by {error:.1e}"
    mine, theirs = (
        [
            (json.loads(line)["step"], json.loads(line)["instances"])
            for line in (Path(p) / "metrics.jsonl").read_text().splitlines()
        ]
        for p in (run, reference)
    )
    return "" if mine == theirs else "steps or instances differ"
