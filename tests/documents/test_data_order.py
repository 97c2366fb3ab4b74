"""docs/data-order.md is what happens: its program runs, and its tables are those of a loader and of a run.

`python tests/documents/test_data_order.py` writes the output into the page.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_data import Loader, PackedStream, open_training
from forge_data.mixed_stream import seed_of
from forge_data.mixture import Mixture, Phase, integer_shares
from forge_data.order import Permutation
from forge_data.packing_plan import plan_rows
from forge_testing.jobs import write_job
from forge_train import Trainer, load_job, read_run

PAGE = Path(__file__).parents[2] / "docs/data-order.md"
_PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
_TEXT = re.compile(r"```text\n.*?```", re.DOTALL)
_RUN = """
[data.sources.a]
name = "npy"
path = "{folder}/a.npy"
weight = 2.0
[data.sources.b]
name = "npy"
path = "{folder}/b.npy"
weight = 1.0
max_epochs = 1
[data.phases.long]
start_tokens = 100
seq_len = 16
global_batch = 3
lr_multiplier = 0.5
[schedule]
name = "constant"
"""


class Documents:
    """Six documents in memory, as a source."""

    vocab_size, tokenizer, max_token_id = 66, None, 65
    lengths = np.array([5, 3, 9, 6, 2, 6])
    documents = np.cumsum([0, *lengths[:-1]])
    num_documents, num_tokens = len(lengths), int(lengths.sum())
    _tokens = np.concatenate([10 * i + np.arange(n) for i, n in enumerate(lengths, 1)])

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._tokens[start:stop]

    def fingerprint(self) -> dict[str, str | int]:
        return {}


def run_program(page: str) -> tuple[dict[str, Any], str]:
    """The names that the program of the page defines, and what it prints."""
    (code,) = _PYTHON.findall(page)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code, names)
    return names, output.getvalue()


def table_of_packings() -> str:
    """Each sample of the six documents, by packing."""
    lines = []
    for policy in ("concatenate", "first_fit", "best_fit"):
        plan = None if policy == "concatenate" else plan_rows(Documents.lengths, 8, policy)
        found = PackedStream(Documents(), 8, shuffle=False, plan=plan).arrays(np.arange(4))  # type: ignore[arg-type]
        names = ("tokens", "labels", "positions", "document_ids")
        for sample, values in enumerate(zip(*(found[name].tolist() for name in names))):
            columns = [" ".join("." if x in (-100, -1) else str(x) for x in row) for row in values]
            widths = (23, 23, 15, 15)
            cells = "  ".join(f"{cell:{width}}" for cell, width in zip(columns, widths))
            lines.append(f"{policy:11}  {sample}  {cells}".rstrip())
    head = f"{'packing':11}  r  {'tokens':23}  {'labels':23}  {'positions':15}  document ids"
    return "\n".join([head, *lines, ""])


def table_of_mixtures() -> str:
    """Shares and the first sources of a block, for two mixtures of three sources."""
    lines = [f"{'weights':11}  {'shares':29}  block  sources"]
    for weights, number in (((5.0, 2.0, 1.0), 0), ((0.7, 0.2, 0.1), 1)):
        mixture = Mixture([Phase(0, weights)], [None] * 3)
        sources, _ = mixture.locate(256 * number + np.arange(16))  # blocks of 256
        first, second, third = (
            " ".join(map(str, values)) for values in (weights, integer_shares(weights), sources)
        )
        lines.append(f"{first:11}  {second:29}  {number:5}  {third}")
    return "\n".join([*lines, ""])


def table_of_run(folder: Path) -> str:
    """Each step of the example, by a run of the runner and the samples of its loader."""
    np.save(folder / "a.npy", np.arange(50, dtype=np.uint16))
    np.save(folder / "b.npy", np.arange(100, 120, dtype=np.uint16))
    job = write_job(folder)
    text = job.read_text().replace('[data.sources.text]\nname = "builtin"\n', "")
    job.write_text(text + _RUN.format(folder=folder))
    keys = {"train.steps": 6, "data.seq_len": 8, "eval.every_steps": 0, "metrics.console": "off",
            "model.max_seq_len": 16, "model.vocab_size": 128, "sample.max_new_tokens": 0}  # fmt: skip
    resolved = load_job(job, keys)
    Trainer(resolved).fit()
    columns = read_run(folder / "run").metrics

    lines = ["step  indices     first tokens   tokens  lr     instances"]
    loader = Loader(open_training(resolved.config.data, 0), 4)
    for number in range(6):
        if loader.next_instance == 13:
            loader.rebatch(3, 1)
        batch = next(loader)
        real = batch.instance_ids >= 0
        assert batch.digest == columns["instances"][number]
        ids = " ".join(map(str, batch.instance_ids[real].tolist()))
        firsts = " ".join(map(str, batch.tokens[real, 0].tolist()))
        tokens, rate, digest = (columns[n][number] for n in ("tokens", "lr", "instances"))
        lines.append(f"{number + 1:4}  {ids:10}  {firsts:13}  {tokens:6}  {rate:<5}  {digest}")
    return "\n".join([*lines, ""])


def with_real_output(page: str, folder: Path) -> str:
    """The page, with what its program prints and the tables."""
    _, printed = run_program(page)
    texts = iter([printed, table_of_packings(), table_of_mixtures(), table_of_run(folder)])
    return _TEXT.sub(lambda _: f"```text\n{next(texts)}```", page)


def test_the_output_and_the_tables_of_the_page_are_real(tmp_path: Path) -> None:
    page = PAGE.read_text()
    assert with_real_output(page, tmp_path) == page


@pytest.mark.parametrize("seed", range(10))
def test_the_program_of_the_page_computes_what_the_package_does(seed: int) -> None:
    names, _ = run_program(PAGE.read_text())
    draw = random.Random(seed)
    n, epoch, key = draw.randrange(1, 400), draw.randrange(2**40), draw.randrange(2**63)
    found = Permutation(n, key, epoch)(np.arange(n))
    assert names["permutation"](n, key, epoch) == found.tolist()
    assert names["derive"](key, "web ü") == seed_of(key, "web ü")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        PAGE.write_text(with_real_output(PAGE.read_text(), Path(made)))
