"""The forge-ckpt command line: nine verbs of :mod:`forge_ckpt.verbs`."""

from collections.abc import Sequence

import tyro

from forge_ckpt.verbs.compare import diff
from forge_ckpt.verbs.look import cat, inspect, ls, verify
from forge_ckpt.verbs.rewrite import average, convert, prune, reshard

_VERBS = (ls, inspect, verify, cat, diff, average, prune, reshard, convert)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code."""
    code: int = tyro.extras.subcommand_cli_from_dict(
        {verb.__name__: verb for verb in _VERBS},
        prog="forge-ckpt",
        description="Look at checkpoints, compare and rewrite them. "
        "Exit codes: 0, 1 they differ (diff), 66 corrupt, 78 wrong usage.",
        args=arguments,
        use_underscores=True,
    )
    return code
