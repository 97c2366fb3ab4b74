"""What the planner must know of a model: its parameters by block, their roles, its FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from forge_parallel.axes.fsdp import blocks_of, own_dtype
from forge_parallel.axes.roles import check_cuts, match_roles
from forge_parallel.pipeline.cut import block_costs, stage_ranges
from forge_parallel.pipeline.parts import parts_of

T = TypeVar("T")
#: What stands behind the blocks of a model that does not say so.
_USUAL_LAST = ("norm", "lm_head", "head", "output")


class Row(NamedTuple):
    """One parameter; `own`: bytes of an element in the forward where its module insists on a dtype."""

    name: str
    shape: tuple[int, ...]
    role: str
    trains: bool
    own: int | None

    def local(self, tp: int, ep: int) -> tuple[int, ...]:
        """Shape on the first rank of its tp group, or of its ep group for an expert."""
        whole = self.shape
        if self.role == "expert":
            return (-(-whole[0] // ep), *whole[1:])
        if self.role in ("colwise", "gather_output", "vocab"):
            return (-(-whole[0] // tp), *whole[1:])
        if self.role == "rowwise" and len(whole) > 1:
            return (whole[0], -(-whole[1] // tp))
        return whole


class Part(NamedTuple):
    """Parameters that lie and are gathered together, and their forward FLOPs per token."""

    rows: tuple[Row, ...]
    flops: float

    @property
    def numel(self) -> int:
        return sum(prod(row.shape) for row in self.rows)


class Profile:
    """Parameters and FLOPs of `model` in rows of `seq_len` tokens, block by block.

    `order` gives the kind of each block of `model.blocks()`: blocks of equal modules and shapes are of one
    kind, of which `samples` holds up to two. Reads shapes only: a model on the meta device will do.
    """

    def __init__(self, model: nn.Module, seq_len: int) -> None:
        self.model, self.seq_len = model, seq_len
        self._found: dict[Any, Any] = {}
        self.block_modules = blocks_of(model)
        table: Any = getattr(model, "parallel_roles", dict)()
        self.roles = {pattern: _role(value) for pattern, value in table.items()}
        names = {id(m): f"{n}." for n, m in model.named_modules()}
        self._sort(*self._rows([names[id(block)] for block in self.block_modules]))
        offer: Any = getattr(model, "pipeline_parts", None)
        self.cuttable = callable(offer)
        said = offer() if self.cuttable else {"first": (), "last": _USUAL_LAST}
        self._ends = [tuple(f"{name}." for name in said[end]) for end in ("first", "last")]
        blocks = sum(self.kinds[k].flops for k in self.order)
        self.head_flops = max(forward_flops(model, seq_len) - blocks, 0.0)

    def _rows(self, prefixes: list[str]) -> tuple[list[list[Row]], list[Row]]:
        """Parameters of each block, under names of their own, and those outside."""
        of_block: dict[str, list[Row]] = {prefix: [] for prefix in prefixes}
        patterns: dict[str, list[tuple[str, str]]] = {}
        for pattern, role in self.roles.items():  # a block is compared with its own patterns alone
            patterns.setdefault(_block(pattern, of_block), []).append((pattern, role))
        own, rest = _own_bytes(self.model), list[Row]()
        for name, p in self.model.named_parameters():
            prefix = _block(name, of_block)
            near = [*patterns.get(prefix, ()), *patterns.get("", ())]
            role = next((r for q, r in near if fnmatchcase(name, q)), "opaque")
            row = Row(name[len(prefix):], tuple(p.shape), role, p.requires_grad, own.get(name))  # fmt: skip
            (of_block[prefix] if prefix else rest).append(row)
        return list(of_block.values()), rest

    def _sort(self, rows: list[list[Row]], rest: list[Row]) -> None:
        seen: dict[Any, int] = {}
        self._rest, self.order = rest, list[int]()
        self.kinds, self.samples = list[Part](), list[list[nn.Module]]()
        for block, own in zip(self.block_modules, rows):
            key = (tuple((n, type(m)) for n, m in block.named_modules()), tuple(own))
            kind = seen.setdefault(key, len(seen))
            if kind == len(self.kinds):
                self.kinds.append(Part(tuple(own), forward_flops(block, self.seq_len)))
                self.samples.append([])
            self.order.append(kind)
            self.samples[kind] += [block] if len(self.samples[kind]) < 2 else []

    def ends(self, first: bool, last: bool) -> Part:
        """What stands before the blocks, after them, or both; a tied embedding is on either end."""

        def make() -> Part:
            before, after = self._ends
            wanted = (before if first else ()) + (after if last else ())
            rows = [
                row
                for row in self._rest
                if row.name.startswith(wanted)
                or (first and not row.name.startswith((*before, *after)))
            ]
            return Part(tuple(rows), self.head_flops if last else 0.0)

        return self.once(("ends", first, last), make)

    @property
    def numel(self) -> int:
        """Parameters, each once."""
        return self.ends(True, True).numel + sum(self.kinds[k].numel for k in self.order)

    @property
    def flops(self) -> float:
        """Forward FLOPs per token."""
        return self.head_flops + sum(self.kinds[k].flops for k in self.order)

    @property
    def num_experts(self) -> int:
        """Experts of the smallest stack; 0 for a dense model."""
        stacks = {r.shape[0] for part in self.kinds for r in part.rows if r.role == "expert"}
        return min(stacks, default=0)

    @property
    def has_attend(self) -> bool:
        """Whether context parallelism finds an attention to replace."""
        return self.once("attend", lambda: any(hasattr(m, "attend") for m in self.model.modules()))

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """The value of `make()`, computed by the first caller that gives this key."""
        if key not in self._found:
            self._found[key] = make()
        value: T = self._found[key]
        return value

    def misfit_tp(self, tp: int) -> str | None:
        """Why tensor parallelism over `tp` ranks cannot cut this model, or None."""

        def find() -> str | None:
            if not self.roles:
                return f"tp {tp} needs a model with parallel_roles()"
            try:
                matched = self.once("roles", lambda: match_roles(self.model, self.roles))
                check_cuts(self.model, matched, tp)
            except ValueError as error:
                return str(error).splitlines()[0]
            return None

        return None if tp == 1 else self.once(("tp", tp), find)

    def stage_ranges(self, stages: int) -> list[range]:
        """The blocks of each pipeline stage, as `forge_parallel.pipeline.split` cuts them."""

        def cut() -> list[range]:
            return stage_ranges(block_costs(self.model, parts_of(self.model), self.seq_len), stages)

        return [range(len(self.order))] if stages == 1 else self.once(("stages", stages), cut)


def forward_flops(module: nn.Module, seq_len: int) -> float:
    """FLOPs of one token's forward: what a module offers, 2 per weight of each nn.Linear elsewhere."""
    offered: Any = getattr(module, "flops_per_token", None)
    if callable(offered):
        return float(offered(seq_len))
    if isinstance(module, nn.Linear):
        return 2.0 * module.weight.numel()
    return sum(forward_flops(child, seq_len) for child in module.children())


def _role(value: Any) -> str:
    """A table may give a role, a `Role`, or a table with the key role."""
    if isinstance(value, str):
        return value
    return str(value["role"] if isinstance(value, Mapping) else value[0])


def _block(name: str, prefixes: Iterable[str]) -> str:
    """The prefix of the block that `layers.3.mixer.weight` lies in, or nothing."""
    parts = name.split(".")
    for n in range(1, len(parts)):
        if (prefix := ".".join(parts[:n]) + ".") in prefixes:
            return prefix
    return ""


def _own_bytes(model: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if (dtype := own_dtype(module)) is not None:
            size = torch.empty(0, dtype=dtype).element_size()
            found |= {f"{name}.{own}": size for own, _ in module.named_parameters()}
    return found
