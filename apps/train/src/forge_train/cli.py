"""The forge-train command: verbs, exit codes, and nothing that a library user would need.

Each verb imports its heavy modules itself, so that help and errors come at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import tyro
from rich.console import Console

from forge_resilience import ExitCode, rank_process
from forge_resilience.stop import interruptible, leave_on_signal
from forge_train import process
from forge_train._shared.limits import limit_problem
from forge_train._shared.paths import user_path
from forge_train._shared.problems import Problem, invalid, problems_of
from forge_train.command_line import call_verb, parse_arguments, take_nproc, with_new_names
from forge_train.errors import ConfigError, DataError, JobError, of_limit, refuse

if TYPE_CHECKING:
    from forge_train.build.resolve import ResolvedJob
    from forge_train.config.layers import Layers

__all__ = ["job_arguments", "main", "run_verb"]

#: Verbs of forge-lab, which mounts them.
OF_LAB = ("generate", "eval", "extract", "report", "goodput", "replay", "bisect", "sweep", "grid",
          "study")  # fmt: skip
#: Verbs that join a process group under a launcher.
_OF_RANKS = ("run", "eval", "extract", "replay", "study")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one verb and exit with its code."""
    args = list(sys.argv[1:] if argv is None else argv)
    is_run = args[:1] == ["run"]
    has_ranks = bool(args) and args[0] in _OF_RANKS
    rank_process.prepare(is_run)
    with contextlib.suppress(OSError):  # a folder that is gone
        # import paths of a configuration find modules in the working folder, after all that is installed
        sys.path.append(os.getcwd())
    process.end(int(_dispatch(args)), is_run, has_ranks)


def _dispatch(args: list[str]) -> int:
    """`run_verb`, whose errors are printed; the exit code."""
    try:
        return run_verb(args)
    except JobError as error:
        return process.print_error(of_limit(error))
    except SystemExit as stop:  # after help
        if not isinstance(stop.code, int):
            raise

        return stop.code
    except KeyboardInterrupt:  # outside the loop, which has a handler of its own
        if args[0] not in (*VERBS, *OF_LAB):
            raise
        return process.fail(["interrupted; what was saved before is intact"], ExitCode.REQUEUE)
    except Exception as error:
        cause = process.problems_of_a_lost_rank(error)
        if cause is None and (limit := limit_problem(error)):
            cause = [str(limit)]
        # problems of a package, such as a file of the run that is a FIFO
        if cause is None and getattr(error, "problems", None):
            cause = str(error).splitlines()
        if cause is None:
            raise
        return process.fail(cause, ExitCode.ERROR)


def run_verb(args: list[str]) -> int:
    """Run a verb with its arguments, for its exit code. JobError for what it rejects, SystemExit after help."""
    if not args:
        print(_FIRST_LINES)
        return ExitCode.DONE
    verb, rest = args[0], args[1:]
    if verb in ("--help", "-h"):
        return _help()
    if verb == "--version":
        return _version()
    if verb in (*VERBS, *OF_LAB):
        _check_doubles(rest)

    if verb in VERBS:
        return VERBS[verb](rest)
    mounted = _mounted()
    if verb in mounted:
        return int(mounted[verb].load()(rest))
    if verb in OF_LAB:
        rule, fix = "is a verb of forge-lab, which is not installed", "pip install forge-lab"
        raise invalid("VERB", "requires", verb, rule, fix, kind=ConfigError)
    fix = f"use one of {', '.join([*VERBS, *mounted])}"
    raise invalid("VERB", "unknown", verb, "is not a verb of forge-train", fix, kind=ConfigError)


@dataclasses.dataclass(frozen=True)
class ProcessFlags:
    """The flag that `take_nproc` reads, for the help of a verb."""

    nproc: int | None = None
    """processes on this machine; without it one, or those of a launcher"""


def run(args: list[str]) -> int:
    """Train the job that CONFIG describes, or resume from the newest checkpoint in its run directory.

    `--nproc N` starts N processes on this machine; under torchrun, srun or RANK/WORLD_SIZE each
    process is one rank of the job. With `resilience.watch.action = "restart"` a process that this one
    starts trains, and is started again after a crash or a hang.
    """
    nproc, rest = take_nproc(args)
    layers, _ = job_arguments(rest, "run", run.__doc__ or "", ProcessFlags)
    from forge_train.build.resolve import resolve  # imports torch, after a file that cannot be read

    job = resolve(layers)
    supervised = job.config.resilience.watch.action == "restart" and rank_process.may_supervise()
    if supervised or (nproc is not None and nproc > 1):
        return _supervise(job, rest, nproc or 1)
    from forge_train.loop.trainer import Trainer
    from forge_train.report.summary import print_summary

    trainer = Trainer(job)
    met = rank_process.leave_with_launcher()
    with process.init_ranks(trainer.config.parallel, {"configuration": job.digest()}) as meshes:
        met()
        result = trainer.fit(
            meshes, rank_process.early_stop if rank_process.is_rank_of_many() else None
        )
        # the run is over: a signal during the sample ends the process with the run's code at once
        leave_on_signal(result.exit_code)
        with interruptible(result.exit_code):
            print_summary(trainer, result, rest)
    return result.exit_code


def _check_doubles(args: Sequence[str]) -> None:
    """ConfigError for a flag that is given twice: parsers would take the last one silently."""
    names = [arg.partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--")]
    refuse(
        Problem(f"--{name[2:]}", "duplicate", ..., f"is given {count} times", "leave one out")
        for name, count in Counter(names).items()
        if count > 1 and name != "__over"  # a grid has one for each key
    )


def _supervise(job: ResolvedJob, args: list[str], nproc: int) -> int:
    """Run the same command in `nproc` processes; problems of the layout are found here, once."""
    from forge_resilience.alerts import FOLLOWED, follow
    from forge_resilience.supervise import run_guarded, supervise
    from forge_train.build.data import tokenize
    from forge_train.build.layout import require_layout
    from forge_train.build.run_directory import RunDirectory

    require_layout(job.config, nproc, nproc)
    tokenize(job.config)  # here, where no watch takes a long start for a hang
    command = [sys.executable, "-m", "forge_train", "run", *args]
    environ = {**os.environ, "FORGE_NPROC": str(nproc), FOLLOWED: str(os.getpid())}

    paths = RunDirectory(job.config.run.dir)

    with follow(paths.events, job.config.resilience.alerts):  # outlives ranks that are killed
        return run_guarded(
            lambda guard: (
                supervise(
                    command,
                    nproc,
                    environ,
                    config=job.config.resilience.watch,
                    journal=paths.events,
                    expects_heartbeats=True,
                    guard=guard,
                    hand_over_port=True,
                ).code
            )
        )


@dataclasses.dataclass(frozen=True)
class ExplainFlags(ProcessFlags):
    """The flags of `explain`, in addition to the keys of the configuration."""

    plot: str | None = None
    """write learning rates and batch over the run here, .png, .svg or .pdf"""
    parameters: bool = False
    """list the model's parameters: shape, kind, weight decay, optimizer"""
    changed: bool = False
    """print only the keys whose values are not defaults"""


def explain(args: list[str]) -> int:
    """Print the resolved configuration of CONFIG: each value and where it came from. The data need not be there.

    With `--nproc N` also what keeps N processes from running it, the layout that they get, and what their
    number costs; where phases of the data begin; with `--parameters` a line for each parameter of the model; and with
    `--plot FILE` a plot of learning rates and batch over the run.
    """
    from forge_core.optim import schedule_warnings
    from forge_data.describe import data_lines
    from forge_data.errors import InvalidData
    from forge_train.build.resolve import resolve_to_show
    from forge_train.report.describe import print_explanation
    from forge_train.report.planned import check_picture, draw_plan, parameter_lines, phase_lines

    nproc, rest = take_nproc(args)
    layers, flags = job_arguments(rest, "explain", explain.__doc__ or "", ExplainFlags)
    picture = None if flags.plot is None else user_path(flags.plot)
    if picture is not None:
        check_picture(picture)
    job, missing = resolve_to_show(layers)

    data = job.config.data
    lines = [f"data is not checked: {problem}" for problem in missing]
    try:
        lines += [] if missing else data_lines(data)
    except InvalidData as error:
        raise DataError(problems_of(error), error.where) from error

    lines += schedule_warnings(job.config.optimizer, job.config.schedule)
    if nproc is not None:
        job, of_layout = _on_processes(job, nproc)
        lines += of_layout
    # a file or a pipe takes origins without line breaks, so that grep finds them
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 1000
    print_explanation(job, Console(width=wide), flags.changed)

    if job.config.data.phases:
        lines += phase_lines(job.config)
    if picture is not None:
        lines.append(draw_plan(job.config, picture))
    if flags.parameters:
        lines += parameter_lines(job.config)
    for line in lines:
        print(line)
    return ExitCode.DONE


def _on_processes(job: ResolvedJob, nproc: int) -> tuple[ResolvedJob, list[str]]:
    """The job with its layout on `nproc` processes of this machine, and notes about that layout."""
    from forge_parallel import World
    from forge_train.build.layout import layout_notes, require_layout
    from forge_train.plan import with_layout

    job, reasons = with_layout(job, World(world_size=nproc, local_world_size=nproc))
    require_layout(job.config, nproc, nproc)
    return job, reasons + layout_notes(job.config, job.config.parallel.axes(nproc, nproc))


def plan(args: list[str]) -> int:
    """Print the memory and time that CONFIG needs on --gpus N [--gpu h200] [--nodes M], and alternatives.

    The data need not be there.
    """
    from forge_train.build.resolve import resolve
    from forge_train.plan import PlanFlags, show_plan

    layers, flags = job_arguments(args, "plan", plan.__doc__ or "", PlanFlags)
    show_plan(resolve(layers, with_data=False).config, flags)
    return ExitCode.DONE


def slurm(args: list[str]) -> int:
    """Write a batch script that survives stops for CONFIG; --submit, --interactive and --dry_run do more or less.

    The script and the configuration as it is now go into <run.dir>/slurm. What the site is like comes from
    --site, FORGE_SITE or ~/.config/forge/site.toml, which `forge-train doctor --init` writes.
    """
    from forge_resilience.slurm import SlurmFlags
    from forge_train.slurm import run_slurm

    args = with_new_names(args, "slurm", {"--print": "--dry_run"})
    layers, flags = job_arguments(args, "slurm", slurm.__doc__ or "", SlurmFlags)
    return run_slurm(layers, flags)


@dataclasses.dataclass(frozen=True)
class DoctorFlags:
    """The flags of `doctor`."""

    config: tyro.conf.Positional[str | None] = None
    """a job: its data and run directory are looked at, too"""
    json: bool = False
    """print one JSON object instead of a table"""
    requires: str | None = None
    """what must be there, by comma: slurm, multi-node, gpu"""
    init: bool = False
    """write the site file from what Slurm says of this cluster"""
    site: str | None = None
    """site file, or its name in ~/.config/forge; without it FORGE_SITE, site"""


def doctor(args: list[str]) -> int:
    """Print the abilities of this machine and missing packages: 0 ready, 1 something missing, 2 broken."""
    flags = parse_arguments(DoctorFlags, args, "doctor", doctor.__doc__)
    from forge_train.doctor import examine, required_findings, write_site

    if flags.init:
        return write_site(flags.site)
    return examine(flags.json, required_findings(flags.requires, flags.config, flags.site))


def import_(args: list[str]) -> int:
    """Write the weights of a Hugging Face folder as step 0 of a new run, and its [model] table."""
    from forge_train.hf.importing import import_folder

    return call_verb(import_folder, [a for a in args if a != "--check"], "import")  # the default


def export(args: list[str]) -> int:
    """Write a checkpoint of a run as a folder that transformers loads: weights, config.json, tokenizer."""
    from forge_train.hf.exporting import export_run

    return call_verb(export_run, args, "export")


def keys(args: list[str]) -> int:
    """Print the keys of a configuration file that begin with PREFIX, or all; each is also a flag of run and explain."""
    from forge_train.report.describe import print_keys

    def show(prefix: Annotated[str, tyro.conf.Positional] = "", /) -> int:
        return print_keys(prefix, Console())

    return call_verb(show, args, "keys", keys.__doc__)


def schema(args: list[str]) -> int:
    """Print the JSON schema of a configuration file, for editors: `forge-train schema > forge.schema.json`."""
    import json

    from forge_train.report.json_schema import json_schema

    def show() -> int:
        print(json.dumps(json_schema(), indent=1))
        return ExitCode.DONE

    return call_verb(show, args, "schema", schema.__doc__)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "run": run,
    "explain": explain,
    "keys": keys,
    "schema": schema,
    "plan": plan,
    "slurm": slurm,
    "import": import_,
    "export": export,
    "doctor": doctor,
}


def _mounted() -> dict[str, EntryPoint]:
    """Verbs of installed distributions: `forge-train ckpt ...` is `forge-ckpt ...`, and those of forge-lab."""
    return {entry.name: entry for entry in entry_points(group="forge.commands")}


def job_arguments(args: list[str], verb: str, description: str, own: type) -> tuple[Layers, Any]:
    """The file that the first argument names with the keys of the others laid over it, and the verb's own flags `own`."""
    from forge_train.config.layers import Layers, read_layers

    config = args[0] if args and not args[0].startswith("-") else None
    if config is None and not {"-h", "--help"} & set(args):
        rule, fix = "must name a TOML file", f"write forge-train {verb} CONFIG.toml"
        raise invalid("CONFIG", "missing", ..., rule, fix, kind=ConfigError)
    layers = Layers() if config is None else read_layers(config)
    rest = args if config is None else args[1:]
    if any("." in arg for arg in rest):
        # imports torch, which takes seconds: a file that cannot be read is refused before
        from forge_train.config.flags import add_flags

        rest = add_flags(layers, rest)
    try:
        return layers, parse_arguments(own, rest, f"{verb} CONFIG.toml", description)
    except SystemExit:  # after help
        from forge_train.report.describe import print_keys

        print("keys of CONFIG.toml, each also a flag: --KEY VALUE\n")
        print_keys("", Console(), layers.values)
        raise


#: What a user of the bare command needs.
_FIRST_LINES = """\
usage: forge-train VERB ...

  forge-train run CONFIG.toml             train, or go on from the newest checkpoint
  forge-train run CONFIG.toml --nproc 2   the same with two processes; --train.steps 100 sets a key
  forge-train explain CONFIG.toml         every value and where it comes from; --changed: only what you set
  forge-train plan CONFIG.toml --gpus 8   memory and time on GPUs, and better layouts
  forge-train slurm CONFIG.toml           a batch script that survives preemption
  forge-train report RUN                  a page of curves and events of a run
  forge-train import FOLDER, export RUN   from and to the format of Hugging Face

forge-train --help lists all verbs and exit codes; forge-train VERB --help the flags of one; forge-train keys all keys"""


def _version() -> int:
    """Versions of the installed packages that decide what a run computes; imports none of them."""
    own = "forge-train forge-lab forge-train-core forge-parallel forge-moe forge-data forge-ckpt forge-resilience forge-vlm"
    print("Python", sys.version.split()[0])
    for name in [*own.split(), "torch", "transformers", "datasets"]:
        with contextlib.suppress(PackageNotFoundError):
            print(name, version(name))
    return ExitCode.DONE


def _help() -> int:
    print("usage: forge-train VERB ...   (forge-train VERB --help lists its flags)\n\nverbs")
    for name, verb in VERBS.items():
        print(f"  {name:10} {(verb.__doc__ or '').splitlines()[0]}")
    mounted = _mounted()
    for name, entry in mounted.items():
        about = f"The command line of {entry.value.split('.')[0]}."
        if name in OF_LAB:
            about = (entry.load().__doc__ or "").splitlines()[0]
        print(f"  {name:10} {about}")
    for name in (name for name in OF_LAB if name not in mounted):
        print(f"  {name:10} A verb of forge-lab: pip install forge-lab")
    print("\nexit codes")
    for code in ExitCode:
        print(f"  {int(code):<10} {code.name.lower().replace('_', ' ')}")
    return ExitCode.DONE
