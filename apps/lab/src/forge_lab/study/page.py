"""The result of a study: its runs and the scaling law fitted to them, as JSON, Markdown and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forge_core.scaling import ScalingFit, bootstrap, fit_scaling, interval
from forge_data import open_stream
from forge_lab._shared.atomic import write_file
from forge_lab._shared.jsonl import read_log
from forge_lab._shared.problems import invalid
from forge_lab.study.runs import Study, StudyRun
from forge_resilience.provenance import git_state
from forge_train import JobConfig, read_run
from forge_train.errors import ConfigError, StateError

_OF_A_STUDY = ("parameters", "trunk", "threads", "resamples", "level")
_OF_A_RUN = (
    "name",
    "size",
    "optimizer",
    "schedule",
    "seed",
    "budget",
    "parameters",
    "steps",
    "begin",
    "tokens",
    "flops",
)
_COLUMNS = {"budget": "tokens_per_parameter", "begin": "forked_at"}
CONSTANTS = ("E", "A", "alpha", "B", "beta")
Result = dict[str, Any]


def check_plot() -> None:
    """Raise ConfigError where matplotlib is missing: before hours of training, not after them."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        rule, fix = "needs matplotlib for its plots", "pip install 'forge-lab[plot]'"
        raise invalid("sweep", "requires", ..., rule, fix, kind=ConfigError) from error


def write_page(study: Study, path: Path) -> None:
    """Write the page `path` (.md), and .json and .svg next to it, of a study whose runs are done."""
    result = result_of(study)
    write_file(path.with_suffix(".json"), json.dumps(result, indent=1) + "\n")
    draw(result, path.with_suffix(".svg"))
    write_file(path, page(result, path.stem))


# ---- the result


def result_of(study: Study) -> Result:
    """Runs, fits and costs of a study, as JSON; runs and fits depend only on the configuration."""
    config = study.config
    rows = [_row(run) for run in study.runs if run.budget is not None]
    kinds = dict.fromkeys((row["optimizer"], row["schedule"]) for row in rows)
    fits = []
    for kind in kinds:
        own = [row for row in rows if (row["optimizer"], row["schedule"]) == kind]
        names = dict(zip(("optimizer", "schedule"), kind))
        fits.append(names | fitted(own, config.resamples, config.level))

    job = study.runs[0].job.config
    return {
        "study": study.name,
        **{key: getattr(config, key) for key in _OF_A_STUDY},
        "sources": [source.name for source in job.data.sources.values()],
        "seq_len": job.data.seq_len,
        "global_batch": job.train.global_batch,
        "vocab_size": job.model.vocab_size,
        "corpus_tokens": _corpus_tokens(job),
        "runs": rows,
        "fits": fits,
        "cost": _cost(study),
    }


def _corpus_tokens(job: JobConfig) -> int | None:
    """Tokens of the training data, each once; None for a source without a length."""
    streams = [
        open_stream(source, job.data.seq_len, packing=job.data.packing)
        for source in job.data.sources.values()
    ]
    if not all(hasattr(stream, "__len__") for stream in streams):
        return None
    return job.data.seq_len * sum(len(stream) for stream in streams)


def _row(run: StudyRun) -> dict[str, Any]:
    """The row of a run, with its loss at the last step. StateError for a run that was not evaluated there."""
    loss = None
    for event in read_run(run.dir).events:
        if event["event"] == "evaluation" and event["step"] == run.steps:
            loss = event["val_loss"]
    if loss is None or not math.isfinite(loss):
        rule = f"must be finite at step {run.steps}"
        fix = "remove the folder to train it again; if it diverges again, take it out of the study"
        raise invalid("val_loss", "finite", loss, rule, fix, where=run.dir, kind=StateError)
    numbers = {_COLUMNS.get(name, name): getattr(run, name) for name in _OF_A_RUN}
    return {**numbers, "val_loss": loss}


def _cost(study: Study) -> dict[str, Any]:
    """Processor seconds of the processes whose end this machine's sweeps saw, and the state of the sources."""
    names = {run.name for run in study.runs}
    ended = [row for row in read_log(study.dir / "lives.jsonl") if row["run"] in names]
    git = git_state()
    return {
        "processes": len(ended),
        "processor_seconds": round(sum(row["processor_seconds"] for row in ended), 1),
        "flops": sum(run.flops * run.own_part for run in study.runs),
        "commit": git.get("commit", "unknown")[:12] + ("+" if git.get("dirty") else ""),
    }


def fitted(rows: Sequence[dict[str, Any]], resamples: int, level: float) -> Result:
    """Fit the law to runs: constants with intervals, the optimum of some budgets, and the error on the held-out largest size.

    Without a law `refused` is the reason.
    """
    columns = [*_columns(rows)]
    try:
        fit = fit_scaling(*columns)
        others = bootstrap(*columns, resamples=resamples)
    except ValueError as error:
        return {"refused": str(error)}

    constants = {
        name: [getattr(fit, name), *interval([getattr(o, name) for o in others], level)]
        for name in CONSTANTS
    }
    return {
        "num_runs": len(rows),
        "objective": fit.objective,
        "constants": constants,
        "largest_error": max(abs(_error(fit, row)) for row in rows),
        "held_out": _held_out(rows),
        "optimum": [_optimum(fit, others, flops, level) for flops in _budgets(rows)],
    }


def _columns(rows: Sequence[dict[str, Any]]) -> Iterator[list[float]]:
    return ([float(row[key]) for row in rows] for key in ("parameters", "tokens", "val_loss"))


def _error(fit: ScalingFit, row: dict[str, Any]) -> float:
    """Relative error of the predicted loss."""
    return fit.loss(row["parameters"], row["tokens"]) / row["val_loss"] - 1


def _held_out(rows: Sequence[dict[str, Any]]) -> Result:
    """Relative errors on the runs of the largest size, of a law that was fitted to the others."""
    largest = max(row["parameters"] for row in rows)
    held = [row for row in rows if row["parameters"] == largest]
    try:
        fit = fit_scaling(*_columns([row for row in rows if row["parameters"] < largest]))
    except ValueError as error:
        return {"refused": str(error)}
    errors = [_error(fit, row) for row in held]
    return {
        "parameters": largest,
        "constants": {name: getattr(fit, name) for name in CONSTANTS},
        "errors": {row["name"]: error for row, error in zip(held, errors)},
        "mean_absolute_error": sum(map(abs, errors)) / len(errors),
    }


def _budgets(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Powers of ten of 6 N D: one below the largest run, and the two above it."""
    most = max(6.0 * row["parameters"] * row["tokens"] for row in rows)
    return [10.0 ** (math.floor(math.log10(most)) + k) for k in range(3)]


def _optimum(fit: ScalingFit, others: Sequence[ScalingFit], flops: float, level: float) -> Result:
    parameters, tokens = fit.optimum(flops)
    around = [other.optimum(flops) for other in others]
    return {
        "flops": flops,
        "parameters": [parameters, *interval([n for n, _ in around], level)],
        "tokens": [tokens, *interval([d for _, d in around], level)],
        "loss": fit.loss(parameters, tokens),
    }


# ---- the page


def page(result: Result, stem: str) -> str:
    """Markdown of a result; its plot is `stem`.svg."""
    runs = result["runs"]
    sizes = dict.fromkeys(run["size"] for run in runs)
    budgets = dict.fromkeys(run["tokens_per_parameter"] for run in runs)
    counted = "all parameters"
    if result["parameters"] != "all":
        counted = "parameters without embedding and head"

    lines = [
        f"# Scaling study `{result['study']}`",
        "",
        f"{len(runs)} runs of {len(sizes)} sizes and {len(budgets)} budgets on the source {', '.join(result['sources'])} "
        f"({result['vocab_size']} ids, rows of {result['seq_len']} tokens, {result['global_batch']} rows a step). N counts "
        f"{counted}. D counts the tokens of all steps, repeated ones included. "
        + _trunk_sentence(result)
        + " The loss is measured on held-out rows after the last step, in nats per token.",
        "",
        f"![loss by tokens, and by FLOPs]({stem}.svg)",
    ]
    for fit in result["fits"]:
        lines += _fit_section(fit, result)

    heads = "| run | N | D | D / N | steps | forked at | FLOPs | loss |"
    lines += ["", "## Runs", "", heads, "|---|---|---|---|---|---|---|---|"]
    lines += [
        f"| {run['name']} | {run['parameters']:,} | {run['tokens']:,} | {run['tokens'] / run['parameters']:.1f} | "
        f"{run['steps']:,} | {run['forked_at'] or '-'} | {run['flops']:.2e} | {run['val_loss']:.4f} |"
        for run in runs
    ]
    lines += ["", *_limits_section(result), ""]
    return "\n".join(lines)


def _trunk_sentence(result: Result) -> str:
    if not result["trunk"]:
        return "Each run was trained from its beginning."
    return (
        "One trunk for each size and seed was trained at a constant learning rate. Each budget is a fork of its trunk that only "
        "trains the decay; its weights are bit for bit those of a run that trains all steps."
    )


def _fit_section(fit: Result, result: Result) -> Iterator[str]:
    kind = ", ".join(filter(None, (fit["optimizer"], fit["schedule"])))
    yield from ("", f"## The law{f' of {kind}' if kind else ''}", "")
    if "refused" in fit:
        yield f"No law is fitted: {fit['refused']}."
        return
    level = f"{result['level']:.0%}"
    yield (
        f"L(N, D) = E + A / N^alpha + B / D^beta, fitted to {fit['num_runs']} runs (Huber's loss of log L, delta 0.001, from a grid "
        f"of starts; Hoffmann et al. 2022, approach 3). The intervals contain {level} of {result['resamples']} fits to runs that were "
        "drawn with replacement."
    )

    yield from ("", f"| constant | fit | {level} interval |", "|---|---|---|")
    for name, (value, low, high) in fit["constants"].items():
        yield f"| {name} | {value:.4g} | {low:.4g} to {high:.4g} |"
    yield ""
    yield f"On the runs that it was fitted to, the largest relative error of the law is {fit['largest_error']:.2%}."

    held = fit["held_out"]
    yield ""
    if "refused" in held:
        yield f"No size is held out, because no law can be fitted without the largest one: {held['refused']}."
    else:
        errors = ", ".join(f"{error:+.2%}" for error in held["errors"].values())
        yield (
            f"**Held out**: a law fitted without the largest size (N = {held['parameters']:,}) predicts the losses of that size with "
            f"errors of {errors} (from the smallest to the largest budget); the mean absolute error is {held['mean_absolute_error']:.2%}."
        )

    yield from ("", "### Compute-optimal sizes", "")
    yield "For each budget of 6 N D operations, N and D with the lowest predicted loss. All rows but the first are extrapolations."
    heads = f"| 6 N D | N | {level} interval | D | {level} interval | loss |"
    yield from ("", heads, "|---|---|---|---|---|---|")
    for row in fit["optimum"]:
        (n, *of_n), (d, *of_d) = row["parameters"], row["tokens"]
        yield (
            f"| {row['flops']:.0e} | {n:.2g} | {of_n[0]:.2g} to {of_n[1]:.2g} | {d:.2g} | {of_d[0]:.2g} to {of_d[1]:.2g} | "
            f"{row['loss']:.3f} |"
        )


def _limits_section(result: Result) -> Iterator[str]:
    cost = result["cost"]
    smallest, largest = (f(run["parameters"] for run in result["runs"]) for f in (min, max))
    yield "## Limits of this study"
    yield ""
    yield (
        f"- The models have {smallest:,} to {largest:,} parameters, a factor of {largest / smallest:.0f}. Over so short a range the "
        "study tests the method; do not use its constants for models of other sizes."
    )
    if corpus := result["corpus_tokens"]:
        most = max(run["tokens"] for run in result["runs"])
        yield (
            f"- The data has {corpus:,} tokens, and the longest run reads it {most / corpus:.1f} times. Repeated tokens lower the loss less "
            "than new ones; the law makes no difference between them."
        )

    yield (
        "- All sizes have the learning rate and the batch of the study file. If other values suit some sizes better, this changes the "
        "exponents."
    )
    yield (
        "- 6 N D is the usual estimate of the floating-point operations of training. The column FLOPs counts the matrices, the head and "
        "the attention of each model (`forge_core.flops_per_token`)."
    )
    yield (
        "- The intervals are wide because the runs are few. They do not include the effect of the corpus, of its order in each seed, or "
        "of the held-out set, because all runs share them."
    )

    yield ""
    yield (
        f"Cost: {cost['processor_seconds']:,.0f} processor seconds in {cost['processes']} processes, threads of each: {result['threads']}; "
        f"{cost['flops']:.2e} FLOPs, trunks included; commit {cost['commit']}. `forge-train sweep STUDY.toml --report PAGE.md` "
        "trains what is missing and writes this page, its picture and its numbers (.json)."
    )


# ---- the plot


def draw(result: Result, path: Path) -> None:
    """Plot loss by tokens, one color a size, and by operations with the lowest loss of the law. Needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    fits = result["fits"]
    figure = Figure(figsize=(10, 4.2 * len(fits)), layout="constrained")
    for (left, right), fit in zip(figure.subplots(len(fits), 2, squeeze=False), fits):
        kind = (fit["optimizer"], fit["schedule"])
        mine = [run for run in result["runs"] if (run["optimizer"], run["schedule"]) == kind]
        law = None
        if "refused" not in fit:
            constants = {name: values[0] for name, values in fit["constants"].items()}
            law = ScalingFit(**constants, objective=fit["objective"])
        _by_tokens(left, mine, law)
        _by_flops(right, mine, law)

        name = ", ".join(filter(None, kind))
        lines = "no law" if law is None else "lines: the law"
        title = f"{name}: loss by tokens (points: runs, {lines})".removeprefix(": ")
        left.set_title(title, fontsize=10)
        right.set_title("The same by compute: which size is best for a budget?", fontsize=10)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "forge"}):
        figure.savefig(path, metadata={"Date": None})


def _by_tokens(axes: Any, runs: Sequence[dict[str, Any]], law: ScalingFit | None) -> None:
    """The runs by tokens, and the law's loss of each size."""
    seen = [run["tokens"] for run in runs]
    tokens = _spread(min(seen), max(seen))
    for color, size, own in _sizes(runs):
        losses = [r["val_loss"] for r in own]
        axes.plot([r["tokens"] for r in own], losses, "o", color=color, label=f"N = {size:,}")
        if law is not None:
            axes.plot(tokens, [law.loss(size, d) for d in tokens], color=color, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("D: tokens that a run has seen")
    axes.set_ylabel("held-out loss, nats per token")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _by_flops(axes: Any, runs: Sequence[dict[str, Any]], law: ScalingFit | None) -> None:
    """The runs by 6 N D, the law's loss of each size, and its lowest loss of each budget."""
    work = [6.0 * run["parameters"] * run["tokens"] for run in runs]
    budgets = _spread(min(work), 3 * max(work))
    for color, size, own in _sizes(runs):
        losses = [r["val_loss"] for r in own]
        axes.plot([6.0 * size * r["tokens"] for r in own], losses, "o", color=color)
        if law is not None:
            predicted = [law.loss(size, c / (6.0 * size)) for c in budgets]
            axes.plot(budgets, predicted, color=color, linewidth=1)
    if law is not None:
        best = [law.loss(*law.optimum(c)) for c in budgets]
        axes.plot(budgets, best, "k--", label="best N of each budget, by the law")
        axes.legend(fontsize=8)

    measured = [run["val_loss"] for run in runs]
    low, high = min(measured), max(measured)
    axes.set_ylim(low - 0.15 * (high - low), high + 0.15 * (high - low))
    axes.set_xscale("log")
    axes.set_xlabel("6 N D: floating-point operations of a run (N: parameters)")
    axes.set_ylabel("held-out loss, nats per token")
    axes.grid(alpha=0.3)


def _sizes(runs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """(color, parameters, runs) of each size."""
    for number, size in enumerate(dict.fromkeys(run["parameters"] for run in runs)):
        yield f"C{number}", size, [run for run in runs if run["parameters"] == size]


def _spread(low: float, high: float, number: int = 60) -> list[float]:
    """Points that are evenly spread on a logarithmic axis."""
    return [low * (high / low) ** (k / (number - 1)) for k in range(number)]
