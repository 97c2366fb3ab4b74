"""Optimizers and schedules trained for real, at equal steps and several seeds; writes docs/optimizers.md and .svg, and
docs/data/optimizers.json.

    hatch run optimizers                        # the whole study, 46 runs of 7 s on one core
    hatch run optimizers --resume               # those that docs/data/optimizers.json has no row of
    hatch run optimizers --page                 # page and picture from the rows that are there

First a few learning rates of each optimizer with a seed of their own, under the cosine (schedule-free: a
constant rate); the best goes to all schedules and seeds. A row holds one run: its settings, its validation
losses by step, seconds, commit. Page and picture are made from the rows alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "benchmarks/optimizer_study.toml"
#: Sources that the numbers depend on.
SOURCES = ("packages", "apps/train/src", "benchmarks/optimizer_study.toml")
RATE_SEED = 100

#: Keys of each optimizer, and the rates that are tried.
OPTIMIZERS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "adamw": ({}, (1e-3, 3e-3, 1e-2, 3e-2)),
    "lion": ({"optimizer.weight_decay": 1.0}, (3e-4, 1e-3, 3e-3, 1e-2)),
    "muon": (
        {"optimizer.muon.adjust": "original", "optimizer.muon.adamw_lr_multiplier": 0.2},
        (0.01, 0.02, 0.04, 0.08),
    ),
    "schedule_free_adamw": ({}, (1e-3, 3e-3, 1e-2, 3e-2)),
}
SCHEDULES = ("cosine", "linear", "wsd")
Row = dict[str, Any]


def schedules_of(optimizer: str) -> tuple[str, ...]:
    """Schedule-free AdamW has the constant rate that it is made for."""
    return ("constant",) if optimizer == "schedule_free_adamw" else SCHEDULES


def train(optimizer: str, schedule: str, lr: float, seed: int, more: dict[str, Any]) -> Row:
    """One run; its validation losses are those of its events."""
    from forge_train import Trainer, load_job, read_run

    keys: dict[str, Any] = {
        "optimizer.name": optimizer,
        "optimizer.lr": lr,
        **OPTIMIZERS[optimizer][0],
        "schedule.name": schedule,
        "run.seed": seed,
        **more,
    }
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        job = load_job(JOB, {**keys, "run.dir": folder})
        trainer = Trainer(job)
        if trainer.fit().step < trainer.total_steps:
            raise SystemExit("stopped by a signal; --resume goes on with this run")
        events = read_run(folder).events
    curve = [(e["step"], round(e["val_loss"], 6)) for e in events if e["event"] == "evaluation"]
    return {
        "optimizer": optimizer,
        "schedule": schedule,
        "lr": lr,
        "seed": seed,
        "keys": keys,
        "steps": job.config.train.steps,
        "curve": curve,
        "val_loss": curve[-1][1],
        "seconds": round(time.perf_counter() - started, 2),
    }


def study(
    rows: list[Row], optimizers: Sequence[str], seeds: int, more: dict[str, Any]
) -> Iterator[Row]:
    """The runs that `rows` lack: the rates of each optimizer, then its schedules at the best of them."""

    def run(optimizer: str, schedule: str, lr: float, seed: int) -> Iterator[Row]:
        mine = (optimizer, schedule, lr, seed)
        if mine not in [(r["optimizer"], r["schedule"], r["lr"], r["seed"]) for r in rows]:
            row = train(*mine, more)
            rows.append(row)
            yield row

    for optimizer in optimizers:
        for lr in OPTIMIZERS[optimizer][1]:
            yield from run(optimizer, schedules_of(optimizer)[0], lr, RATE_SEED)
        lr = best_rate(rows, optimizer)
        for schedule in schedules_of(optimizer):
            for seed in range(seeds):
                yield from run(optimizer, schedule, lr, seed)


def best_rate(rows: list[Row], optimizer: str) -> float:
    """Of the rates that were tried, the one with the lowest last loss."""
    tried = [r for r in rows if r["optimizer"] == optimizer and r["seed"] == RATE_SEED]
    return min(tried, key=lambda r: r["val_loss"])["lr"]


def groups(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Runs of the comparison by (optimizer, schedule): those of the best rates."""
    found: dict[tuple[str, str], list[Row]] = {}
    best = {name: best_rate(rows, name) for name in {row["optimizer"] for row in rows}}
    for row in rows:
        if row["seed"] != RATE_SEED and row["lr"] == best[row["optimizer"]]:
            found.setdefault((row["optimizer"], row["schedule"]), []).append(row)
    return found


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def page(rows: list[Row]) -> str:
    """Markdown of the rows."""
    compared = groups(rows)
    seeds = max(len(group) for group in compared.values())
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [
        "# Optimizers and schedules",
        "",
        f"Validation loss in nats per byte after {rows[0]['steps']} steps of 512 bytes each, of a small model (width 64,",
        f"2 layers, `benchmarks/optimizer_study.toml`): mean and standard error of {seeds} seeds. Each optimizer has the",
        "learning rate that was best of those below, with a seed that is not compared; one at the end of its list may",
        "not be the best there is. A run so short says which combinations work as they should, and little about which is",
        "best for a long one.",
        "",
        "| optimizer | schedule | lr | validation loss | standard error |",
        "|---|---|---|---|---|",
    ]
    for (optimizer, schedule), group in compared.items():
        losses = [row["val_loss"] for row in group]
        lines.append(
            f"| {optimizer} | {schedule} | {group[0]['lr']:g} | {statistics.fmean(losses):.4f} | "
            f"{standard_error(losses):.4f} |"
        )
    lines += [
        "",
        "![validation loss by step](optimizers.svg)",
        "",
        "## Rates that were tried",
        "",
    ]
    lines += ["| optimizer | keys | lr: validation loss |", "|---|---|---|"]
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        tried = [r for r in rows if r["optimizer"] == optimizer and r["seed"] == RATE_SEED]
        losses = ", ".join(f"{row['lr']:g}: {row['val_loss']:.4f}" for row in tried)
        keys = ", ".join(f"`{key} = {value}`" for key, value in OPTIMIZERS[optimizer][0].items())
        lines.append(f"| {optimizer} | {keys or 'defaults'} | {losses} |")
    lines += [
        "",
        "This page and its picture are written by `hatch run optimizers` (`python -m benchmarks.optimizer_study`) from",
        "`optimizers.json`, which holds settings, losses by step, seconds and commit of each run (seconds are those of a",
        f"machine that did other work, too). Here: commit {commits}, {len(rows)} runs.",
    ]
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], path: Path) -> None:
    """One panel an optimizer, one curve a schedule: the mean over the seeds, and a band of its standard error."""
    import matplotlib
    from matplotlib.figure import Figure

    compared = groups(rows)
    names = list(dict.fromkeys(optimizer for optimizer, _ in compared))
    figure = Figure(figsize=(3.2 * len(names), 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    colours = {"cosine": "C0", "linear": "C1", "wsd": "C2", "constant": "C3"}
    for (optimizer, schedule), group in compared.items():
        axes = panels[names.index(optimizer)]
        axes.set_title(f"{optimizer}, lr {group[0]['lr']:g}", fontsize=10)
        steps = [step for step, _ in group[0]["curve"]]
        losses = [[row["curve"][i][1] for row in group] for i in range(len(steps))]
        means, errors = map(statistics.fmean, losses), map(standard_error, losses)
        bands = [(mean, mean - error, mean + error) for mean, error in zip(means, errors)]
        middle, low, high = zip(*bands)
        axes.plot(steps, middle, color=colours[schedule], label=schedule)
        axes.fill_between(steps, low, high, color=colours[schedule], alpha=0.2, linewidth=0)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("validation loss (nats per byte)")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "forge"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def write(rows: list[Row], folder: Path) -> None:
    """optimizers.md and .svg from the rows."""
    (folder / "optimizers.md").write_text(page(rows))
    draw(rows, folder / "optimizers.svg")


def _commit() -> str:
    """Short commit, with a plus sign if the sources were changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", *SOURCES)
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="another length than the job's")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--page", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    file = args.folder / "data/optimizers.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = args.page or (args.resume and file.exists())
    rows: list[Row] = json.loads(file.read_text()) if kept else []
    more = {} if args.steps is None else {"train.steps": args.steps}
    commit = _commit()
    for row in () if args.page else study(rows, args.optimizers, args.seeds, more):
        row["commit"] = commit
        file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        names = (
            f"{row['optimizer']:20} {row['schedule']:9} lr {row['lr']:<7g} seed {row['seed']:<4}"
        )
        print(f"{names} {row['val_loss']:.4f}  {row['seconds']:.1f} s", flush=True)
    write(rows, args.folder)


if __name__ == "__main__":
    main()
