"""The forge-ckpt command. Its exit codes are in docs/exit-codes.md."""

import sys
from collections.abc import Sequence

from forge_ckpt._shared.limits import limit_problem
from forge_ckpt._shared.streams import tolerate
from forge_ckpt.errors import CorruptCheckpoint, StoreInUse, one_line

OK, LIMIT, CORRUPT, WRONG_USAGE, INTERRUPTED = 0, 1, 66, 78, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are one message on stderr, without traceback."""
    tolerate()
    try:
        from forge_ckpt.commands import run  # tyro and rich are an optional extra

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


def _fail(error: object, code: int) -> int:
    limit = limit_problem(error) if isinstance(error, BaseException) else None
    # a line for each problem: names from a disk may have line breaks of their own
    where = "" if limit else getattr(error, "where", "")
    problems = [limit] if limit else getattr(error, "problems", ())
    lines = [f"{where}: {problem}" if where else str(problem) for problem in problems]
    lines = lines or [str(error)]
    print("forge-ckpt: " + "\n".join(one_line(line, None) for line in lines), file=sys.stderr)
    return LIMIT if limit else code
