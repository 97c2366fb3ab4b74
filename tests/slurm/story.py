"""The story of a job on a real Slurm: `hatch run slurm-story [--write]`.

A script that `forge-train slurm` generated is submitted once and disturbed in each way that a cluster knows, on
four, three and four nodes again; another job is orchestrated while nodes are drained and returned, and the node of the
orchestrator itself crashes. Both are compared with a run without a fault. Ends with 0 if all of it holds; prints
a JSON object, and with --write puts it into docs/data/slurm-story.json and writes docs/slurm-story.md.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.slurm.cluster import CPU_NODE, Slurm, running_cluster, wait_until

from forge_resilience import read_events
from forge_testing import forge_train, write_job
from forge_train import load_trained, read_run

ROOT = Path(__file__).parents[2]
STEPS = 130
_SECONDS = 180.0  # for what takes twenty, on a machine with other work

# AdamW's eps: with 1e-8 it makes a full step of the rounding noise in a gradient near zero. lr: with 1e-2, 110 steps
# multiply the rounding of another order of a sum to 1e-4 of a gradient norm; with 1e-3 it stays at 2e-7. The pause of
# a step leaves time to disturb it. retries: a controller sends what a dead node did not take again, each minute; the TERM
# for the step of the life that lost the node meets that of a later life, which has its id, and kills a rank that starts.
_EXTRA = """
[resilience]
save_limit_seconds = 20
[slurm]
nodes = "3-4"
cpus_per_task = 1
retries = 1
[slurm.orchestrator]
wait_seconds = 5
grow_after_seconds = 2
poll_seconds = 0.5
partition = "cpu"
[callbacks.pause]
name = "tests.slurm.pause:Pause"
"""


class Run:
    """A run in a folder, which is in the queue of a cluster or was trained beside it."""

    def __init__(self, slurm: Slurm, folder: Path, steps: int) -> None:
        folder.mkdir()
        self.slurm, self.folder, self.dir = slurm, folder, folder / "run"
        self.toml = write_job(folder, _EXTRA)
        text = self.toml.read_text().replace("global_batch = 4", "global_batch = 256")
        text = text.replace("steps = 12", f"steps = {steps}").replace(
            "lr = 1e-2", "lr = 1e-3\neps = 1e-4"
        )
        text = text.replace("every_steps = 3\n", "every_steps = 5\nkeep_last = 1000\n")
        self.toml.write_text(
            text.replace("every_steps = 6\nsequences", "every_steps = 0\nsequences")
        )
        self.job, self.restarts, self.retries = "", 0, 0
        self.lives: list[dict[str, Any]] = []

    def submit(self, *flags: str) -> None:
        done = forge_train("slurm", self.toml, *flags, "--submit", cwd=ROOT, **self.slurm.environ)
        assert done.code == 0, done.err
        self.job = done.out.strip().splitlines()[-1]

    def train_undisturbed(self, ranks: int) -> None:
        done = forge_train(
            "run",
            self.toml,
            "--nproc",
            str(ranks),
            "--callbacks.pause.every_steps",
            "1000000",
            cwd=ROOT,
        )
        assert done.code == 0, done.err

    def begun(self) -> list[dict[str, Any]]:
        """The event with which each life began."""
        # not read_run: the orchestrator writes events before there is a run
        events = read_events(self.dir / "events.jsonl")
        return [e for e in events if e["event"] in ("start", "resume")]

    def step(self) -> int:
        rows = (
            read_run(self.dir).metrics.get("step", [])
            if (self.dir / "metrics.jsonl").exists()
            else []
        )
        return rows[-1] if rows else 0

    def expect(self, kind: str, ranks: int, happens: Callable[[Run], None] | None = None) -> None:
        """Let something happen, and wait until a life after it, on so many ranks, has trained six steps."""
        began, before = time.monotonic(), len(self.begun())
        if happens is not None:
            happens(self)

        def trains() -> bool:
            assert self.slurm.run("squeue", "--noheader"), self.log()  # it ended instead
            found.extend(self.begun()[before + len(found) :])
            return bool(found) and self.step() >= found[-1]["step"] + 6

        found: list[dict[str, Any]] = []
        wait_until(trains, _SECONDS, every=0.3)
        seconds = round(time.monotonic() - began, 1)
        assert found[-1]["world_size"] == ranks, (found, self.log())
        self.lives.append(
            {"after": kind, "ranks": ranks, "from_step": found[-1]["step"], "seconds": seconds}
        )

    def nodes(self) -> list[str]:
        """Where it runs, the host of the batch script first."""
        job = self.slurm.job(self.job)
        names = self.slurm.run("scontrol", "show", "hostnames", job["NodeList"]).split()
        return sorted(names, key=lambda name: name != job["BatchHost"])

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.dir / "slurm").glob("job-*.out")))

    def log_of_first_preemption(self) -> list[str]:
        """Lines of the log from the submission to the third step of the second life, with folders of a user."""
        text = (
            self.log().replace(str(self.folder), "/scratch/me").replace(str(ROOT), "/home/me/forge")
        )
        lines = [line.rstrip() for line in text.splitlines()]
        resumed = next(
            number for number, line in enumerate(lines) if line.startswith("resume:")
        )  # prose: finds a line of the log
        return lines[: resumed + 4]


# ---- what happens to a job; each leaves it in the queue


def preempted(run: Run) -> None:
    high = run.slurm.preempt()
    run.slurm.wait_for(high, "RUNNING")
    run.slurm.cancel(high)


def told(run: Run) -> None:
    run.slurm.usr1(run.job)


def requeued(run: Run) -> None:
    run.slurm.requeue(run.job)


def node_crashed(run: Run) -> None:
    run.slurm.crash(run.nodes()[-1])


def batch_host_crashed(run: Run) -> None:
    run.slurm.crash(run.nodes()[0])


def node_returned(run: Run) -> None:
    """The crashed node is back, and a stop lets the job move onto it."""
    for node, state in run.slurm.nodes().items():
        if "down" in state:
            run.slurm.revive(node)
    told(run)


def controller_restarted(run: Run) -> None:
    """Costs no life: the job goes on meanwhile; a stop then shows that Slurm still knows it."""
    life = len(run.begun())
    run.slurm.restart_controller()
    before = run.step()
    wait_until(lambda: run.step() >= before + 3, _SECONDS)
    assert len(run.begun()) == life
    told(run)


SENTENCES = {
    preempted: "preempted by a job of a higher partition",
    told: "USR1, as before the time limit",  # prose: a row of the page
    requeued: "`scontrol requeue`",
    controller_restarted: "the controller restarted, then USR1",
    node_crashed: "a node crashed",
    node_returned: "the node came back, then USR1",
    batch_host_crashed: "the node of the batch script crashed",  # prose: a row of the page
}
#: What happens, and the ranks of the life after it.
WHOLE = [
    (preempted, 4),
    (told, 4),
    (requeued, 4),
    (controller_restarted, 4),
    (node_crashed, 3),
    (node_returned, 4),
    (batch_host_crashed, 3),
    (node_returned, 4),
]
SHORT = [(node_crashed, 3), (node_returned, 4)]


def disturb(run: Run, plan: list[tuple[Callable[[Run], None], int]]) -> None:
    """Submit once, let all of it happen, and wait for the end."""
    run.submit()
    run.expect("the submission", 4)
    for happens, ranks in plan:
        run.expect(SENTENCES[happens], ranks, happens)
    assert run.slurm.wait_for_end(run.job) == "COMPLETED", run.log()
    # A job that is back before Slurm has noticed a dead node starts on it once more: a life without a step.
    run.restarts = int(run.slurm.job(run.job)["Restarts"])
    counted = (run.dir / f"slurm/lives-{run.job}").read_text().splitlines()
    run.retries = run.log().count(", retry ")
    assert run.restarts + run.retries == len(counted) - 1 >= len(plan), (counted, run.log())


def orchestrated(run: Run) -> None:
    """Drained and returned nodes, and the crash of the orchestrator's own node."""
    slurm = run.slurm
    run.submit("--orchestrate", "--sizes", "4,3,2")
    small = run.job
    run.expect("the submission", 4)

    def drained(run: Run) -> None:
        slurm.drain("n4")
        run.job = slurm.run("squeue", "--noheader", "--partition=low", "--format=%i").strip()
        told(run)

    def returned(run: Run) -> None:
        slurm.crash(CPU_NODE)
        slurm.wait_until_down(CPU_NODE)
        slurm.resume("n4")
        slurm.revive(CPU_NODE)

    run.expect("n4 drained, then USR1", 3, drained)
    run.expect("the orchestrator's node crashed and came back; n4 returned", 4, returned)
    assert slurm.wait_for_end(small) == "COMPLETED", run.log()
    assert slurm.job(small)["Restarts"] == "1"
    submitted = [e["nodes"] for e in read_run(run.dir).events if e["event"] == "submit"]
    assert submitted == [4, 3, 4]


# ---- what must hold at the end


def compare(run: Run, undisturbed: Run) -> dict[str, Any]:
    """Ids exact, numbers within 1e-5, bits equal as long as the layout was; the figures."""
    mine, theirs = read_run(run.dir).metrics, read_run(undisturbed.dir).metrics
    assert mine["step"] == theirs["step"]
    assert mine["instances"] == theirs["instances"]
    changed = next((e["step"] for e in run.begun() if e["world_size"] != 4), mine["step"][-1])
    for name in ("loss", "grad_norm"):
        assert mine[name][:changed] == theirs[name][:changed], (
            "bits, as long as there were four ranks"
        )
        assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(mine[name], theirs[name])), name
    saved = [int(path.name[5:]) for path in (undisturbed.dir / "checkpoints").glob("step-*")]
    common = max(step for step in saved if step <= changed)
    assert error(run, undisturbed, common) == 0.0
    worst = error(run, undisturbed, mine["step"][-1])
    assert worst <= 1e-5
    return {"steps": len(mine["step"]), "bits_equal_to_step": changed, "worst_weight_error": worst}


def error(run: Run, other: Run, step: int) -> float:
    """Largest relative difference of the two runs' weights at a checkpoint."""
    found = []
    for each in (run, other):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "run"
            copy.mkdir()
            shutil.copy(each.dir / "config.toml", copy)
            name = f"checkpoints/step-{step:08d}"
            shutil.copytree(each.dir / name, copy / name)
            found.append(load_trained(copy)[0].state_dict())
    pairs = [
        (found[0][name], value) for name, value in found[1].items() if value.is_floating_point()
    ]
    assert all(torch.isfinite(mine).all() for mine, _ in pairs)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name, running_cluster(Path(name)) as slurm:
        folder = Path(name)
        reference = Run(slurm, folder / "undisturbed", STEPS)
        reference.train_undisturbed(4)
        moved = Run(slurm, folder / "orchestrated", STEPS)
        orchestrated(moved)
        slurm.tidy()
        whole = Run(slurm, folder / "disturbed", STEPS)
        disturb(whole, WHOLE)
        result = {
            "commit": subprocess.check_output(
                ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True
            ).strip(),
            "slurm": slurm.run("sinfo", "--version").strip(),
            "torch": torch.__version__,
            "global_batch": 256,
            "one_script": {
                "restarts": whole.restarts,
                "retries": whole.retries,
                "lives": whole.lives,
                **compare(whole, reference),
                "log": whole.log_of_first_preemption(),
            },
            "orchestrated": {
                "submitted_nodes": [life["ranks"] for life in moved.lives],
                "lives": moved.lives,
                **compare(moved, reference),
            },
            "seconds": round(time.monotonic() - began),
        }
    print(json.dumps(result, indent=1))
    if "--write" in sys.argv:
        (ROOT / "docs/data/slurm-story.json").write_text(json.dumps(result, indent=1) + "\n")
        (ROOT / "docs/slurm-story.md").write_text(page(result))
    return 0


def page(result: dict[str, Any]) -> str:
    """The result as a page for people."""
    lines = [
        "# One job, and what happened to it",
        "",
        f"Made by `hatch run slurm-story --write` on {result['slurm']}, torch {result['torch']}, commit "
        f"{result['commit']}, in {result['seconds']} s: a real Slurm whose four nodes are processes of one machine with two "
        "cores, real ranks over gloo, a tiny model, global batch 256. `seconds` runs from the disturbance to the sixth "
        "step of the next life: detection, the queue (5 s at least), start-up and imports of all ranks on two cores.",
    ]
    for title, key in (
        ("A script, submitted once", "one_script"),
        ("Orchestrated", "orchestrated"),
    ):
        part = result[key]
        lines += [
            "",
            f"## {title}",
            "",
            "| life | after | ranks | from step | seconds |",
            "|---:|---|---:|---:|---:|",
        ]
        for number, life in enumerate(part["lives"], 1):
            lines.append(
                f"| {number} | {life['after']} | {life['ranks']} | {life['from_step']} | {life['seconds']} |"
            )
        how = (
            f"COMPLETED, restarted {part['restarts']} times by Slurm and {part['retries']} times in its nodes, all counted by the script"
            if key == "one_script"
            else f"COMPLETED; submitted on {', '.join(map(str, part['submitted_nodes']))} nodes"
        )
        lines += [
            "",
            f"{how}: {part['steps']} steps. Digests of the instances of each step are those of a run on four ranks "
            f"without a fault; losses, gradient norms and weights have its bits up to step {part['bits_equal_to_step']}, where the "
            f"number of ranks first changed, and are within 1e-5 of it at the end (weights: {part['worst_weight_error']:.1e}).",
        ]
    lines += [
        "",
        "## The log of a preemption",
        "",
        "The first job's log, from its submission to the third step after it was preempted. Lines of the script begin "
        "with a time, those of `srun` with its name; the others are those of rank 0.",
        "",
        "```text",
        *result["one_script"]["log"],
        "```",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
