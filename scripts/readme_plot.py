"""Draw docs/killed-run.svg: the loss of a run that SIGKILL ends, and that the same command resumes.

    python scripts/readme_plot.py            # from docs/data/killed-run.json
    python scripts/readme_plot.py --record   # train, kill and resume for real, then draw; about four minutes

The record holds three losses per step: of a run that nothing disturbs, of the attempt that is killed, and of the attempt
that resumes. It also holds the digests of both final weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs/data/killed-run.json"
PICTURE = ROOT / "docs/killed-run.svg"
JOB = "apps/train/configs/debug.toml"
_KILL_AFTER = 350  # steps
_FLAGS = ["--metrics.every_steps", "5"]


def command(run_dir: Path) -> list[str]:
    """The command of all three attempts."""
    return [sys.executable, "-m", "forge_train", "run", JOB, "--run.dir", str(run_dir), *_FLAGS]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of the rows that a run has written so far."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [(row["step"], row["loss"]) for row in rows]


def digest(run_dir: Path) -> str:
    """SHA-256 over the names and tensors of the newest checkpoint's weights."""
    from forge_train import load_model

    found, (model, _, _) = hashlib.sha256(), load_model(run_dir)
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def record() -> dict[str, Any]:
    """Train one run without interruption, and one that is killed and started again."""
    with tempfile.TemporaryDirectory() as folder:
        calm, killed = Path(folder, "calm"), Path(folder, "killed")
        subprocess.run(command(calm), cwd=ROOT, check=True)

        process = subprocess.Popen(command(killed), cwd=ROOT)
        while not (seen := losses(killed)) or seen[-1][0] < _KILL_AFTER:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        before = losses(killed)

        subprocess.run(command(killed), cwd=ROOT, check=True)
        events = [json.loads(line) for line in (killed / "events.jsonl").read_text().splitlines()]
        resumed = max(event["step"] for event in events if event["event"] == "resume")
        return {
            "command": f"forge-train run {JOB} {' '.join(_FLAGS)}",
            "undisturbed": losses(calm),
            "killed": before,
            "resumed_from": resumed,
            "resumed": [row for row in losses(killed) if row[0] > resumed],
            "weights": {"undisturbed": digest(calm), "resumed": digest(killed)},
        }


def draw(rows: dict[str, Any], path: Path) -> None:
    """Draw the record as an SVG file that is the same for the same record."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    settings = {"svg.hashsalt": "forge", "svg.fonttype": "none", "font.family": "sans-serif"}
    with mpl.rc_context(settings):
        figure, axes = plt.subplots(figsize=(7.2, 3.0), layout="constrained")
        # wide under narrow lines, as the three are equal where they overlap
        axes.plot(*zip(*rows["undisturbed"]), color="#b0b4b8", lw=7, label="never stopped")
        axes.plot(*zip(*rows["killed"]), color="#0d47a1", lw=1.3, label="until SIGKILL", zorder=4)
        after = "same command, started again"
        axes.plot(*zip(*rows["resumed"]), color="#f28c28", lw=3.5, label=after, zorder=3)

        step, loss = rows["killed"][-1]
        axes.plot([step], [loss], "X", color="#b71c1c", ms=10, zorder=5)
        axes.annotate(f"SIGKILL at step {step}", (step, loss), (step + 12, loss + 1.5), color="#b71c1c",
                      arrowprops={"arrowstyle": "-", "color": "#b71c1c"})  # fmt: skip
        start = rows["resumed_from"]
        axes.axvline(start, color="#bf5b00", lw=0.8, ls=":")
        axes.annotate(
            f"resumes from the checkpoint of step {start}",
            (start - 6, 4.6),
            ha="right",
            color="#bf5b00",
        )

        axes.set(xlabel="step", ylabel="training loss (nats per byte)", xlim=(0, None))
        axes.legend(frameon=False, loc="upper right")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--record", action="store_true", help="train, kill and resume; write the record"
    )
    if parser.parse_args().record:
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record()) + "\n")
    draw(json.loads(RECORD.read_text()), PICTURE)


if __name__ == "__main__":
    main()
