"""`--parallel.AXIS N` of verbs that open a finished run: the ranks that compute, whatever the run was trained on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

import tyro

from forge_parallel import ParallelConfig
from forge_train.errors import config_errors

_HELP = {field.name: field.metadata["help"] for field in fields(ParallelConfig)}


@dataclass(frozen=True)
class Axes:
    """Keys of [parallel]; ranks that no axis takes read data of their own."""

    dp_replicate: Annotated[int, tyro.conf.arg(help=_HELP["dp_replicate"])] = 1
    tp: Annotated[int, tyro.conf.arg(help=_HELP["tp"])] = 1
    sequence_parallel: Annotated[
        Literal["true", "false"], tyro.conf.arg(help=_HELP["sequence_parallel"])
    ] = "true"
    cp: Annotated[int, tyro.conf.arg(help=_HELP["cp"])] = 1
    pp: Annotated[int, tyro.conf.arg(help=_HELP["pp"])] = 1
    ep: Annotated[int, tyro.conf.arg(help=_HELP["ep"])] = 1

    def parallel(self, device: str) -> ParallelConfig:
        """The layout, in fp32. ConfigError for a value out of range."""
        whole = self.sequence_parallel == "false"
        axes = {name: getattr(self, name) for name in ("dp_replicate", "tp", "cp", "pp", "ep")}
        with config_errors("parallel"):
            return ParallelConfig(
                device=device,  # type: ignore[arg-type]
                precision="fp32",
                sequence_parallel=not whole,
                **axes,
            )
