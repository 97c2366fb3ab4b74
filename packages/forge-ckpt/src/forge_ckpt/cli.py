"""The forge-ckpt command: nine verbs of :mod:`forge_ckpt.verbs`. Its exit codes are in docs/exit-codes.md."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_ckpt._shared.limits import limit_problem
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.streams import tolerate
from forge_ckpt.errors import CorruptCheckpoint, StoreInUse, one_line

__all__ = ["main", "path_flags"]

OK, LIMIT, CORRUPT, WRONG_USAGE, INTERRUPTED = 0, 1, 66, 78, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are one message on stderr, without traceback."""
    tolerate()
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except ImportError as error:
        fix = "pip install 'forge-ckpt[cli]'"
        return _fail(f"{error.name} is needed, which is not installed; {fix}", WRONG_USAGE)
    except SystemExit as stop:  # tyro: 0 after --help, 2 after bad arguments, already explained
        return OK if not stop.code else WRONG_USAGE

    except CorruptCheckpoint as error:
        return _fail(error, CORRUPT)
    except (ValueError, OSError, MemoryError, StoreInUse) as error:
        return _fail(error, WRONG_USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted; what is committed is complete", INTERRUPTED)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code."""
    import tyro  # imported here, as it is an optional extra: `main` names the fix without it

    from forge_ckpt.verbs.compare import diff
    from forge_ckpt.verbs.look import cat, inspect, ls, verify
    from forge_ckpt.verbs.rewrite import average, convert, prune, reshard

    verbs = (ls, inspect, verify, cat, diff, average, prune, reshard, convert)
    with path_flags():
        code: int = tyro.extras.subcommand_cli_from_dict(
            {verb.__name__: verb for verb in verbs},
            prog="forge-ckpt",
            description="Look at checkpoints, compare and rewrite them. "
            "Exit codes: 0, 1 they differ (diff), 66 corrupt, 78 wrong usage.",
            args=arguments,
            use_underscores=True,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    return code


def path_flags() -> Any:
    """Return a registry of tyro; while it is active, arguments of type Path take a leading `~/` as the home folder."""
    import tyro

    def path(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        if info.type is not Path:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            1,
            "PATH",
            lambda words: user_path(words[0]),
            lambda x: isinstance(x, Path),
            lambda x: [str(x)],
        )

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(path)
    return registry


def _fail(error: object, code: int) -> int:
    """Print the problems of an error, or the limit that caused it, on stderr; returns the exit code."""
    limit = limit_problem(error) if isinstance(error, BaseException) else None
    # a line for each problem: names from a disk may have line breaks of their own
    where = "" if limit else getattr(error, "where", "")
    problems = [limit] if limit else getattr(error, "problems", ())
    lines = [f"{where}: {problem}" if where else str(problem) for problem in problems]
    lines = lines or [str(error)]
    print("forge-ckpt: " + "\n".join(one_line(line, None) for line in lines), file=sys.stderr)
    return LIMIT if limit else code
