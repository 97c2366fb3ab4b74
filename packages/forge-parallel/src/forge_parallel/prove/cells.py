"""Cells of a proof: the standard layouts of each number of ranks, and layouts of the caller."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from forge_parallel._shared.problems import problems_of, raise_problems
from forge_parallel.config import ParallelConfig, next_allowed_count
from forge_parallel.prove.settings import ProofSettings, ProveError, prove_error
from forge_parallel.prove.task import GLOBAL_BATCH
from forge_parallel.rules import ModelFacts, problems


@dataclass(frozen=True)
class Cell:
    """A layout on `world` ranks: keys of ParallelConfig, and the micro-batches of a data rank.

    swaps     other weights are evaluated between the steps, and the own weights restored
    branches  ranks have sequences of different ids
    on_host   no layout: one process on the device, whose reference is one process on the CPU
    """

    name: str
    world: int
    layout: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    swaps: bool = False
    branches: bool = False
    on_host: bool = False

    def config(self, settings: ProofSettings) -> ParallelConfig:
        """Return the configuration. Raises ValueError for keys that contradict each other."""
        runs = "bf16" if settings.precision == "bf16" else "fp32"
        return ParallelConfig(device=settings.device, precision=runs, **self.layout)  # type: ignore[arg-type]

    def global_batch(self, settings: ProofSettings) -> int:
        """Sequences of a step: `GLOBAL_BATCH`, or the next multiple that the data ranks and micro-batches divide."""
        readers = self.config(settings).axes(self.world).batch_size
        return math.lcm(GLOBAL_BATCH, readers * self.micro_batches)

    def rounds_as_one_rank(self, settings: ProofSettings) -> bool:
        """Whether in bf16 each rank computes the same matmuls and roundings as one rank with the same micro-batches.

        tp, cp and ep round other partial results, and inductor fuses roundings away.
        """
        config = self.config(settings)
        fused = config.compile and settings.compile_backend == "inductor"
        sharded = max(config.tp, config.cp, config.ep) > 1
        return not (sharded or fused or config.reduce_dtype == "bf16")


CELLS = (
    Cell("GPU beside CPU", 1, on_host=True),
    Cell("one rank", 1),
    Cell("one rank, accumulation", 1, micro_batches=4),
    Cell("one rank, recompute full", 1, {"recompute": "full"}),
    Cell("one rank, compile", 1, {"compile": True}),
    Cell("fsdp", 2),
    Cell("accumulation", 2, micro_batches=2),
    Cell("row by row", 2, micro_batches=4),
    Cell("branch by row", 2, micro_batches=4, branches=True),
    Cell("weights swapped", 2, swaps=True),
    Cell("recompute full", 2, {"recompute": "full"}),
    Cell("compile", 2, {"compile": True}),
    Cell("tp", 2, {"tp": 2}),
    Cell("tp, whole stream", 2, {"tp": 2, "sequence_parallel": False}),
    Cell("cp", 2, {"cp": 2}),
    Cell("pp", 2, {"pp": 2}, micro_batches=2),
    Cell("hsdp", 4, {"dp_replicate": 2}),
    Cell("hsdp, accumulation", 4, {"dp_replicate": 2}, micro_batches=2),
    Cell("fsdp x tp", 4, {"tp": 2}),
    Cell("fsdp x tp, whole stream", 4, {"tp": 2, "sequence_parallel": False}),
    Cell("fsdp x pp", 4, {"pp": 2}, micro_batches=2),
    Cell("tp x pp", 4, {"tp": 2, "pp": 2}, micro_batches=2),
    Cell("hsdp x tp", 8, {"dp_replicate": 2, "tp": 2}),
    Cell("fsdp x tp x pp", 8, {"tp": 2, "pp": 2}, micro_batches=2),
)

#: Keys that are flags of their own, that have no bound here, or that need a part which a proof does not have.
_NOT_IN_A_LAYOUT = {
    "device": "use --device",
    "precision": "use --precision",
    "layout": "set the axes",
    "param_dtype": "leave it out: updates in 16 bits need an optimizer made for them",
    "float8": "leave it out: the layout is proved without",
    "float8_all_gather": "leave it out: the layout is proved without",
}
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}


def select_cells(
    layouts: Sequence[Mapping[str, Any]],
    worlds: Iterable[int] | None,
    nproc: int | None,
    only: str,
    settings: ProofSettings,
    seq_len: int,
) -> list[Cell]:
    """Cells of the caller's `layouts` on `nproc` ranks, then those of `CELLS` with a number of ranks in `worlds` and
    `only` in their name. Raises ProveError for a layout that breaks a rule, and if no cell is left."""
    if layouts and nproc is None:
        rule = "must be given with layouts"
        raise prove_error("nproc", "missing", ..., rule, "add nproc=4 (--nproc 4)")
    cells = [_own_cell(layout, nproc or 1, settings, seq_len) for layout in layouts]

    if worlds is None:
        worlds = () if layouts else (2, 4) if nproc is None else range(1, nproc + 1)
    counts = [world for world in worlds if nproc is None or world <= nproc]
    kept = [cell for cell in CELLS if cell.world in counts and only in cell.name]
    cells += [cell for cell in kept if settings.device == "cuda" or not cell.on_host]
    if not cells:
        rule = f"and only {only!r} must leave a cell, and leave none"
        fix = "use 1, 2, 4 or 8 ranks, and a part of a name in docs/prove.md"
        raise prove_error("worlds", "empty", counts, rule, fix)
    return cells


def layout_name(layout: Mapping[str, Any]) -> str:
    """Name of the cell of a caller's layout: `tp=2 pp=2`."""
    return " ".join(f"{key}={value}" for key, value in layout.items())


def _own_cell(layout: Mapping[str, Any], world: int, settings: ProofSettings, seq_len: int) -> Cell:
    """Validate a caller's layout, keys of ParallelConfig and `micro_batches`, and return its cell.

    Raises ProveError for an unknown key or a value of the wrong type, and with every rule that the layout breaks.
    """
    keys = dict(layout)
    count = keys.pop("micro_batches", None)
    name = layout_name(layout)
    known = {f.name for f in fields(ParallelConfig)}
    for key, value in keys.items():
        if key in _NOT_IN_A_LAYOUT or key not in known:
            fix = _NOT_IN_A_LAYOUT.get(key, "use tp=2, pp=2, compile=true, micro_batches=4, ...")
            rule = "must be a key of a layout"
            raise prove_error(key, "unknown_key", ..., rule, fix, where=f"layout {name}")

        # a value of another type would be used: any text is true
        hint = get_type_hints(ParallelConfig)[key]
        types = get_args(hint) or (hint,)
        is_right = type(value) in types or (type(value), *types) == (int, float)
        if get_origin(hint) is not Literal and not is_right:  # ParallelConfig checks a Literal
            rule = f"must be {_TYPE_NAMES[types[0]]}"
            raise prove_error(key, "type", value, rule, "correct it", where=f"layout {name}")
    if count is not None and (type(count) is not int or count < 1):
        rule = "must be a number from 1 on"
        raise prove_error("micro_batches", "range", count, rule, "use 1", where=f"layout {name}")

    where = f"layout {name} on {world} ranks"
    try:
        config = Cell(name, world, keys).config(settings)
        axes = config.axes(world)
    except (ValueError, TypeError) as error:
        raise ProveError(problems_of(error), where) from error
    count = next_allowed_count(config, 1) if count is None else count
    facts = ModelFacts(seq_len=seq_len, num_micro_batches=count)
    raise_problems(where, problems(config, axes, facts), ProveError)
    return Cell(name, world, keys, count)
