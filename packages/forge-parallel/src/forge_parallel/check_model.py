"""Checks of a model for a layout, before any change of it: the rules that need the module itself (see also `rules`)."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from forge_parallel import rules
from forge_parallel._shared.problems import Problem, problems_of, raise_problems
from forge_parallel.axes.fsdp import is_sharded_over
from forge_parallel.axes.roles import (
    BY_ROWS,
    HEADS,
    LINEAR,
    OF_LINEAR,
    Matched,
    Role,
    find_roles,
    merge_layers,
    unit_of,
)
from forge_parallel.config import Layout, ParallelConfig
from forge_parallel.meshes import Meshes
from forge_parallel.protocols import BatchLike
from forge_parallel.structure import (
    Structure,
    blocks_by_key,
    further_units,
    parts_of,
    stream_dim,
    structure_of,
)

__all__ = [
    "AFTER_EMBEDDING",
    "BRANCH_IDS",
    "attention_problems",
    "check_model",
    "check_shards",
    "extra_problems",
    "facts_of",
    "model_problems",
    "part_problems",
    "ranks_with_other_values",
    "report_blocks",
    "shard_problems",
]

#: An extra input that is not data: a function that the model calls on its stream (B, S, D), to split it over cp.
AFTER_EMBEDDING = "after_embedding"

#: An extra input (B, S) of sequences whose documents have branches, 0 for tokens of all branches: no model may ignore it.
BRANCH_IDS = "branch_ids"

#: Fields of an attention's spec that context parallelism computes; others must have their defaults.
COMPUTED_FIELDS = ("scale", "window")


def check_model(
    model: nn.Module,
    config: ParallelConfig,
    meshes: Meshes,
    structure: Structure,
    matched: Matched,
) -> None:
    """Raise one ValueError with every reason why this layout would compute `model` wrongly, or not at all."""
    # as far as rules read it: replicas of the model (dp_replicate) count as one
    shards = 1 if meshes.dense is None else meshes.dense["dp_shard"].size()
    on_ep = meshes.sparse is not None and "ep" in meshes.sparse.mesh_dim_names
    ep, cp = meshes.sparse["ep"].size() if on_ep else 1, meshes.cp.size
    layout = Layout(meshes.pp.size, 1, shards // cp, cp, meshes.tp.size, ep)

    facts = facts_of(model, layout, structure, matched)
    found = rules.problems(config, layout, facts)
    if meshes.dense is not None and not facts.obstacles.get("pp"):
        found += _shared_across_units(model, meshes, structure)
    if meshes.sparse is not None:
        found += _expert_problems(model, meshes, matched)
    raise_problems("", merge_layers(found))


def ranks_with_other_values(model: nn.Module, gather: Callable[[str], list[str]]) -> list[int]:
    """Ranks on which names or values of a full model differ from those of rank 0: sharding would mix them silently.

    `gather(value)` returns the values of all ranks. Costs a sha256 of all tensors, on the host.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    digests = gather(digest.hexdigest())
    return [rank for rank, other in enumerate(digests) if other != digests[0]]


def model_problems(
    model: nn.Module, config: ParallelConfig, layout: Layout, **known: Any
) -> list[Problem]:
    """Problems of an unsharded model in a layout, found before any process group exists.

    known: further `ModelFacts`, of its batch and its experts. Costs a walk over the modules; none where no axis shards the model.
    """
    if layout.pp * layout.cp * layout.tp * layout.ep == 1:
        return []
    try:
        matched = find_roles(model, sharded=layout.tp > 1)
        facts = facts_of(model, layout, structure_of(model), matched)
        if layout.pp > 1 and not facts.obstacles["pp"]:
            stream_dim(model)
    except ValueError as error:
        return list(problems_of(error))
    return rules.problems(config, layout, replace(facts, **known))


def facts_of(
    model: nn.Module, layout: Layout, structure: Structure, matched: Matched
) -> rules.ModelFacts:
    """The facts of the model itself for this layout; nothing about its batch, nor about experts, which are sharded
    over ep before."""
    obstacles: dict[str, list[Problem]] = {}  # by axis
    if layout.tp > 1:
        obstacles["tp"] = shard_problems(model, matched, layout.tp, layout.dp_shard * layout.cp)
    if layout.cp > 1:
        obstacles["cp"] = attention_problems(model)
    if layout.pp > 1:
        obstacles["pp"] = part_problems(model, structure)

    piped = layout.pp > 1 and not obstacles["pp"]
    return rules.ModelFacts(
        num_layers=len(blocks_by_key(model, structure)) if piped else None,
        num_blocks=len(structure.blocks),
        tied=structure.tied,
        first_blocks=structure.first_blocks,
        obstacles=obstacles,
        model=type(model).__name__,
    )


def report_blocks(
    model: nn.Module,
    config: ParallelConfig,
    meshes: Meshes,
    structure: Structure,
    report: Callable[[str], None] | None,
) -> None:
    """Report blocks that neither caller nor model named, to `report` or as a warning on rank 0. Warn about a model
    without blocks, which FSDP2 gathers at once."""
    if structure.chosen and report is not None:
        report(structure.chosen)
    elif structure.chosen and not meshes.rank:
        warnings.warn(structure.chosen, stacklevel=3)
    sharded = meshes.dense is not None and meshes.fsdp(meshes.dense).size() > 1
    if not sharded or meshes.rank or structure.blocks:
        return
    size = sum(p.numel() for p in model.parameters()) / meshes.tp.size
    size *= 2 if config.precision == "bf16" else 4
    warnings.warn(
        f"{type(model).__name__} defines no blocks(), so FSDP2 gathers all of it at once on every rank, "
        f"{size / 1e9:.3g} GB in {config.precision}; give it blocks() that returns its layers, or name them "
        "with blocks=",
        stacklevel=3,
    )


def _shared_across_units(model: nn.Module, meshes: Meshes, structure: Structure) -> list[Problem]:
    """Tied parameters in several FSDP2 modules, or several stages, each of which would get a replica of its own."""
    wrapped = {id(module) for module in (*structure.modules(model), *further_units(model))}
    modules = model.named_modules(remove_duplicate=False)
    # per view {module: its owner}: names of one parameter must have one owner in each view
    views: list[dict[str, object]] = [{n: id(m) for n, m in modules if id(m) in wrapped}]
    if meshes.pp.size > 1:
        parts = parts_of(model, structure)
        ends: dict[str, object] = {n: end for end in ("first", "last") for n in getattr(parts, end)}
        keys = blocks_by_key(model, parts)
        views.append(ends | {f"{parts.container}.{key}": key for key in keys})

    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    split_names = [
        same
        for same in names.values()
        if any(len({_value_of_owner(name, view) for name in same}) > 1 for view in views)
    ]
    if not split_names:
        return []

    (first, *others), more = split_names[0], ""
    if len(split_names) > 1:
        more = f" (so are those of {len(split_names) - 1} more)"
    rule = (
        f"and {' and '.join(others)} are one parameter{more}, and {type(model).__name__} holds it in several of its "
        "blocks and ends, each of which would get its own"
    )
    fix = "let one module outside of the blocks hold it, in a pipeline one that `first` and `last` name alike"
    return [Problem(first, "shared", ..., rule, fix)]


def _value_of_owner(parameter: str, values: Mapping[str, object]) -> object:
    """The value of the innermost module around a parameter that has one."""
    module = parameter
    while module:
        module = module.rpartition(".")[0]
        if module in values:
            return values[module]
    return None


def _expert_problems(model: nn.Module, meshes: Meshes, matched: Matched) -> list[Problem]:
    """Experts must be in modules of their own, and sharded over ep already."""
    parameters = dict(model.named_parameters())
    names = [name for name in matched.expert_parameters if name in parameters]
    axes = meshes.sparse.mesh_dim_names
    problems = []
    if "ep" in axes:
        full = [n for n in names if not is_sharded_over("ep", parameters[n])]
        if full or not names:
            other = f"{full[0]} is not" if full else "no parameter has the role expert"
            rule = f"must have experts that are sharded over it, and {other}"
            fix = "shard them first (forge_moe.expert_parallelize), or use ep = 1"
            if not full:
                fix = 'name those of your model, as roles={"*.experts.*": "expert"}, or use ep = 1'
            problems.append(Problem("ep", "experts", meshes.sparse["ep"].size(), rule, fix))

    owners: dict[str, object] = {name.rpartition(".")[0]: name for name in names}
    known = set(names)
    for other in [n for n in parameters if n not in known]:
        if (expert := _value_of_owner(other, owners)) is not None:
            rule = f"and {other} are in one module, and experts are sharded apart from the rest"
            fix = "put them into a module of their own"
            problems.append(Problem(str(expert), "module", ..., rule, fix))
            break
    return problems


def check_shards(model: nn.Module, matched: Matched, size: int) -> None:
    """Raise one ValueError with all `shard_problems`."""
    raise_problems("", merge_layers(shard_problems(model, matched, size)))


def shard_problems(model: nn.Module, matched: Matched, size: int, shards: int = 1) -> list[Problem]:
    """Problems of linear layers and embeddings that cannot be sharded over `size` ranks of tp, and of dropout.

    Outputs (colwise) and inputs (rowwise) must be divisible, below a module with `head_dim` into entire heads; so
    fewer heads than ranks are a problem unless ranks may replicate heads. A vocabulary may be uneven, but no rank empty,
    and its width must be divisible by FSDP2's `shards` if torch would compute wrong offsets for shards of ids
    (`rules.uneven_vocab`).
    """
    found = [
        Problem(name, "sharded", ..., "is a DTensor already", "shard a model once, before FSDP")
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "device_mesh") and not matched.is_expert(name)
    ]
    found += [*_tied_apart(model, matched), *dropout_problems(model)]
    for name, role in matched.leaves.items():
        found += _problems_of_leaf(model, name, role, size, shards)
    return found


def _problems_of_leaf(
    model: nn.Module, name: str, role: Role, size: int, shards: int
) -> Iterator[Problem]:
    """Dims of a module's own parameters that cannot be sharded as its role says."""
    module: Any = model.get_submodule(name)
    own = dict(module.named_parameters(recurse=False))
    if not own:
        return
    if wrong := _wrong_kind(name, module, role.name):
        yield wrong
        return

    # dims that must divide evenly: {key: (size, unit)}
    dims: dict[str, tuple[int, int]] = {}
    if role.name in ("colwise", "rowwise"):
        width = module.weight.size(0 if role.name == "colwise" else 1)
        dims = {name: (width, unit_of(model, name, role, width))}
    elif role.name == "by_heads":
        dims = {f"{name}.{parameter}": (vector.size(0), 1) for parameter, vector in own.items()}
    elif role.name == "norm_over_heads":
        for parameter, vector in own.items():
            width = vector.size(0)
            dims[f"{name}.{parameter}"] = width, unit_of(model, name, role, width)

    for key, (width, unit) in dims.items():
        what = "inputs" if role.name == "rowwise" else "outputs"
        what = what if unit == 1 else f"{what} ({width // unit} heads of {unit})"
        dim = rules.ShardedDim(key, width, unit, role.shared and unit > 1, what=what)
        if wrong := rules.uneven_width(dim, size):
            yield wrong

    if role.name not in ("vocab", *HEADS):
        return
    ids = module.weight.size(0)
    for parameter, table in own.items():
        if parameter == "lora_a":  # replicated
            continue
        key = name if parameter == "weight" else f"{name}.{parameter}"
        dim = rules.ShardedDim(key, ids, width=rules.width_of(table.shape), what="ids")
        if wrong := rules.uneven_vocab(dim, size, shards):
            yield wrong
            break
    # padding of the last rank is -inf, and a cap applied to gathered logits would make it finite
    cap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    if role.name in HEADS and ids % size and cap is not None:
        rule = (
            f"ids must be divisible by tp {size} under final_logit_softcapping {cap}, which would make logits of "
            "the ids that fill up the last rank"
        )
        yield Problem(name, "softcap", ids, rule, "pad the vocabulary")


def dropout_problems(model: nn.Module) -> list[Problem]:
    """Modules with dropout: tp ranks have the same seed and would drop the same positions of different heads."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        dot = f"{name}." if name else ""
        found |= {
            f"{dot}{k}": v for k, v in vars(module).items() if "dropout" in k or k.endswith("pdrop")
        }
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found[f"{dot}p"] = module.p
    if not (positive := _positive(found)):  # a function may read the model's config
        config = getattr(model, "config", None)
        names = ("attention_dropout", "attn_pdrop")
        positive = _positive({f"config.{n}": getattr(config, n, None) for n in names})
    rule = "must be 0 under tp, whose ranks would drop the same of different heads and tokens"
    fix = "set this dropout to 0, or use tp = 1"
    return [Problem(name, "dropout", value, rule, fix) for name, value in positive.items()]


def _positive(values: Mapping[str, Any]) -> dict[str, float]:
    """The floats above 0."""
    return {n: v for n, v in values.items() if isinstance(v, float) and v > 0.0}


def _tied_apart(model: nn.Module, matched: Matched) -> list[Problem]:
    """Parameters with several names whose roles need different placements."""
    roles: dict[nn.Parameter, dict[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        role = matched.leaves.get(name.rpartition(".")[0])
        kind = "opaque" if role is None else role.name
        roles.setdefault(parameter, {})[name] = "by rows" if kind in BY_ROWS else kind
    problems = []
    for first, *others in (list(names.items()) for names in roles.values()):
        if len({first[1], *(kind for _, kind in others)}) > 1:
            names, kinds = zip(first, *others, strict=True)
            rule = f"and {' and '.join(names[1:])} are one parameter and must be sharded alike, not {' and '.join(kinds)}"
            fix = "give an embedding 'vocab' and its head 'sharded_logits'"
            problems.append(Problem(first[0], "tied", ..., rule, fix))
    return problems


def _wrong_kind(name: str, module: Any, role: str) -> Problem | None:
    """A Problem if a module cannot have its role, else None."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    shape = tuple(getattr(module.weight, "shape", ())) if "weight" in names else ()
    found = f"and it is {_say(module)}"
    if role in LINEAR:
        want = (getattr(module, "out_features", None), getattr(module, "in_features", None))
        if shape != want or not names <= OF_LINEAR:
            rule = f"must be the role of a linear layer, weight (out, in), {found}"
            return Problem(name, "linear", role, rule)

    if role == "norm_over_heads" and (len(shape) != 1 or not hasattr(module, "mean_over_ranks")):
        rule = (
            "must be the role of an RMS norm with a weight (D,) that takes the mean of squares from "
            f"`mean_over_ranks(sums)` where that is set, {found}"
        )
        return Problem(name, "norm", role, rule)

    if role == "enter":
        rule = f"must be the role of a module without parameters, {found}"
        return Problem(name, "enter", role, rule)
    if role == "vocab":
        if not isinstance(module, nn.Embedding):
            return Problem(name, "embedding", role, f"must be the role of an nn.Embedding, {found}")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            rule = "must be an embedding's role without max_norm, scale_grad_by_freq and sparse"
            return Problem(name, "options", role, rule, "unset it")
    return None


def _say(module: nn.Module) -> str:
    """Class and parameter shapes of a module, for messages."""
    shapes = ", ".join(f"{n} {tuple(p.shape)}" for n, p in module.named_parameters(recurse=False))
    return f"{type(module).__name__} ({shapes})"


def attention_problems(model: nn.Module) -> list[Problem]:
    """Problems of attention modules that cp cannot compute, one for each layer and field.

    `module.attend` must declare its computation: `spec` is a dataclass whose defaults mean plain causal attention inside
    of documents with scores by D ** -0.5, and `is_causal = True` means exactly that.
    """
    attends = {name: m.attend for name, m in model.named_modules() if hasattr(m, "attend")}
    kind = type(model).__name__
    if not attends:
        rule = f"must be an attribute attend(q, k, v, ctx) of a module of {kind} to reach over ranks, and is of none"
        return [Problem("attend", "missing", ..., rule, "give its attention one, or use cp 1")]

    needed = {*getattr(model, "mask_inputs", ())} & {*getattr(model, "extra_inputs", ())}
    rule = f"of {kind} lets tokens of full sequences see each other, and cp shards sequences"
    problems = [Problem(name, "mask_inputs", ..., rule, "use cp 1") for name in sorted(needed)]

    causal = "must be causal attention inside of documents with scores by D ** -0.5, which cp puts in its place"
    computed = (
        "is not computed over the ranks of cp, where attention is causal, with a scale and a window"
    )
    for name, attend in attends.items():
        key, spec = f"{name}.attend", getattr(attend, "spec", None)
        if spec is None and not getattr(attend, "is_causal", False):
            fix = "give the function is_causal = True if it is, or use cp 1"
            problems.append(Problem(key, "causal", ..., f"{causal}, and does not declare it", fix))
        for f in () if spec is None else dataclasses.fields(spec):
            if f.name not in COMPUTED_FIELDS and (value := getattr(spec, f.name)) != f.default:
                fix = f"use cp 1, or {f.name} {f.default!r}"
                problems.append(Problem(f"{key}.{f.name}", "spec", value, computed, fix))
    return problems


def part_problems(model: nn.Module, structure: Structure | None = None) -> list[Problem]:
    """Problems of a model that cannot be split into pipeline stages."""
    try:
        parts_of(model, structure)
    except ValueError as error:
        return list(problems_of(error))
    return []


def extra_problems(
    model: nn.Module, batch: BatchLike, layout: Layout, data: str = "the data"
) -> list[Problem]:
    """Problems of a model that cannot get the extras that it declares (`extra_inputs`) from batches of `data`."""
    wanted = [n for n in getattr(model, "extra_inputs", ()) if n != AFTER_EMBEDDING]
    masks = getattr(model, "mask_inputs", ())
    if BRANCH_IDS in batch.extras and BRANCH_IDS not in masks:
        rule = f"would let the branches of a document see each other, and batches of {data} have {BRANCH_IDS}"
        fix = "use a model that takes them (mask_inputs), or data without branches"
        return [Problem("model.name", "branches", ..., rule, fix)]

    missing = [name for name in wanted if name not in batch.extras]
    if missing:
        has = ", ".join(batch.extras) or "none"
        rule = f"takes the extras {', '.join(missing)}, and batches of {data} have {has}"
        return [Problem("model.name", "extras", ..., rule, "use a source that gives them")]

    if layout.cp == 1:
        return []

    # under cp a rank sees a shard of the tokens
    given, names = [n for n in masks if n in batch.extras], ", ".join(wanted)
    if given:
        rule = f"shards sequences whose tokens see each other by {', '.join(given)} of {data}"
        return [Problem("parallel.cp", "mask_inputs", layout.cp, rule, "use cp = 1")]
    if wanted and layout.tp > 1:
        rule = (
            f"splits the stream after the embedding of a model that takes the extras {names}, where tp {layout.tp} has "
            "split it already"
        )
        return [Problem("parallel.cp", "tp", layout.cp, rule, "use cp = 1 or tp = 1")]
    if wanted and AFTER_EMBEDDING not in model.extra_inputs:  # type: ignore[operator]
        rule = f"splits sequences before a model that takes the extras {names} has inserted them"
        fix = f"let it name {AFTER_EMBEDDING!r} among its extra_inputs and call that on the stream (B, S, D), or use cp = 1"
        return [Problem("parallel.cp", "after_embedding", layout.cp, rule, fix)]
    return []
