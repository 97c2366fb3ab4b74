"""Profile of a model for the planner: its parameters by block, their roles, its FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import nn

from forge_parallel._shared.problems import Problem, problems_of
from forge_parallel.axes.fsdp import untied_ends
from forge_parallel.axes.precision import own_dtype
from forge_parallel.axes.roles import (
    BY_ROWS,
    LOW_RANK,
    find_roles,
    merge_layers,
    sharded_factor,
    shared_head,
)
from forge_parallel.check_model import attention_problems, part_problems, shard_problems
from forge_parallel.pipeline.split import block_costs, stage_ranges
from forge_parallel.rules import ModelFacts
from forge_parallel.structure import Blocks, structure_of

T = TypeVar("T")


class ParamInfo(NamedTuple):
    """One parameter.

    heads    heads of a projection that ranks of tp may share; else 0
    moments  bytes per element of the optimizer's state; None: `Storage.moments`
    """

    name: str
    shape: tuple[int, ...]
    role: str
    trains: bool
    heads: int = 0
    moments: float | None = None


class ParamGroup(NamedTuple):
    """Parameters that FSDP shards and gathers together, and their forward FLOPs per token."""

    params: tuple[ParamInfo, ...]
    flops: float


class Profile:
    """Parameters and FLOPs of `model` in sequences of `seq_len` tokens, block by block.

    numel, trained       elements of the parameters, each counted once, and of those that are trained
    flops                of one token's forward; of them `head_flops` after the blocks, and `first_flops` before them (an
                         encoder's), by the model's `first_flops_per_token(seq_len)`, which also returns the part of
                         their backward that is not computed, `first_spared`
    kinds, order         parameters of each kind of block, and the kind of each block: blocks of equal modules and shapes
                         are of one kind. `samples` holds names and kinds of the first two blocks of each kind
    pp_problems          reasons against a pipeline; `cp_problems` against cp
    ahead                tokens beyond the next one that the model predicts in training, as in `Compute`

    `blocks` is passed to `structure_of`. `moments` are bytes per element of the optimizer's state, by parameter name, if
    they are not `Storage.moments`. Only shapes are read: the model may be on the meta device.
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
        self._known: dict[Any, Any] = {}
        self.structure = structure_of(model, blocks)
        self._role_problems: tuple[Problem, ...] = ()
        try:
            self.matched = find_roles(model)
        except ValueError as error:
            self.matched, self._role_problems = find_roles(model, sharded=False), problems_of(error)
        self._find_kinds()

        self.pp_problems = part_problems(model, self.structure)
        self.cp_problems = attention_problems(model)
        self.numel = sum(p.numel() for p in model.parameters())
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        of_blocks = sum(self.kinds[k].flops for k in self.order)
        self.flops = max(forward_flops(model, seq_len), of_blocks)
        method: Any = getattr(model, "first_flops_per_token", None)
        first: tuple[float, float] = method(seq_len) if callable(method) else (0.0, 0.0)
        self.first_flops, self.first_spared = first
        self.head_flops = self.flops - of_blocks - self.first_flops

    def _find_kinds(self) -> None:
        """Set `kinds`, `order` and `samples`, and the parameters outside of blocks."""
        self.kinds, self.order, self.samples = list[ParamGroup](), list[int](), dict[str, int]()
        names = {id(module): name for name, module in self.model.named_modules()}
        known: dict[Any, int] = {}
        taken: set[int] = set()

        for block in self.structure.modules(self.model):
            name = names[id(block)]
            params = self._params(name, block, taken)
            modules = tuple((n, type(m), own_dtype(m)) for n, m in block.named_modules())
            flops = forward_flops(block, self.seq_len)  # attention with a window computes less
            kind = known.setdefault((modules, params, flops), len(known))
            if kind == len(self.kinds):
                self.kinds.append(ParamGroup(params, flops))
            self.order.append(kind)
            if self.order.count(kind) <= 2:
                self.samples[name] = kind

        self._outside = self._params("", self.model, taken)
        own = [() if end is None else end.parameters() for end in untied_ends(self.model)]
        ids = [{id(p) for p in parameters} for parameters in own]
        full = dict(self.model.named_parameters())
        self._untied = [{n for n, p in full.items() if id(p) in of_end} for of_end in ids]

    def _params(self, name: str, module: nn.Module, taken: set[int]) -> tuple[ParamInfo, ...]:
        """Parameters of the module `name` under its own names, without those in `taken`, to which they are added."""
        own = {n: p for n, p in module.named_parameters() if id(p) not in taken}
        taken.update(map(id, own.values()))
        found = []
        for n, p in own.items():
            full = f"{name}.{n}" if name else n
            role, heads = self.role(full), self.heads(full)
            moments = self._moments.get(full)
            found.append(ParamInfo(n, tuple(p.shape), role, p.requires_grad, heads, moments))
        return tuple(found)

    def role(self, parameter: str) -> str:
        """Role of a parameter; "opaque" if it has none."""
        if self.matched.is_expert(parameter):
            return "expert"
        layer, _, own = parameter.rpartition(".")
        role = self.matched.leaves.get(layer)
        if role is None or (own in LOW_RANK and own != sharded_factor(role.name)):
            return "opaque"
        return role.name

    def heads(self, parameter: str) -> int:
        """Heads of a projection that ranks of tp may share; else 0."""
        name = parameter.rpartition(".")[0]
        role = self.matched.leaves.get(name)
        weight: Any = getattr(self.model.get_submodule(name), "weight", None)
        if role is None or not role.shared or weight is None:
            return 0
        rows = int(weight.size(0))
        return rows // (shared_head(self.model, name, role, rows + 1) or rows)

    def ends(self, first: bool, last: bool) -> ParamGroup:
        """Parameters of the modules before the blocks, after them, or both; a tied embedding belongs to either end."""

        def make() -> ParamGroup:
            before = tuple(f"{name}." for name in self.structure.first)
            after = tuple(f"{name}." for name in self.structure.last)
            params = []
            for param in self._outside:
                is_after = param.name.startswith(after)
                is_before = param.name.startswith(before) or not is_after
                if (last and is_after) or (first and is_before):
                    params.append(param)
            return ParamGroup(tuple(params), self.head_flops * last + self.first_flops * first)

        return self.once(("ends", first, last), make)

    def units_of_ends(self, first: bool, last: bool) -> tuple[ParamGroup, ParamGroup, ParamGroup]:
        """The parameters of `ends` that belong to an untied embedding, to an untied head, and to neither."""

        def make() -> tuple[ParamGroup, ParamGroup, ParamGroup]:
            params = self.ends(first, last).params
            embedding, head = (
                tuple(p for p in params if p.name in names) for names in self._untied
            )
            rest = tuple(p for p in params if p not in (*embedding, *head))
            return ParamGroup(embedding, 0.0), ParamGroup(head, 0.0), ParamGroup(rest, 0.0)

        return self.once(("units_of_ends", first, last), make)

    @property
    def num_experts(self) -> int:
        """Experts of the smallest stack; 0 for a dense model."""
        stacks = (p.shape[0] for kind in self.kinds for p in kind.params if p.role == "expert")
        return min(stacks, default=0)

    def state_bytes(self, moments: float) -> float:
        """Bytes of the optimizer's state of all trained parameters, by default `moments` per element."""
        trained = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        return sum(p.numel() * self._moments.get(name, moments) for name, p in trained)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return `make()`, computed at the first call with this key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def tp_problems(self, tp: int, shards: int = 1) -> list[Problem]:
        """Reasons why `tp` ranks, and FSDP2's `shards` of their parameters, cannot shard this model."""

        def find() -> list[Problem]:
            if self._role_problems:
                return list(self._role_problems)
            return merge_layers(shard_problems(self.model, self.matched, tp, shards))

        return [] if tp == 1 else self.once(("tp", tp, shards), find)

    def facts(self, tp: int, shards: int) -> ModelFacts:
        """ModelFacts of the model for the rules of a layout, without those of its batch."""
        obstacles = {
            "tp": self.tp_problems(tp, shards),
            "cp": self.cp_problems,
            "pp": self.pp_problems,
        }
        return ModelFacts(
            seq_len=self.seq_len,
            num_layers=len(self.order),
            num_blocks=len(self.order),
            num_experts=self.num_experts,
            tied=self.structure.tied,
            first_blocks=self.structure.first_blocks,
            obstacles=obstacles,
            model=type(self.model).__name__,
        )

    def stage_ranges(self, stages: int) -> list[range]:
        """Blocks of each pipeline stage, as `forge_parallel.pipeline.split` partitions them."""

        def partition() -> list[range]:
            costs = block_costs(self.model, self.structure, self.seq_len)
            return stage_ranges(costs, stages, self.structure.first_blocks)

        return [range(len(self.order))] if stages == 1 else self.once(("stages", stages), partition)


def local_shape(
    full: tuple[int, ...], role: str, tp: int, ep: int = 1, heads: int = 0
) -> tuple[int, ...]:
    """Shape of a parameter on the first rank of its tp group, or of its ep group for an expert.

    If there are fewer `heads` than ranks, ranks share them, and the shape is `full` on each.
    """
    if 0 < heads < tp:
        return full
    if role == "expert":
        return (-(-full[0] // ep), *full[1:])
    if role in BY_ROWS:
        return (-(-full[0] // tp), *full[1:])
    if role == "rowwise" and len(full) > 1:
        return (full[0], -(-full[1] // tp))
    return full


def forward_flops(module: nn.Module, seq_len: int) -> float:
    """FLOPs of one token's forward: a module's own `flops_per_token`, else 2 per weight of each nn.Linear."""
    method: Any = getattr(module, "flops_per_token", None)
    if callable(method):
        return float(method(seq_len))
    if isinstance(module, nn.Linear):
        return 2.0 * module.weight.numel()
    return sum(forward_flops(child, seq_len) for child in module.children())
