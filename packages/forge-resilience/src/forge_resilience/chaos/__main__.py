"""Inject faults into a command, restart it after each, and report whether it recovered.

    python -m forge_resilience.chaos --seed 1 --faults 20 -- torchrun --nproc 2 train.py
    python -m forge_resilience.chaos --kinds kill_rank,flip_bit --files 'runs/a/checkpoints/step-*/*.bin' -- ...

The command must resume by itself when it is started again, and enter its phases by `forge_resilience.heartbeat`.
Each fault is one line of JSON on stdout; the command's own output goes to --output. Leaves with 0 if after each
fault the command ended within --limit-seconds, left no process and made progress when it was started again,
and with 1 otherwise. Kinds of files need --files, which are damaged between two attempts.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
from pathlib import Path

from forge_resilience._shared.paths import user_path
from forge_resilience.chaos.faults import FILE_KINDS, PROCESS_KINDS
from forge_resilience.chaos.schedule import BETWEEN, failure_rate_bound, make_schedule
from forge_resilience.chaos.trial import Trial

_KINDS = "kill_rank,kill_all,kill_launcher,segfault,abort,pause,term,term_rank,usr1,term_then_kill,storm"  # fmt: skip
_PHASES = "start,load,data,step,evaluate,save,exit"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code, 2 for wrong arguments."""
    prog, form = "python -m forge_resilience.chaos", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="the same seed gives the same faults")
    add("--faults", type=int, default=10, help="how many")
    add("--ranks", type=int, default=1, help="a fault hits one of so many ranks")
    add("--kinds", default=_KINDS, help=f"of {', '.join([*PROCESS_KINDS, *FILE_KINDS])}")
    add("--phases", default=_PHASES, help="of the heartbeat, in which faults are injected")
    add("--files", default="", help="a pattern of files to damage, in quotes")
    add("--codes", default="", help="exit codes that an attempt with a fault may have; any")
    add("--limit-seconds", type=float, default=120.0, help="for each wait")
    add("--output", type=user_path, default=Path("chaos.log"))
    add("command", nargs=argparse.REMAINDER, help="-- and the command")

    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    kinds = [kind for kind in args.kinds.split(",") if kind]

    unknown = [kind for kind in kinds if kind not in PROCESS_KINDS and kind not in FILE_KINDS]
    if unknown:
        parser.error(f"--kinds {','.join(unknown)} must be of the list that --help shows")
    if not command:
        parser.error("a command must follow --; such as -- python train.py")
    if not args.files and any(kind in FILE_KINDS for kind in kinds):
        parser.error("kinds of files need --files; name a pattern, in quotes")

    phases = {kind: args.phases.split(",") if kind in PROCESS_KINDS else [BETWEEN] for kind in kinds}  # fmt: skip

    trial = Trial(
        command,
        output=args.output,
        files=lambda: files_of(str(user_path(args.files))),
        codes=[int(code) for code in args.codes.split(",")] if args.codes else None,
        limit_seconds=args.limit_seconds,
    )
    injected = failures = 0
    for result in trial.run(make_schedule(args.seed, args.faults, phases, args.ranks)):
        print(json.dumps(result.row), flush=True)
        injected += result.injection is not None
        failures += bool(result.problem)

    bound = failure_rate_bound(min(failures, injected), injected)
    print(f"{injected} of {args.faults} faults injected, {failures} failures; rate of failures below {bound:.2g} (95 %)",
          file=sys.stderr)  # fmt: skip
    return int(bool(failures))


def files_of(pattern: str) -> list[Path]:
    """Return the file with that name, else the files that match the pattern."""
    names = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    return [Path(name) for name in names]


if __name__ == "__main__":
    sys.exit(main())
