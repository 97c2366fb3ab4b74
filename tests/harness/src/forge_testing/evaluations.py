"""Sets and questions that a run is evaluated on, and their losses by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from forge_data import SourceConfig, batch_of, open_stream
from forge_train import read_run

SETS: dict[str, Any] = {
    "metrics.console": "off",
    "train.steps": 6,
    "model.num_layers": 2,
    "parallel.precision": "fp32",
    "eval.every_steps": 2,
    "eval.sequences": 5,
    "eval.sets.seen.split": "train",
    "eval.sets.seen.sequences": 7,
    "eval.sets.seen.every_steps": 3,
    "eval.sets.held.split": "validation",
}
QUESTIONS = (
    ("def ", ["main", "zzzz", "self"], 1),
    ("import os\n", ["import", "~"], 0),
    ("return", [" None", " 5", " x, y", "qq"], 2),
    ("for i in ", ["range", "§§§"], 0),
    ("x =", [" 1", " 22"], 1),
)


def questions(folder: Path) -> Path:
    path = folder / "questions.jsonl"
    rows = [{"prompt": p, "choices": c, "answer": a} for p, c, a in QUESTIONS]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def asked(folder: Path) -> dict[str, Any]:
    return {**SETS, "eval.choices.code.path": str(questions(folder))}


def rows_of(job: Path) -> dict[int, dict[str, Any]]:
    """The columns of evaluations by step."""
    events = read_run(job.parent / "run").events
    return {e["step"]: e for e in events if e["event"] == "evaluation"}


def losses_by_hand(model: Any, split: Any, rows: int, seq_len: int) -> tuple[float, float, int]:
    """(nats, labels, bytes) of the first rows of a split of the built-in corpus, a row at a time in float64."""
    stream = open_stream(SourceConfig(split=split), seq_len)
    model = model.double()
    nats = labels = size = 0.0
    for i in range(rows):
        batch = batch_of(stream, range(i, i + 1))
        with torch.no_grad():
            logits = model(batch.tokens, batch.positions, batch.document_ids)[0]
        for t, label in enumerate(batch.labels[0].tolist()):
            if label != -100:
                nats -= float(logits[t].log_softmax(-1)[label])
                labels += 1
                size += label < 256  # ids of the byte tokenizer
    return nats, labels, int(size)
