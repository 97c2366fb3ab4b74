"""The forge-ckpt command line: nine verbs of :mod:`forge_ckpt.verbs`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from forge_ckpt._shared.paths import user_path
from forge_ckpt.verbs.compare import diff
from forge_ckpt.verbs.look import cat, inspect, ls, verify
from forge_ckpt.verbs.rewrite import average, convert, prune, reshard

#: While it is active, arguments of type Path take a leading `~/` as the home folder.
_PATHS = tyro.constructors.ConstructorRegistry()
_VERBS = (ls, inspect, verify, cat, diff, average, prune, reshard, convert)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code."""
    with _PATHS:
        code: int = tyro.extras.subcommand_cli_from_dict(
            {verb.__name__: verb for verb in _VERBS},
            prog="forge-ckpt",
            description="Look at checkpoints, compare and rewrite them. "
            "Exit codes: 0, 1 they differ (diff), 66 corrupt, 78 wrong usage.",
            args=arguments,
            use_underscores=True,
        )
    return code


@_PATHS.primitive_rule
def _path(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    if info.type is not Path:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        1,
        "PATH",
        lambda words: user_path(words[0]),
        lambda x: isinstance(x, Path),
        lambda x: [str(x)],
    )
