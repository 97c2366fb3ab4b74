"""The profile of a model for the planner: its parameters by block, their roles, its FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import nn

from forge_parallel._problems import merge_layers
from forge_parallel._shared.problems import Problem, problems_of
from forge_parallel.axes.context import attention_problems
from forge_parallel.axes.fsdp import own_dtype
from forge_parallel.axes.roles import (
    BY_ROWS,
    LOW_RANK,
    cut_factor,
    cut_problems,
    find_roles,
    shared_head,
)
from forge_parallel.legal import Facts
from forge_parallel.pipeline.cut import block_costs, stage_ranges
from forge_parallel.pipeline.parts import part_problems
from forge_parallel.structure import Blocks, structure_of

T = TypeVar("T")


class Row(NamedTuple):
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    role: str
    trains: bool
    heads: int = 0  # of a projection whose heads ranks of tp may share
    moments: float | None = (
        None  # bytes per element of the optimizer's state; None: Storage.moments
    )


class Part(NamedTuple):
    """Parameters that are sharded and gathered together, and their forward FLOPs per token."""

    rows: tuple[Row, ...]
    flops: float


class Profile:
    """Parameters and FLOPs of `model` in rows of `seq_len` tokens, block by block.

    `numel` counts each parameter once, `trained` those that are; `flops` are of one token's forward, `head_flops` those
    behind the blocks, `first_flops` those before (an encoder's), by the model's `first_flops_per_token(seq_len)`, which
    also says what of their backward is not computed, `first_spared`.
    `order` gives the kind of each block (see `structure_of`, which gets `blocks`): blocks of equal modules and shapes are of one
    kind. `samples` holds the names and kinds of the first two of each. `pp_problems` says why there can be no
    pipeline, `cp_problems` why no cp, if so. Reads shapes only: a model on the meta device will do. `moments` are bytes per
    element of the optimizer's state, by name, of parameters for which they are not `Storage.moments`. `ahead` is the number
    of tokens beyond the next one that it predicts in training, as for `Compute`.
    """

    def __init__(
        self,
        model: nn.Module,
        seq_len: int,
        blocks: Blocks | None = None,
        moments: Mapping[str, float] | None = None,
        ahead: int = 0,
    ) -> None:
        self.model, self.seq_len, self._moments = model, seq_len, moments or {}
        self.ahead = ahead
        self._found: dict[Any, Any] = {}
        self.structure = structure_of(model, blocks)
        self.no_roles: tuple[Problem, ...] = ()
        try:
            self.matched = find_roles(model)
        except ValueError as error:
            self.matched, self.no_roles = find_roles(model, cut=False), problems_of(error)
        self._find_kinds()
        self.pp_problems = part_problems(model, self.structure)
        self.cp_problems = attention_problems(model)
        self.numel = sum(p.numel() for p in model.parameters())
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        inside = sum(self.kinds[k].flops for k in self.order)
        self.flops = max(forward_flops(model, seq_len), inside)
        offer: Any = getattr(model, "first_flops_per_token", None)
        first: tuple[float, float] = offer(seq_len) if callable(offer) else (0.0, 0.0)
        self.first_flops, self.first_spared = first
        self.head_flops = self.flops - inside - self.first_flops

    def _find_kinds(self) -> None:
        self.kinds, self.order, self.samples = list[Part](), list[int](), dict[str, int]()
        names = {id(module): name for name, module in self.model.named_modules()}
        known: dict[Any, int] = {}
        taken: set[int] = set()
        for block in self.structure.modules(self.model):
            name = names[id(block)]
            rows = self._rows(name, block, taken)
            modules = tuple((n, type(m), own_dtype(m)) for n, m in block.named_modules())
            flops = forward_flops(block, self.seq_len)  # attention with a window computes less
            kind = known.setdefault((modules, rows, flops), len(known))
            if kind == len(self.kinds):
                self.kinds.append(Part(rows, flops))
            self.order.append(kind)
            if self.order.count(kind) <= 2:
                self.samples[name] = kind
        self._rest = self._rows("", self.model, taken)

    def _rows(self, name: str, module: nn.Module, taken: set[int]) -> tuple[Row, ...]:
        """Parameters of the module of that name, under names of its own, but those that are `taken`."""
        own = {n: p for n, p in module.named_parameters() if id(p) not in taken}
        taken.update(map(id, own.values()))
        dot = f"{name}." if name else ""
        return tuple(
            Row(
                n,
                tuple(p.shape),
                self.role(dot + n),
                p.requires_grad,
                self.heads(dot + n),
                self._moments.get(dot + n),
            )
            for n, p in own.items()
        )

    def role(self, parameter: str) -> str:
        """The role of a parameter; "opaque" if it has none."""
        if self.matched.is_expert(parameter):
            return "expert"
        layer, _, own = parameter.rpartition(".")
        role = self.matched.leaves.get(layer)
        if role is None or (own in LOW_RANK and own != cut_factor(role.name)):
            return "opaque"
        return role.name

    def heads(self, parameter: str) -> int:
        """Heads of a projection that ranks of tp may share; 0 elsewhere."""
        name = parameter.rpartition(".")[0]
        role = self.matched.leaves.get(name)
        whole: Any = getattr(self.model.get_submodule(name), "weight", None)
        if role is None or not role.shared or whole is None:
            return 0
        rows = int(whole.size(0))
        return rows // (shared_head(self.model, name, role, rows + 1) or rows)

    def ends(self, first: bool, last: bool) -> Part:
        """The modules before the blocks, after them, or both; a tied embedding is in either end."""
        before = tuple(f"{name}." for name in self.structure.first)
        after = tuple(f"{name}." for name in self.structure.last)

        def belongs(name: str) -> bool:
            behind = name.startswith(after)
            return (last and behind) or (first and (name.startswith(before) or not behind))

        def make() -> Part:
            rows = tuple(row for row in self._rest if belongs(row.name))
            return Part(rows, self.head_flops * last + self.first_flops * first)

        return self.once(("ends", first, last), make)

    @property
    def num_experts(self) -> int:
        """Experts of the smallest stack; 0 for a dense model."""
        stacks = {r.shape[0] for part in self.kinds for r in part.rows if r.role == "expert"}
        return min(stacks, default=0)

    def state_bytes(self, moments: float) -> float:
        """Of the optimizer's state of all trained parameters, with `moments` per element where there is no other number."""
        trained = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        return sum(p.numel() * self._moments.get(name, moments) for name, p in trained)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """The value of `make()`, computed by the first caller that gives this key."""
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def tp_problems(self, tp: int, shards: int = 1) -> list[Problem]:
        """Why `tp` ranks, and FSDP2's `shards` of their parts, cannot cut this model; empty if they can."""

        def find() -> list[Problem]:
            if self.no_roles:
                return list(self.no_roles)
            return merge_layers(cut_problems(self.model, self.matched, tp, shards))

        return [] if tp == 1 else self.once(("tp", tp, shards), find)

    def facts(self, tp: int, shards: int) -> Facts:
        """Facts for the rules about the model on `tp` ranks; nothing about its batch."""

        def find() -> Facts:
            why = {
                "tp": self.tp_problems(tp, shards),
                "cp": self.cp_problems,
                "pp": self.pp_problems,
            }
            return Facts(
                seq_len=self.seq_len,
                num_layers=len(self.order),
                num_blocks=len(self.order),
                num_experts=self.num_experts,
                tied=self.structure.tied,
                first_blocks=self.structure.first_blocks,
                obstacles=why,
                model=type(self.model).__name__,
            )

        return self.once(("facts", tp, shards), find)

    def stage_ranges(self, stages: int) -> list[range]:
        """The blocks of each pipeline stage, as `forge_parallel.pipeline.split` cuts them."""

        def cut() -> list[range]:
            costs = block_costs(self.model, self.structure, self.seq_len)
            return stage_ranges(costs, stages, self.structure.first_blocks)

        return [range(len(self.order))] if stages == 1 else self.once(("stages", stages), cut)


def local_shape(
    whole: tuple[int, ...], role: str, tp: int, ep: int = 1, heads: int = 0
) -> tuple[int, ...]:
    """That of a parameter on the first rank of its tp group, or of its ep group for an expert. Of fewer `heads`
    than ranks, which share them, each has a whole copy."""
    if 0 < heads < tp:
        return whole
    if role == "expert":
        return (-(-whole[0] // ep), *whole[1:])
    if role in BY_ROWS:
        return (-(-whole[0] // tp), *whole[1:])
    if role == "rowwise" and len(whole) > 1:
        return (whole[0], -(-whole[1] // tp))
    return whole


def forward_flops(module: nn.Module, seq_len: int) -> float:
    """FLOPs of one token's forward: a module's own `flops_per_token`, or 2 per weight of each nn.Linear."""
    offered: Any = getattr(module, "flops_per_token", None)
    if callable(offered):
        return float(offered(seq_len))
    if isinstance(module, nn.Linear):
        return 2.0 * module.weight.numel()
    return sum(forward_flops(child, seq_len) for child in module.children())
