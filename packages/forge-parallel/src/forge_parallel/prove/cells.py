"""The cells of a proof: layouts of a number of ranks, those that every model should have and your own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from forge_parallel._shared.problems import invalid, problems_of, raise_problems
from forge_parallel.config import ParallelConfig
from forge_parallel.legal import Facts, problems
from forge_parallel.prove.settings import ProveError, Settings
from forge_parallel.prove.task import ROWS
from forge_parallel.stages import next_allowed_count


@dataclass(frozen=True)
class Cell:
    """A layout on `world` ranks: keys of ParallelConfig, and the micro-batches of a data rank; `swaps`: other
    weights are evaluated between the steps, and the own ones put back; `branches`: ranks have rows of different ids;
    `on_host`: no layout, but one process on the device, whose truth is one process on the CPU."""

    name: str
    world: int
    layout: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    swaps: bool = False
    branches: bool = False
    on_host: bool = False

    def config(self, settings: Settings) -> ParallelConfig:
        """Its configuration. ValueError for keys that do not go together."""
        runs = "bf16" if settings.precision == "bf16" else "fp32"
        return ParallelConfig(device=settings.device, precision=runs, **self.layout)  # type: ignore[arg-type]

    def rows(self, settings: Settings) -> int:
        """Of a step: `ROWS`, or as many more as its data ranks and micro-batches divide."""
        readers = self.config(settings).axes(self.world).batch_size
        return math.lcm(ROWS, readers * self.micro_batches)

    def rounds_as_one_rank(self, settings: Settings) -> bool:
        """Whether each rank computes, in bf16, the very products and roundings that one rank would compute with the
        same micro-batches: what tp, cp and ep cut is rounded elsewhere, and inductor fuses roundings away."""
        config = self.config(settings)
        fused = config.compile and settings.compile_backend == "inductor"
        cut = max(config.tp, config.cp, config.ep) > 1
        return not (cut or fused or config.reduce_dtype == "bf16")


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

#: Keys that flags give, that have no bound here, or that a proof has no part for.
_NOT_IN_A_LAYOUT = {
    "device": "use --device",
    "precision": "use --precision",
    "layout": "set the axes",
    "param_dtype": "leave it out: updates in 16 bits need an optimizer made for them",
    "float8": "leave it out: the layout is proved without",
    "float8_all_gather": "leave it out: the layout is proved without",
}


def layout_name(layout: Mapping[str, Any]) -> str:
    """That of its cell."""
    return " ".join(f"{key}={value}" for key, value in layout.items())


def own_cell(layout: Mapping[str, Any], world: int, settings: Settings, seq_len: int) -> Cell:
    """A layout of the caller's, keys of ParallelConfig and `micro_batches`, as a cell on `world` ranks.

    Raises ProveError for a key that is none, and with every rule that the layout breaks.
    """
    keys = dict(layout)
    count = keys.pop("micro_batches", None)
    name = layout_name(layout)
    known = {f.name for f in fields(ParallelConfig)}
    for key in keys:
        if key in _NOT_IN_A_LAYOUT or key not in known:
            fix = _NOT_IN_A_LAYOUT.get(key, "use tp=2, pp=2, compile=true, micro_batches=4, ...")
            rule, where = "must be a key of a layout", f"layout {name}"
            raise invalid(key, "unknown_key", ..., rule, fix, where=where, kind=ProveError)
        _require_type(name, key, keys[key])
    if count is not None and (type(count) is not int or count < 1):
        where, rule = f"layout {name}", "must be a number from 1 on"
        raise invalid("micro_batches", "range", count, rule, "use 1", where=where, kind=ProveError)
    where = f"layout {name} on {world} ranks"
    try:
        config = Cell(name, world, keys).config(settings)
        axes = config.axes(world)
    except (ValueError, TypeError) as error:
        raise ProveError(problems_of(error), where) from error
    count = next_allowed_count(config, 1) if count is None else count
    facts = Facts(seq_len=seq_len, num_micro_batches=count)
    raise_problems(where, problems(config, axes, facts), ProveError)
    return Cell(name, world, keys, count)


def _require_type(name: str, key: str, value: Any) -> None:
    """ProveError for a word or a number where the configuration has another kind of value: any word is true."""
    hint = get_type_hints(ParallelConfig)[key]
    kinds = get_args(hint) or (hint,)  # words of a Literal are checked by the configuration
    if get_origin(hint) is Literal or type(value) in kinds or (type(value), *kinds) == (int, float):
        return
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    rule, where = f"must be {names[kinds[0]]}", f"layout {name}"
    raise invalid(key, "type", value, rule, "correct it", where=where, kind=ProveError)


def standard_cells(worlds: Iterable[int], only: str, settings: Settings) -> Sequence[Cell]:
    """Those of `CELLS` with one of these numbers of ranks, whose name contains `only`, on this device."""
    kept = [cell for cell in CELLS if cell.world in {*worlds} and only in cell.name]
    return [cell for cell in kept if settings.device == "cuda" or not cell.on_host]
