"""Verbs of `forge-train`, mounted by the entry points of group forge.commands.

Each verb imports its heavy modules itself, so that help and errors come at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tyro.conf import Positional

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

    `--nproc N` starts N processes on this machine, which divide the work by `--parallel.tp` and the other axes; under
    torchrun, srun or RANK/WORLD_SIZE each process is one rank.
    """
    from forge_lab.evaluate import EvalFlags, print_evaluation

    args = with_new_names(args, "eval", {"--rows": "--batch_size"})
    return _on_ranks("eval", EvalFlags, print_evaluation, args, evaluate.__doc__)


def extract(args: list[str]) -> int:
    """Write activations of a checkpoint on held-out sequences as one .npz file; go on after a kill.

    An --output without suffix is a folder of safetensors. Without --points and --output it lists the model's hook points.
    `--nproc N` and `--parallel.tp` as in eval.
    """
    from forge_lab.extract import ExtractFlags, run_extract

    args = with_new_names(args, "extract", {"--batch": "--batch_size"})
    return _on_ranks("extract", ExtractFlags, run_extract, args, extract.__doc__)


def report(args: list[str]) -> int:
    """Write one page about a run, or about several side by side."""
    if {"--text", "--json"} & set(args):
        warn_renamed("report --text and report --json", "goodput and goodput --json")
        return goodput([arg for arg in args if arg != "--text"])
    return call_verb(_report, args, "report")


def _report(runs: Positional[tuple[Path, ...]], /, output: Path | None = None) -> int:
    """Write one page about a run, or about several side by side.

    The page is one HTML file that needs no network: curves, speed, seconds by cause over all restarts, experts, keys
    that differ, machines, samples. It is <run.dir>/report.html, or --output.

    Args:
        runs: folders of runs
        output: the page to write, needed for several runs
    """
    if not runs:
        rule, fix = "must be one run or more", "give its folder"
        raise invalid("RUNS", "length", [], rule, fix, kind=ConfigError)
    from forge_lab.report.page import write_page

    print(write_page(runs, output))
    return 0


def goodput(args: list[str]) -> int:
    """Print where the seconds of a run went, over all of its restarts, and its best interval of saves."""
    return call_verb(_goodput, args, "goodput")


def _goodput(run: Positional[Path], /, json: bool = False) -> int:
    """Print where the seconds of a run went, over all of its restarts, and its best interval of saves.

    Args:
        run: folder of a run
        json: print one JSON object
    """
    from forge_lab.report.goodput import print_goodput

    print_goodput(run, json)
    return 0


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


def grid(args: list[str]) -> int:
    """Train CONFIG once for each combination of values of some keys, and compare the runs.

    `--over optimizer.lr=1e-4:1e-2:5log --over model.dim=32,64` makes ten runs, in --dir/runs; `--KEY VALUE` sets a key of all.
    All are checked before the first one starts. Ctrl-C lets them save; the same command trains what is missing.
    Ends with 0 if all runs are done.
    """
    from forge_lab.study.grid import GridFlags, run_grid
    from forge_train.cli import job_arguments  # which mounts this module

    return run_grid(*job_arguments(args, "grid", grid.__doc__ or "", GridFlags))


def _keys_last(args: list[str]) -> list[str]:
    """Move each `--section.key value` after the other arguments, as `section.key=value` after `--set`."""
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
    """Run replay, bisect or sweep by the spelling before 0.2.0."""
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
    """Call a function with the flags `kind` of a verb in this process, or run the verb in `--nproc N` processes."""
    nproc, rest = take_nproc(args)
    flags = parse_arguments(kind, rest, verb, about)
    if nproc is None or nproc == 1:
        return call(flags)

    flags.check(nproc)
    from forge_lab.study.verbs import start_ranks

    return start_ranks(nproc, [verb, *rest])
