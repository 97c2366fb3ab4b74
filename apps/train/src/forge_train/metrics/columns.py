"""Columns of metrics.jsonl: their names, units, meanings and ranges, and the numbers of a row among them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from forge_resilience import sinks

#: The schema of new rows. It rises when a column changes its meaning or goes; a new column leaves it as it is.
#: Rows of versions before it have none, and their columns mean the same as those of schema 1.
SCHEMA = 1


class Column(NamedTuple):
    """A column; `<...>` in its name stands for names of the run's parts. section: of its plot in trackers; "" for none."""

    name: str
    section: str
    unit: str
    meaning: str
    range: str = "0 or more"


COLUMNS = (
    Column("step", "", "steps", "optimizer steps so far; 0 is an evaluation before the first"),
    Column("schema", "", "number", "version of the columns", "1 or more"),
    Column("loss", "train", "nats per label", "of the step's global batch: its cross-entropy, weighted by label, or the objective; null without a label", "0 or more; any number with `train.objective`"),
    Column("val_loss", "eval", "nats per label", "of the validation rows; null where none were evaluated"),
    Column("val_bits_per_byte", "eval", "bits / byte", "of the text of the validation rows, where the tokenizer keeps text"),
    Column("grad_norm", "train", "L2 norm", "norm of the gradient of all parameters, before clipping"),
    Column("lr", "train", "learning rate", "learning rate of the step, before the factors of parameter groups"),
    Column("tokens", "train", "tokens", "seen so far"),
    Column("tokens_per_second", "perf", "tokens / s", "of all ranks since the row before, evaluation and saving left out"),
    Column("flops", "perf", "operations", "of training so far, by the formula of `forge_core.flops_per_token`"),
    Column("mfu", "perf", "fraction", "of the peak in bf16 of all devices (docs/mfu.md); null in fp32, and where the peak is not known", "0 to 1"),
    Column("data_wait_seconds", "perf", "s", "that rank 0 waited for data since the row before"),
    Column("memory_bytes", "perf", "bytes", "peak of rank 0: tensors on an accelerator, the process on a CPU"),
    Column("seconds", "perf", "s", "of training so far, over all attempts, evaluation and saving left out"),
    Column("device_hours", "perf", "h", "seconds of training times the ranks that trained in them, over all attempts: GPU hours on GPUs, hours of processes on CPUs"),
    Column("seconds_left", "perf", "s", "to the last step, at the speed since the row before"),
    Column("instances", "data", "16 hex digits", "digest of the sample indices of the step's global batch", "any"),
    Column("skipped_steps", "train", "steps", "without an update since the row before, as their numbers were bad or they had no label"),
    Column("recompiled", "perf", "functions", "functions that were compiled again so far; with `parallel.compile`"),
    Column("loss.z_loss", "train", "nats per label", "the term that `train.<loss>.z_loss` adds"),
    Column("loss.label_smoothing", "train", "nats per label", "the term that `train.<loss>.label_smoothing` adds", "any number"),
    Column("loss.mtp", "train", "nats per label", "mean of the losses of multi-token prediction, without its weight"),
    Column("loss.source.<name>", "data", "nats per label", "of the step's labels from a source of a mixture; null without any"),
    Column("loss.modality.<name>", "data", "nats per label", "of the step's labels that are text, or images; null without any"),
    Column("share.source.<name>", "data", "fraction", "of the step's labels, by weight; with `metrics.source_shares`", "0 to 1"),
    Column("objective.<name>", "train", "per label", "a further sum of `train.objective`, over the same divisor as the loss", "any number"),
    Column("eval/<name>/loss", "eval", "nats per label", "of a set of [eval.sets]; null where it was not evaluated"),
    Column("eval/<name>/perplexity", "eval", "tokens", "exp of the loss", "1 or more"),
    Column("eval/<name>/bits_per_byte", "eval", "bits / byte", "of the set's text"),
    Column("eval/<name>/accuracy", "eval", "fraction", "of the questions of [eval.choices] whose most likely answer is right", "0 to 1"),
    Column("eval/<name>/accuracy_per_byte", "eval", "fraction", "the same, with likelihoods divided by the bytes of the answers", "0 to 1"),
    Column("eval/exact_match", "eval", "fraction", "of the questions of [eval.exact_match] that are answered right", "0 to 1"),
    Column("moe.<layer>.max_load", "moe", "ratio", "tokens of the fullest expert over the mean, since the row before", "1 to the number of experts"),
    Column("moe.<layer>.min_load", "moe", "ratio", "tokens of the emptiest expert over the mean", "0 to 1"),
    Column("moe.<layer>.dead", "moe", "experts", "that no token reached", "0 to the number of experts"),
    Column("moe.<layer>.entropy", "moe", "nats", "of the router, mean over tokens", "0 to ln of the number of experts"),
    Column("moe.<layer>.drop_rate", "moe", "fraction", "of the choices that the capacity dropped", "0 to 1"),
    Column("moe.<layer>.max_bias", "moe", "score", "largest absolute bias of an expert; 0 without biases"),
    Column("moe.<layer>.load", "moe", "list of ratios", "tokens of each expert over the mean; with `metrics.expert_loads`", "0 to the number of experts"),
    Column("gradient.<part>.norm", "gradient", "L2 norm", "norm of the step's gradient of a block of the model, or of the `rest` outside the blocks"),
    Column("gradient.<part>.signal", "gradient", "squared norm", "estimate of the squared norm of the expected gradient; with `metrics.gradients_every_steps`", "any number"),
    Column("gradient.<part>.snr", "gradient", "ratio", "signal over the variance that the gradient of this batch has; null where the estimate is not positive", "above 0"),
    Column("gradient.<part>.noise_scale", "gradient", "labels", "of a batch whose gradient has as much noise as signal; null likewise", "above 0"),
)  # fmt: skip


def column_of(name: str) -> Column | None:
    """The entry of a row's column; None for one that is not listed."""
    return next((c for c in COLUMNS if re.fullmatch(_pattern(c.name), name)), None)


@functools.cache
def tracker_name(name: str) -> str:
    """Return the name of a column in W&B, TensorBoard and MLflow, which plot what is before the slash together.

    A column of an extension is in the section `extension`. Two columns never have one name.
    """
    if (entry := column_of(name)) is None:
        return f"extension/{name}"
    rest = re.sub(rf"^{entry.section}[./]", "", name)
    return f"{entry.section}/{rest}" if entry.section else name


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """`forge_resilience.sinks.read_rows`, with a line on stderr for rows of a later schema."""
    return sinks.read_rows(path, SCHEMA)


@functools.cache
def _pattern(name: str) -> str:
    return re.sub(r"<\w+>", ".+", re.escape(name))
