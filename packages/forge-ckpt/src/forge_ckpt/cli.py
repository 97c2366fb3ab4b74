"""The forge-ckpt command. Exit codes: 0, 1 ``diff`` found differences, 66 corrupt, 78 wrong usage."""

import sys
from collections.abc import Sequence

from forge_ckpt.errors import CorruptCheckpoint, StoreInUse, one_line

OK, CORRUPT, WRONG_USAGE, INTERRUPTED = 0, 66, 78, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are one message on stderr, without traceback."""
    try:  # tyro and rich are an optional extra, so the import is here
        from forge_ckpt.commands import run
    except ImportError as error:
        print(
            f"forge-ckpt needs {error.name}, which is not installed; pip install 'forge-ckpt[cli]'",
            file=sys.stderr,
        )
        return WRONG_USAGE
    try:
        return run(arguments)
    except SystemExit as stop:  # tyro: 0 after --help, 2 after bad arguments, already explained
        return OK if not stop.code else WRONG_USAGE
    except CorruptCheckpoint as error:
        return _fail(error, CORRUPT)
    except (ValueError, OSError, StoreInUse) as error:
        return _fail(error, WRONG_USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted; what is committed is complete", INTERRUPTED)


def _fail(error: object, code: int) -> int:
    # a line for each problem: names from a disk may have line breaks of their own
    where, problems = getattr(error, "where", ""), getattr(error, "problems", ())
    lines = [f"{where}: {problem}" if where else str(problem) for problem in problems]
    lines = lines or [str(error)]
    print("forge-ckpt: " + "\n".join(one_line(line, None) for line in lines), file=sys.stderr)
    return code
