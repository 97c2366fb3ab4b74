"""The forge-data command: `prepare`, `merge`, `inspect`, `verify`. Its exit codes are in docs/exit-codes.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from forge_data._shared.limits import limit_problem
from forge_data._shared.streams import tolerate
from forge_data.errors import InvalidData

__all__ = ["main"]

OK, LIMIT, DATA_ERROR, ARGUMENT_ERROR, INTERRUPTED = 0, 1, 65, 78, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are one message on stderr, without traceback."""
    tolerate()
    try:
        from forge_data.commands import run  # tyro and rich are an optional extra

        run(arguments)
        sys.stdout.flush()

    except ImportError as error:
        fix = "pip install 'forge-data[cli]'"
        return _fail(f"{error.name} is needed, which is not installed; {fix}", ARGUMENT_ERROR)
    except SystemExit as stop:  # tyro: 0 after --help, 2 after bad arguments, already explained
        return OK if not stop.code else ARGUMENT_ERROR

    except InvalidData as error:
        return _fail(error, DATA_ERROR)
    except ValueError as error:
        return _fail(error, ARGUMENT_ERROR)
    except (OSError, MemoryError) as error:
        return _fail(error, DATA_ERROR, "; every file must be readable and the disk not full")
    except KeyboardInterrupt:
        return _fail("interrupted; the output is as it was", INTERRUPTED)
    return OK


def _fail(message: object, code: int, fix: str = "") -> int:
    limit = limit_problem(message) if isinstance(message, BaseException) else None
    print(f"forge-data: {limit or f'{message}{fix}'}", file=sys.stderr)
    return LIMIT if limit else code


if __name__ == "__main__":
    sys.exit(main())
