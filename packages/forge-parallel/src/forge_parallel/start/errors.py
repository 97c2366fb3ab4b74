"""The one error of a start that went wrong."""


class StartError(RuntimeError):
    """The ranks of a job did not find each other. The message names host, rank, address and cause.

    A runner maps it to an exit code of its own; nothing was computed and nothing written.
    """
