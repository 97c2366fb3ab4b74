"""A verb of forge-train: the row of a run where a column is lowest."""

from pathlib import Path

from forge_train import read_run
from forge_train.command_line import call_verb


def best(args: list[str]) -> int:
    return call_verb(_best, args, "best")


def _best(run: Path, /, column: str = "loss") -> int:
    """Print the step with the lowest value of a column of metrics.

    run: folder of a run
    column: a column of docs/metrics.md
    """
    metrics = read_run(run).metrics
    rows = zip(metrics.get(column, []), metrics.get("step", []))
    found = min((row for row in rows if row[0] is not None), default=None)
    print("no value" if found is None else f"{column} {found[0]:.4f} at step {found[1]}")
    return 0
