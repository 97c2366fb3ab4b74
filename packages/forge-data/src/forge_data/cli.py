"""The forge-data command: `prepare`, `merge`, `inspect`, `verify`. Exit codes: 0, 65 data, 78 arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from forge_data.errors import InvalidData

__all__ = ["main"]

OK, DATA_ERROR, ARGUMENT_ERROR, INTERRUPTED = 0, 65, 78, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are one message on stderr, without traceback."""
    try:  # tyro and rich are an optional extra, so the import is here
        from forge_data.commands import run
    except ImportError as error:
        print(
            f"forge-data needs {error.name}, which is not installed; pip install 'forge-data[cli]'",
            file=sys.stderr,
        )
        return ARGUMENT_ERROR
    try:
        run(arguments)
        sys.stdout.flush()
    except SystemExit as stop:  # tyro: 0 after --help, 2 after bad arguments, already explained
        return OK if not stop.code else ARGUMENT_ERROR
    except InvalidData as error:
        return _fail(error, DATA_ERROR)
    except ValueError as error:
        return _fail(error, ARGUMENT_ERROR)
    except BrokenPipeError:  # `forge-data inspect tokens | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return OK
    except OSError as error:
        return _fail(f"{error}; every file must be readable and the disk not full", DATA_ERROR)
    except KeyboardInterrupt:
        return _fail("interrupted; the output is as it was", INTERRUPTED)
    return OK


def _fail(message: object, code: int) -> int:
    print(f"forge-data: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
