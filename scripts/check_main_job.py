"""Judge the run that `hatch run train` left: is the loss below the text's bigram entropy, is the text English?

python scripts/check_main_job.py runs/debug

Seen to fail: a run of 30 steps, whose loss is above the bound and of whose words 38 % are known.
"""

from __future__ import annotations

import re
import sys

import numpy as np

from forge_data import SourceConfig, load_tokenizer, open_source
from forge_train import read_run
from forge_train.build.run_directory import RunDirectory


def bigram_entropy(tokens: np.ndarray) -> float:
    """H(next | previous) in nats of the empirical pair counts."""
    ids = tokens.astype(np.int64)
    pairs = np.bincount(ids[:-1] * 512 + ids[1:], minlength=512 * 512).reshape(512, 512)
    joint = pairs / pairs.sum()
    previous = joint.sum(1, keepdims=True)
    seen = joint > 0
    return float(-(joint[seen] * np.log((joint / np.where(previous > 0, previous, 1))[seen])).sum())


def known_words(sample: str, corpus: str) -> float:
    """Share of the sample's words (runs of letters) that occur as words in the corpus."""
    words = re.findall(r"[a-z]+", sample.lower())
    known = set(re.findall(r"[a-z]+", corpus.lower()))
    return sum(word in known for word in words) / max(len(words), 1)


def main(run_dir: str) -> int:
    run, source = read_run(run_dir), open_source(SourceConfig())
    tokens = source.read(0, source.num_tokens)
    corpus = load_tokenizer(source.tokenizer).decode(tokens.tolist())
    sample = RunDirectory(run_dir).sample.read_text()
    val_loss = [e["val_loss"] for e in run.events if e["event"] == "evaluation"][-1]
    entropy, share = bigram_entropy(tokens), known_words(sample, corpus)
    seconds = run.metrics["seconds"][-1]
    print(
        f"validation loss {val_loss:.4f} nats per byte (bigram entropy {entropy:.4f}); "
        f"{share:.0%} of the sample's words occur in the text; {seconds:.0f} s of training"
    )
    return 0 if val_loss < entropy and share >= 0.5 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
