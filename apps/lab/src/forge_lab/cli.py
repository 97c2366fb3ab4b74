"""Verbs of `forge-train`, mounted by the entry points of group forge.commands.

Heavy modules are imported by the verb that needs them: help and errors come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from forge_lab._shared.problems import invalid
from forge_train.command_line import (
    call_verb,
    parse_arguments,
    take_nproc,
    warn_renamed,
    with_new_names,
)
from forge_train.errors import ConfigError


def generate(args: list[str]) -> int:
    """Continue a text, or each of a file, by a run's newest good checkpoint or a Hugging Face folder."""
    from forge_lab.text import stream_text

    args = with_new_names(args, "generate", {"--rows": "--batch_size"})
    return call_verb(stream_text, args, "generate")


def evaluate(args: list[str]) -> int:
    """Evaluate a checkpoint of a run: its own held-out rows and questions, or those of another file.

    `--nproc N` starts N processes on this machine, which share the work by `--parallel.tp` and the other axes; under
    torchrun, srun or RANK/WORLD_SIZE each process is one rank.
    """
    from forge_lab.evaluate import EvalFlags, print_evaluation

    args = with_new_names(args, "eval", {"--rows": "--batch_size"})
    return _on_ranks("eval", EvalFlags, print_evaluation, args, evaluate.__doc__)


def extract(args: list[str]) -> int:
    """Write activations of a checkpoint on a run's held-out rows as one .npz file; go on if it was killed.

    An --output without suffix is a folder of safetensors. Without --points and --output it lists the model's points.
    `--nproc N` and `--parallel.tp` as in eval.
    """
    from forge_lab.extract import ExtractFlags, run_extract

    args = with_new_names(args, "extract", {"--batch": "--batch_size"})
    return _on_ranks("extract", ExtractFlags, run_extract, args, extract.__doc__)


def report(args: list[str]) -> int:
    """Write one page about a run, or about several side by side.

    The page is one HTML file that needs no network: curves, speed, seconds by cause over all lives, experts, keys
    that differ, machines, samples. It is <run.dir>/report.html, or --output.
    """

    def options(
        runs: Annotated[
            tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(help="folders of runs")
        ],
        /,
        output: Annotated[
            Path | None, tyro.conf.arg(help="the page to write, needed for several runs")
        ] = None,
    ) -> int:
        if not runs:
            rule, fix = "must be one run or more", "give its folder"
            raise invalid("RUNS", "length", [], rule, fix, kind=ConfigError)
        from forge_lab.report.page import write_page

        print(write_page(runs, output))
        return 0

    if {"--text", "--json"} & set(args):
        warn_renamed("report --text and report --json", "goodput and goodput --json")
        return goodput([arg for arg in args if arg != "--text"])
    return call_verb(options, args, "report", report.__doc__)


def goodput(args: list[str]) -> int:
    """Print where the seconds of a run went, over all of its lives, and its best interval of saves."""

    def options(
        run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="folder of a run")],
        /,
        json: Annotated[bool, tyro.conf.arg(help="print one JSON object")] = False,
    ) -> int:
        from forge_lab.report.goodput import print_goodput

        print_goodput(run, json)
        return 0

    return call_verb(options, args, "goodput", goodput.__doc__)


def replay(args: list[str]) -> int:
    """Train a step of a run again, exactly, and list the documents that it saw."""
    from forge_lab.study import verbs

    if "--set" in args:
        warn_renamed("replay --set KEY=VALUE", "replay --KEY VALUE")
    return call_verb(verbs.replay, _keys_last(args), "replay")


def bisect(args: list[str]) -> int:
    """Find the first step and module at which two runs of one model differ, by replays of both."""
    from forge_lab.study import verbs

    return call_verb(verbs.bisect, args, "bisect")


def sweep(args: list[str]) -> int:
    """Train the runs of a study that are not done, and fit a scaling law to them."""
    from forge_lab.study.sweep import run_sweep

    return call_verb(run_sweep, with_new_names(args, "sweep", {"--plan": "--dry_run"}), "sweep")


def _keys_last(args: list[str]) -> list[str]:
    """Arguments with each `--section.key value` after all others, as a word `section.key=value` of `--set`."""
    rest, words, left = list[str](), list[str](), list(args)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(name + equals + value)
            continue
        value = value if equals or not left else left.pop(0)
        words.append(f"{name[2:].replace('-', '_')}={value}")
    return [*rest, "--set", *words] if words else rest


def study(args: list[str]) -> int:
    """Spelling before 0.2.0 of replay, bisect and sweep."""
    verbs = {"replay": replay, "bisect": bisect, "sweep": sweep}
    if not args or args[0] not in verbs:
        value = args[0] if args else ...
        rule, fix = "must name a verb", f"use one of {', '.join(verbs)}, without study"
        raise invalid("study", "unknown", value, rule, fix, kind=ConfigError)
    warn_renamed(f"study {args[0]}", args[0])
    return verbs[args[0]](args[1:])


def _on_ranks(
    verb: str, kind: Any, call: Callable[[Any], int], args: list[str], about: str | None
) -> int:
    """Call a function with the flags `kind` of a verb, here, or by `--nproc N` in N processes without a watch."""
    nproc, rest = take_nproc(args)
    flags = parse_arguments(kind, rest, verb, about)
    if nproc is None or nproc == 1:
        return call(flags)
    flags.check(nproc)
    from forge_resilience.local_workers import run_local_workers

    command = [sys.executable, "-m", "forge_train", verb, *rest]
    return run_local_workers(command, nproc, {**os.environ, "FORGE_NPROC": str(nproc)})
