"""What the campaign strikes: suites of kinds and phases, each with the flags of its runs."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from forge_resilience.chaos import ASYNC_SAVE, BETWEEN, FILE_KINDS, PROCESS_KINDS

STEPS, EVERY = 48, 4
JOB = """
run.dir = "{run_dir}"
model = {{dim = 16, num_layers = 1, num_heads = 2}}
data = {{seq_len = 32, sources.text.name = "builtin"}}
train = {{steps = {steps}, global_batch = 12}}
optimizer = {{lr = 1e-2, eps = 1e-4}}
parallel = {{device = "cpu", precision = "fp32"}}
eval = {{every_steps = 6, sequences = 4}}
checkpoint = {{every_steps = {every}, keep_last = 4}}
metrics = {{every_steps = 1, console = "off"}}
sample.max_new_tokens = 0
"""

_PHASES = ("start", "load", "data", "step", "evaluate")
_STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_CRASHES = ("kill_rank", "kill_all", "kill_launcher", "segfault", "abort", "pause", "slow")
_REQUESTS = ("term", "term_rank", "usr1", "usr1_rank", "int", "hup", "term_then_kill", "storm")
#: Points inside a save or a load at which a rank kills itself: of the fault matrix of forge-ckpt.
POINTS = (
    "after the plan", "while writing", "after the fsync of its file", "before the manifest", "before the rename",
    "after the rename", "after the commit", "while reading back", "before the removal", "while removing",
    "while loading", "while filling",
)  # fmt: skip
#: Files of a checkpoint that a kind of damage is for.
DAMAGE = {
    **{f"{kind} of data": kind for kind in FILE_KINDS if kind not in ("wrong_json", "clock", "stale_folders", "dangling_latest", "remove_folder")},
    **{f"{kind} of the manifest": kind for kind in ("flip_bit", "truncate", "remove", "swap", "wrong_json")},
    **{kind: kind for kind in ("clock", "stale_folders", "dangling_latest", "remove_folder")},
}  # fmt: skip
#: Errors of the file system, for one step's save: FORGE_FAULT of the shim.
DISK = {
    "mkdir ENOSPC": "mkdir {step}.tmp 28",
    "write ENOSPC": "pwrite {step}.tmp 28",
    "write EIO": "pwrite {step}.tmp 5",
    "write of the manifest ENOSPC": "pwrite manifest.json$ 28",
    "fsync EIO": "fsync {step}.tmp 5",
    "fsync of the manifest EIO": "fsync manifest.json$ 5",
    "close EIO": "close {step}.tmp 5",
    "rename EIO": "rename {step}.tmp 5",
    "read back EIO": "preadv {step}/data- 5",
    "removal EIO": "unlinkat {old} 5",
}


@dataclass(frozen=True)
class Suite:
    """kinds: kind -> phases. flags: of all lives. nproc: ranks of each life, in turn. numbers: flags that change
    what is computed. layouts: further flags of each life, in turn. start_seconds: of a life, about, in which the phase `start` is struck. limit: of a wait."""

    name: str
    kinds: dict[str, tuple[str, ...]]
    flags: tuple[str, ...] = ()
    nproc: tuple[int, ...] = (2,)
    launcher: str = "forge"
    numbers: tuple[str, ...] = ()
    layouts: tuple[tuple[str, ...], ...] = ((),)
    start_seconds: float = 0.5
    limit: float = 60.0


_TP, _CP, _PP = (("--parallel." + axis, "2") for axis in ("tp", "cp", "pp"))
_KILLS = {kind: ("load", "data", "step", "evaluate", "save") for kind in ("kill_rank", "kill_all")}
#: Two layers for two stages, in micro-batches of three rows.
_STAGES = ("--model.num_layers", "2", "--train.micro_batch", "3")
_EXPERTS = ("--model.moe.num_experts", "4", "--model.moe.bias_update_rate", "1e-3")


def _process(save: str) -> dict[str, tuple[str, ...]]:
    return {kind: (*_PHASES, save, "exit") for kind in (*_CRASHES, *_REQUESTS)}


SUITES = {
    suite.name: suite
    for suite in (
        Suite("wait", _process("save"), ("--checkpoint.wait", "true")),
        Suite("async", _process(ASYNC_SAVE), ("--checkpoint.wait", "false")),
        Suite("points", {kind: ("load" if kind in POINTS[-2:] else "save",) for kind in POINTS}),
        Suite("files", dict.fromkeys(DAMAGE, (BETWEEN,))),
        Suite("disk", dict.fromkeys(DISK, ("save",))),
        Suite("odd", {"exit 0 in a rank": ("step",), "file size limit": ("save",), "stdout closed": ("start",),
                      "stdout full": ("start",), "second job": ("step",)}),
        Suite("world", {"kill_all": ("step", "save"), "term": ("step", "save")}, nproc=(2, 3, 1, 4),
              numbers=("--optimizer.lr", "1e-3")),  # 40 steps multiply the rounding of another order
        Suite("tensor", _KILLS, numbers=_TP),
        Suite("context", _KILLS, numbers=_CP),
        Suite("pipeline", _KILLS, numbers=(*_PP, *_STAGES, *_EXPERTS, "--optimizer.name", "schedule_free_adamw",
                                           "--schedule.name", "constant")),
        Suite("experts", _KILLS, numbers=("--parallel.ep", "2", *_EXPERTS, "--model.moe.capacity_factor", "0.75")),
        Suite("layouts", _KILLS, nproc=(2, 4, 2, 4), numbers=("--optimizer.lr", "1e-3", *_STAGES),
              layouts=(_TP, _PP, _CP, (*_TP, "--parallel.dp_replicate", "2"))),
        Suite("numerics", {kind: ("data", "step", "save") for kind in ("kill_rank", "kill_all", "term", "segfault")},
              numbers=("--resilience.nonfinite.action", "rollback", "--resilience.nonfinite.max_in_a_row", "1")),
        Suite("supervised", {kind: ("data", "step", "evaluate", "save") for kind in ("freeze", "kill_rank", "segfault")},
              ("--resilience.watch.action", "restart", "--resilience.watch.step_seconds", "5",
               "--resilience.watch.first_step_seconds", "20", "--resilience.watch.other_seconds", "5",
               "--resilience.watch.start_seconds", "40", "--resilience.watch.max_restarts", "1000")),
        Suite("torchrun", {kind: ("step", "save") for kind in ("kill_rank", "kill_all", "term", "usr1_rank", "pause")},
              launcher="torchrun"),
        Suite("srun", {kind: ("start", "load", "step", "save") for kind in
                       ("kill_rank", "kill_all", "kill_launcher", "segfault", "pause", "term", "term_rank", "usr1", "usr1_rank")},
              launcher="srun", start_seconds=8.0, limit=240.0),
    )
}  # fmt: skip


def allowed_codes(kind: str, phase: str, launcher: str, nproc: int = 2) -> set[int]:
    """Exit codes of the launcher that are documented for a life struck so.

    A stop that comes when all work is done ends with 0; one that comes before there is a handler kills.
    """
    if launcher == "torchrun":  # its own codes: 1, or death by the signal
        return {0, 1, 75, *(-int(number) for number in (*_STOPS, signal.SIGKILL))}
    if launcher == "srun":
        return _codes_of_srun(kind, phase)
    if nproc == 1 and kind == "kill_all":  # a run without a launcher
        return {-signal.SIGKILL}
    if kind in ("kill_rank", "kill_all", "segfault", "abort"):
        return {1}
    if kind == "kill_launcher":
        return {-signal.SIGKILL}
    if kind == "term_then_kill":
        return {0, 1, 75}
    if kind == "storm" and phase == "start":
        return {1, 75, *(-int(number) for number in _STOPS)}
    if kind in _REQUESTS:
        early = {1} if phase == "start" and kind.endswith("_rank") else set()
        return {0, 75} | early
    return {1}


def _codes_of_srun(kind: str, phase: str) -> set[int]:
    """With kill-on-bad-exit: the code of the first rank that left, 1 of one that lost a peer; without any 128 and the
    highest signal, of which TERM is srun's own to the others."""
    killed = 128 + signal.SIGTERM
    if kind in ("kill_rank", "kill_all"):
        return {1, 128 + signal.SIGKILL, killed}
    if kind == "segfault":
        return {1, 128 + signal.SIGSEGV, killed}
    if kind == "kill_launcher":
        return {-signal.SIGKILL}
    early = {killed, 128 + signal.SIGUSR1} if phase == "start" else set()  # no handler yet
    # srun itself answers TERM by killing the ranks
    return {0, 75, *early} | ({killed, 128 + signal.SIGKILL} if kind == "term" else set())


__all__ = ["ASYNC_SAVE", "BETWEEN", "DAMAGE", "DISK", "EVERY", "JOB", "POINTS", "PROCESS_KINDS", "STEPS", "SUITES", "Suite", "allowed_codes"]  # fmt: skip
