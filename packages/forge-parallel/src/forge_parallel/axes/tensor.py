"""Tensor and sequence parallelism from a table of roles.

Shapes: B sequences, S tokens of a sequence, T tokens in a list, D width of the residual stream, n ranks of tp.

Every rank computes a shard of each linear layer and sees, between layers, the full residual stream
(B, S, D), or with sequence parallelism its S/n tokens of it. Collectives of one gated attention and
feed-forward pair, forward and backward, as counted in the tests (one for q, k, v and one for gate, up):

    without sequence parallelism   2 all-reduces                         2 all-reduces
    with it                        2 all-gathers, 2 reduce-scatters      2 all-gathers, 2 reduce-scatters

each of the bytes of (B, S, D). Gradients of replicas that saw other heads or tokens (QK-norms, norms
under sequence parallelism, routers) are declared as sums over tp, which FSDP2 carries out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from forge_parallel._renamed import renamed
from forge_parallel._shared.problems import invalid
from forge_parallel._torch_compat import overlap_matmuls
from forge_parallel.axes import layers
from forge_parallel.axes.collectives import NamedGroup, gather_replicated
from forge_parallel.axes.local import add_mixin, use_local
from forge_parallel.axes.roles import (
    BY_ROWS,
    HEADS,
    LOW_RANK,
    Matched,
    find_roles,
    has_plan,
    sharded_factor,
    shared_head,
)
from forge_parallel.check_model import check_shards
from forge_parallel.structure import mark

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=nn.Module)


def tensor_parallel(
    model: M,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool | None = None,
    roles: Mapping[str, Any] | None = None,
    matched: Matched | None = None,
    async_tp: bool = False,
) -> M:
    """Shard `model` over the ranks of `mesh` (one axis), in place; returns the same object.

        tensor_parallel(model, meshes.dense["tp"])          # then FSDP2 over the other axes
        found = vocab_cross_entropy(model(tokens), labels, meshes.tp)
        loss, count = found.sum, found.count

    `roles` is a table {pattern: role} (see axes/roles.py), by default `model.parallel_roles()`, or the
    `tp_plan` of a Hugging Face model. Parameters become DTensors of the same names; each rank keeps its
    slice of the values it has, which must be equal on all ranks, and nothing is sent; meta parameters
    stay meta. Experts' parameters are not changed. All ranks of the axis call the model with the same tokens, and
    logits stay sharded: (B, S, ceil(V/n)), padded with -inf for an uneven vocabulary. Logits of a head with the role
    `gather_output` (a Hugging Face model's) are gathered, (B, S, V) on every rank by one all-gather, in evaluation,
    without grad (`generate`), and if the model is called with `labels`, for its own loss. `matched` is the result
    of `find_roles` if the caller has it and has checked it (`check_shards`).

    `sequence_parallel` shards the stream between layers along S, which must be divisible by n; by default
    on, except for Hugging Face's models, which read lengths off the stream. Parents of experts are
    given disjoint tokens either way. `async_tp` lets inductor overlap matmuls and collectives.

    FSDP2 must follow, on one rank too: it reduces the partial gradients of replicated parameters over tp.

    Raises ValueError before any change: a parameter without a role, dims that do not divide, dropout; and in a
    forward if code outside of its own module uses a sharded weight.
    """
    group = NamedGroup.of(mesh)
    foreign = not hasattr(model, "parallel_roles") and has_plan(model)
    if sequence_parallel is None:
        sequence_parallel = not foreign
    if matched is None:
        matched = find_roles(model, roles)
        check_shards(model, matched, group.size)
    ids = _ids_of_heads(model, matched)

    if foreign and sequence_parallel:
        rule = f"must be off for a model of Hugging Face ({type(model).__name__} reads lengths off the stream)"
        fix = "use sequence_parallel = false"
        raise invalid("sequence_parallel", "excludes", True, rule, fix)
    if async_tp and (mesh.device_type != "cuda" or not sequence_parallel):
        rule = f"must have CUDA and sequence parallelism; device is {mesh.device_type}, sequence_parallel {sequence_parallel}"
        raise invalid("async_tp", "requires", async_tp, rule, "use async_tp = false")

    mark(model, "tensor")
    if async_tp:
        overlap_matmuls(group.name)
    _shard_model(model, mesh, sequence_parallel, matched, ids)

    heads = (model.get_submodule(n) for n, r in matched.leaves.items() if r.name == "gather_output")
    model.tp_heads = tuple(heads)  # type: ignore[assignment]
    add_mixin(model, layers.Root)
    if sequence_parallel and hasattr(model, "token_part"):
        model.token_part = partial(_local_tokens, group=group)  # type: ignore[assignment]
    return model


def _local_tokens(x: Tensor, group: NamedGroup) -> Tensor:
    """This rank's tokens of x (B, S, ...), as the embedding gives them under sequence parallelism."""
    return x.chunk(group.size, 1)[group.rank]


def gather_vocab(logits: Tensor, axis: Any, vocab_size: int | None = None) -> Tensor:
    """Logits (..., V) on every rank of a mesh or `Axis` from sharded ones (..., V/n): one all-gather.

    Code that uses them must be equal on all ranks. `vocab_size` removes the padding of an uneven vocabulary.
    """
    full = gather_replicated(logits, NamedGroup.of(axis), logits.dim() - 1)
    return full if vocab_size is None else full[..., :vocab_size]


def sharded_logits_width(model: nn.Module) -> int | None:
    """Width of a rank's logits if a head of the model, or of this rank's stages, is sharded, else None."""
    widths = (vars(module).get("tp_width") for module in model.modules())
    return next((width for width in widths if width is not None), None)


def sharded_logits_vocab_size(model: nn.Module) -> int | None:
    """Ids of the full vocabulary if a head of the model, or of this rank's stages, is sharded, else None."""
    found = (vars(module).get("tp_ids") for module in model.modules())
    return next((ids for ids in found if ids is not None), None)


_SUMMED: tuple[Placement, ...] = (Partial(),)
_MIXINS: dict[str, type] = {
    "colwise": layers.Colwise,
    "enter": layers.Colwise,
    "rowwise": layers.Rowwise,
    "sharded_logits": layers.ShardedLogits,
    "gather_output": layers.GatheredLogits,
    "vocab": layers.VocabEmbedding,
}


def _shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    sequence_parallel: bool,
    matched: Matched,
    ids: Mapping[str, int],
) -> None:
    """Replace parameters by shards, and add the mixins of layers.py to the modules that communicate."""
    group = NamedGroup.of(mesh)
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one parameter
    shared_inputs = _shared_inputs(model, matched)
    module: Any
    for module, name in _unique_modules(model, matched.leaves).items():
        role = matched.leaves[name]
        tokens_sharded = sequence_parallel or matched.is_routed(name)
        module.tp = layers.TPRegion(group, tokens_sharded, shared_inputs.get(name))

        # more ranks than heads: replicated weights, of which the rank computes one head
        head = shared_head(model, name, role, group.size)
        placed_as = "replicate_sum_grad" if head else role.name
        _shard_parameters(module, placed_as, tokens_sharded, mesh, sharded)
        if role.name == "norm_over_heads":
            replicas = group.size * head // module.weight.size(0) if head else 1
            module.mean_over_ranks = layers.MeanOverRanks(group, module.weight.size(0), replicas)
        if head:
            # neighboring ranks have the same head: head number rank * heads // ranks
            first = group.rank * (module.weight.size(0) // head) // group.size * head
            module.tp_rows = slice(first, first + head)
            add_mixin(
                module, layers.SharedHeads if role.name == "colwise" else layers.SharedHeadRows
            )
            continue

        if role.name == "vocab":
            _set_local_ids(module, group)
        elif role.name in HEADS:
            module.tp_ids, module.tp_width = ids[name], -(-ids[name] // group.size)
        if role.name in _MIXINS:
            add_mixin(module, _MIXINS[role.name])

    for module in _unique_modules(model, matched.opaque):
        for below in module.modules():
            _shard_parameters(below, "opaque", False, mesh, sharded)
        if sequence_parallel:
            module.tp = layers.TPRegion(group, True)
            add_mixin(module, layers.Opaque)

    for module in _unique_modules(model, matched.routed):
        module.tp = layers.TPRegion(group, sequence_parallel)
        add_mixin(module, layers.DisjointTokens)


def _unique_modules(model: nn.Module, names: Iterable[str]) -> dict[nn.Module, str]:
    """The modules of these names, one that has several of them by the first."""
    found: dict[nn.Module, str] = {}
    for name in names:
        found.setdefault(model.get_submodule(name), name)
    return found


def _shard_parameters(
    module: nn.Module,
    role: str,
    tokens_sharded: bool,
    mesh: DeviceMesh,
    sharded: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Replace a module's own parameters by DTensors of this rank's slices, and declare the placements of their
    gradients over tp."""
    for name, full in list(module._parameters.items()):
        if full is None:
            continue
        placement, summed = _placement(role, name, tokens_sharded)
        if full not in sharded:
            local = full.detach()
            if isinstance(placement, Shard):
                shards = local.chunk(mesh.size(), placement.dim)
                # a view would keep the memory of the full parameter
                local = shards[mesh.get_local_rank()].clone().contiguous()
            # shape and stride are explicit, as DTensor would infer wrong ones from uneven shards
            shard = DTensor.from_local(
                local, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
            )
            sharded[full] = nn.Parameter(shard, requires_grad=full.requires_grad)
        module.register_parameter(name, sharded[full])
        use_local(module, name, _SUMMED if summed else None)


def _placement(role: str, name: str, tokens_sharded: bool) -> tuple[Placement, bool]:
    """The placement of a parameter over tp, and whether gradients of its ranks are partial sums."""
    if name in LOW_RANK and role in (*BY_ROWS, "rowwise"):
        # the factor on the sharded side is sharded; the other sees only this rank's outputs, or inputs
        if name == sharded_factor(role):
            return Shard(0 if role in BY_ROWS else 1), False
        return Replicate(), True
    if role in BY_ROWS:
        return Shard(0), False
    if role == "rowwise" and name == "weight":
        return Shard(1), False
    return Replicate(), role == "replicate_sum_grad" or (role != "opaque" and tokens_sharded)


def _shared_inputs(model: nn.Module, matched: Matched) -> dict[str, layers.SharedInputs]:
    """One `SharedInputs` for the colwise layers of each parent that has several; the parents are swapped."""
    children: dict[str, list[str]] = {}
    for name in _unique_modules(model, matched.leaves).values():
        if matched.leaves[name].name == "colwise":
            parent = name.rpartition(".")[0]
            while parent and type(model.get_submodule(parent)).forward is nn.Module.forward:
                parent = parent.rpartition(".")[0]  # a list or a dict of modules
            children.setdefault(parent, []).append(name)
    found: dict[str, layers.SharedInputs] = {}
    for parent, names in children.items():
        if len(names) > 1:
            module: Any = model.get_submodule(parent)
            module.tp_inputs = layers.SharedInputs()
            found |= dict.fromkeys(names, module.tp_inputs)
            add_mixin(module, layers.Siblings)
    return found


def _ids_of_heads(model: nn.Module, matched: Matched) -> dict[str, int]:
    """The vocabulary of each head; one without weight has that of the model's one embedding."""
    tables: list[Any] = [
        model.get_submodule(n) for n, r in matched.leaves.items() if r.name == "vocab"
    ]
    found = {}
    for name, role in matched.leaves.items():
        if role.name in HEADS:
            weight: Any = getattr(model.get_submodule(name), "weight", None)
            if weight is None and len(tables) != 1:
                rule = f"has no weight and must go with one embedding of role 'vocab', and there are {len(tables)}"
                fix = "give the head its weight, or the embedding this role"
                raise invalid(name, "weight", ..., rule, fix)
            found[name] = int(tables[0].num_embeddings if weight is None else weight.size(0))
    return found


def _set_local_ids(embedding: Any, group: NamedGroup) -> None:
    """Set the range of ids that this rank's rows hold."""
    size = -(-embedding.num_embeddings // group.size)
    begin = group.rank * size
    end = min(begin + size, embedding.num_embeddings)
    embedding.tp_rows = (begin, end)
    padding = embedding.padding_idx
    if padding is not None:
        embedding.padding_idx = padding - begin if begin <= padding < end else None


__getattr__ = partial(renamed, __name__)
