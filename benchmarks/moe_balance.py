"""Ways to keep experts busy, trained for real: load of the experts and validation loss over seeds.

    python benchmarks/moe_balance.py --seeds 3

Trains `apps/train/configs/moe_debug.toml` for some steps with no balancing, with the loss-free bias and
with the auxiliary loss, and prints one JSON line: for each way the fullest expert over the mean (the worst
layer, mean of the last rows) and the validation losses.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import harness
import torch

CONFIG = Path(__file__).parents[1] / "apps/train/configs/moe_debug.toml"
WAYS: dict[str, dict[str, float]] = {
    "none": {"model.moe.bias_update_rate": 0.0},
    "bias": {"model.moe.bias_update_rate": 1e-2},
    "aux_loss": {"model.moe.bias_update_rate": 0.0, "model.moe.aux_loss_weight": 1e-2},
}
LAST_ROWS = 5


def train(settings: dict[str, Any]) -> tuple[float, float]:
    """(max over layers of the mean max/mean load of the last rows, validation loss) of one run."""
    from forge_train import Trainer, load_job, read_run

    with tempfile.TemporaryDirectory() as folder:
        fixed = {"run.dir": folder, "metrics.console": "off", "sample.max_new_tokens": 0}
        result = Trainer(load_job(CONFIG, {**settings, **fixed})).fit()
        rows = read_run(folder).metrics
    loads = [v[-LAST_ROWS:] for name, v in rows.items() if name.endswith(".max_load")]
    assert result.val_loss is not None
    return max(statistics.fmean(layer) for layer in loads), result.val_loss


def summary(runs: list[tuple[float, float]]) -> dict[str, Any]:
    loads, losses = [load for load, _ in runs], [loss for _, loss in runs]
    error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else None
    return {
        "max_load": loads,
        "val_loss": losses,
        "val_loss_mean": statistics.fmean(losses),
        "standard_error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    results = {}
    for name, way in WAYS.items():
        settings = {**way, "train.steps": args.steps}
        results[name] = summary(
            [train({**settings, "run.seed": seed}) for seed in range(args.seeds)]
        )
    harness.emit("moe_balance", torch.device("cpu"), settings=vars(args), results=results)


if __name__ == "__main__":
    main()
