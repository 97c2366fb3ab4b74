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
from forge_train.command_line import call_verb, parse_arguments, take_nproc
from forge_train.errors import ConfigError


def generate(args: list[str]) -> int:
    """Continue a text, or each of a file, by a run's newest good checkpoint or a Hugging Face folder."""
    from forge_lab.text import stream_text

    return call_verb(stream_text, args, "generate")


def evaluate(args: list[str]) -> int:
    """Evaluate a checkpoint of a run: its own held-out rows and questions, or those of another file.

    `--nproc N` starts N processes on this machine, which share the work by `--parallel.tp` and the other axes; under
    torchrun, srun or RANK/WORLD_SIZE each process is one rank.
    """
    from forge_lab.evaluate import EvalFlags, print_evaluation

    return _on_ranks("eval", EvalFlags, print_evaluation, args, evaluate.__doc__)


def extract(args: list[str]) -> int:
    """Write activations of a checkpoint on a run's held-out rows as one .npz file; go on if it was killed.

    An --output without suffix is a folder of safetensors. Without --points and --output it lists the model's points.
    `--nproc N` and `--parallel.tp` as in eval.
    """
    from forge_lab.extract import ExtractFlags, run_extract

    return _on_ranks("extract", ExtractFlags, run_extract, args, extract.__doc__)


def report(args: list[str]) -> int:
    """Write one page about a run, or about several side by side; --text prints where the seconds went.

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
        text: Annotated[
            bool,
            tyro.conf.arg(help="print the seconds of a run and its best save interval instead"),
        ] = False,
        json: Annotated[bool, tyro.conf.arg(help="print them as one JSON object")] = False,
    ) -> int:
        if text and json:
            raise invalid("--text", "json", ..., "excludes --json", "give one", kind=ConfigError)
        if not runs or ((text or json) and len(runs) > 1):
            rule, fix = "must be one run, or more for a page", "give its folder"
            raise invalid("RUNS", "length", [*map(str, runs)], rule, fix, kind=ConfigError)
        if text or json:
            if output is not None:
                rule, fix = "is the file of a page, not of --text or --json", "leave one out"
                raise invalid("--output", "excludes", str(output), rule, fix, kind=ConfigError)
            from forge_lab.report.goodput import print_report

            print_report(runs[0], json)
            return 0
        from forge_lab.report.page import write_page

        print(write_page(runs, output))
        return 0

    return call_verb(options, args, "report", report.__doc__)


#: Verbs of `study`: the function that tyro calls, by import path.
STUDIES: dict[str, str] = {
    "replay": "forge_lab.study.verbs.replay",
    "bisect": "forge_lab.study.verbs.bisect",
    "sweep": "forge_lab.study.sweep.run_sweep",
}


def study(args: list[str]) -> int:
    """Train a step of a run again, find where two runs part, or train a scaling study; `forge-train study` lists the verbs."""
    from pydoc import locate

    if not args or args[0] in ("-h", "--help"):
        print(
            "usage: forge-train study VERB ...   (forge-train study VERB --help says more)\n\nverbs"
        )
        for name, path in STUDIES.items():
            print(f"  {name:10} {(locate(path).__doc__ or '').splitlines()[0]}")
        return 0
    if args[0] not in STUDIES:
        rule, fix = "is not a verb of forge-train study", f"use one of {', '.join(STUDIES)}"
        raise invalid("study", "unknown", args[0], rule, fix, kind=ConfigError)
    call: Any = locate(STUDIES[args[0]])
    return call_verb(call, args[1:], f"study {args[0]}")


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
