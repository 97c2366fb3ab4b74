# Copied from scripts/shared/module_protocols.py; edit that file, then run scripts/copy_shared.py.
"""Methods and attributes that a module of yours may define for Forge: all are optional, and there is nothing to subclass.

They are found by name, so `check_names` compares the names of a model's classes with those here: a misspelled one is an
error when the model is built (`Transformer`, `VLM`) or prepared (`parallelize`). An attribute may be a property.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .misspelled import misspells
from .problems import Problem, raise_problems


class ModuleInit(Protocol):
    """Optional for any module: initial values and kinds of its parameters. Read by `forge_core.initialize` and the
    optimizers."""

    def init_table(self, std: float, residual_std: float) -> Mapping[str, tuple[str, Any]]:
        """{local name of a parameter or buffer: (kind, value)}, see `Init`; an outer module wins over an inner one."""
        ...

    def parameter_kinds(self) -> Mapping[str, str]:
        """{name of a parameter of this module itself: "matrix", "vector", "norm", "bias", "embedding", "tensor" or
        "stacked_" and one of the first five}. Another parameter has a kind by its module, or by its name and dims."""
        ...

    def lr_scales(self) -> Mapping[str, float]:
        """{parameter name: factor of its learning rate}, times the factors of groups; only optimizers whose update has
        the size of the learning rate take them, others raise."""
        ...

    def warm_sources(self) -> Mapping[str, Sequence[str]]:
        """{local name of a tensor: names of the weights that it may start from, the best first}, for
        `forge_vlm.warm_start`."""
        ...


class ModuleCost(Protocol):
    """Optional for any module: floating-point operations, where they are not those of linear layers. Read by
    `forge_core.flops_per_token`, the planner and the pipeline, which divides the depth by them."""

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one forward for one token in sequences of `seq_len`, everything inside included."""
        ...

    def spared_flops_per_token(self, seq_len: int) -> float:
        """FLOPs per token of the backward that are not computed because parameters are frozen."""
        ...

    def first_flops_per_token(self, seq_len: int) -> tuple[float, float]:
        """Of a model: FLOPs per token of the forward before its blocks (an encoder), and those that its backward spares."""
        ...

    def plan_forward(self, tokens: Tensor) -> Tensor:
        """Of a model: the forward that the planner traces, with inputs of its own making (images); default `forward`."""
        ...


class ModuleSharding(Protocol):
    """Optional for a model: its structure, for `forge_parallel`. Data parallelism needs none; another axis that needs a
    missing one raises an error with its name."""

    def blocks(self) -> Sequence[nn.Module]:
        """Modules in order of depth that are sharded, recomputed and compiled one by one; default the longest list of
        like modules. `forge_core.interp` has hook points for them."""
        ...

    def sharding_units(self) -> Sequence[nn.Module]:
        """Modules besides the blocks that are sharded by themselves (blocks of an encoder), which all ranks call equally
        often; others are gathered with the root, for the full step. Of a stage, those that it has."""
        ...

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, a unit of its own for FSDP2 where it is large and not tied, as in transformers."""
        ...

    def get_output_embeddings(self) -> nn.Module:
        """The output head, likewise."""
        ...

    def pipeline_parts(self) -> Mapping[str, Any]:
        """Needed by `pp`: {"first": names of children, "blocks": name of a container, "last": names, "dim": width of the
        stream (optional)}. A name in both ends is tied. The forward must skip children that are None."""
        ...

    def parallel_roles(self) -> Mapping[str, Any]:
        """Needed by `tp`: {pattern of local names: role, or {"role": role, "multiple_of": width}}; the reference of
        forge-parallel lists the roles. In `Transformer` a layer without it is "opaque": replicated, and given all tokens."""
        ...

    head_dim: int
    """Width of a head: `tp` shards the linear layers of this module by multiples of it."""

    mean_over_ranks: Callable[[Tensor], Tensor] | None
    """None in a norm over all heads; `tp` sets it to the function that turns this rank's sums of squares into a mean."""

    token_part: Callable[[Tensor], Tensor] | None
    """None in a model that writes to tokens of its stream after the embedding; sequence parallelism sets it to the
    function that returns this rank's shard of a tensor (B, S, ...)."""

    compute_dtype: torch.dtype
    """The dtype in which this module computes under mixed precision (a router in fp32): FSDP2 wraps it by itself."""

    forward_methods: Sequence[str]
    """Methods of a module that FSDP2 wraps which read its parameters outside of its forward."""


class ModuleInputs(Protocol):
    """Optional for a model: keywords of its forward besides tokens, positions and document ids. Read by FSDP2, the
    pipeline, `Compute` and generation; a stage of a pipeline declares its own."""

    host_inputs: Sequence[str]
    """Keywords that the model reads on the host: they are left there."""

    extra_inputs: Sequence[str]
    """Keywords that are no tokens (patches, frames); the stage that declares them gets them. `after_embedding` among
    them is a function to call on the stream (B, S, D) where `cp` shards it."""

    mask_inputs: Sequence[str]
    """Keywords with (B, S) ids of full sequences, by which tokens see each other ("branch_ids"): every stage gets those
    that a batch has, and `cp` raises ValueError with any. A required one is among the `extra_inputs` too."""

    optional_inputs: Sequence[str]
    """Further extras that the model takes where a batch has them ("image_masks"), on its device."""

    reads_token_ids: bool
    """Whether blocks read the ids of tokens: every stage of a pipeline gets them as keyword `token_ids`, (B, S) and
    this rank's shard under `cp`."""


class ModuleForward(Protocol):
    """Optional for a mixer, a feed-forward or a block: calls around its forward. Read by `Transformer`, generation,
    `forge_core.interp` and `forge_moe.statistics`; `cp` needs `attend`."""

    def prepare(self, ctx: Any, x: Tensor, cache: Any = None) -> object:
        """Called once per forward and layer, before the first block; store results with `ctx.once(key, make)`."""
        ...

    attend: Attend
    """The attention between the projections, which context parallelism and `forge_core.interp` replace."""

    spec: Any
    """The `AttentionSpec` of an attention module; generation raises for one with a mask of its own."""

    needs_whole_rows: bool
    """Whether it chooses among all tokens of a sequence, so that it cannot decode one token at a time."""

    def new_cache(self, max_length: int) -> Any:
        """Of a model: an empty cache for sequences of up to `max_length` tokens, which its forward takes as `cache`."""
        ...

    def attention_weights(self, x: Tensor, ctx: Any, cache: Any = None) -> Tensor:
        """Probabilities (B, H, S, T) of attention that is no `attend`; called after forward, with its arguments."""
        ...

    points: Sequence[str]
    """Names of the tensors that its forward passes through `point`."""

    def point(self, name: str, value: Tensor) -> Tensor:
        """Return `value`; `forge_core.interp` reads it there, or replaces it."""
        ...

    def statistics(self) -> Mapping[str, Any]:
        """Counters of a mixture of experts, for `forge_moe.statistics.collect`."""
        ...


class ModuleImages(Protocol):
    """Optional for a vision encoder or an adapter, read by `forge_vlm`; an encoder may have `blocks` and the inputs of
    `ModuleInputs` too."""

    def image_work(self, seen: Any = None) -> Any:
        """`ImageWork` of an image: of an encoder given its pixels, of an adapter given the work before it."""
        ...

    def media_of(self, images: int, pixels: int | None, device: torch.device) -> Mapping[str, Any]:
        """Inputs of that many images, for the planner."""
        ...

    def token_grids(self, **media: Any) -> Sequence[tuple[int, int, int]]:
        """Grid in tokens (time, rows, columns) of each image; default squares of one size."""
        ...

    def tokens(self, rows: int, columns: int) -> int:
        """Of an adapter: number of tokens of an image of so many patches; default as many as the encoder's."""
        ...

    front: int
    """Number of tokens of an encoder before those of patches: a class token and registers."""

    num_layer_features: int
    """Number of first blocks to whose output the encoder adds features (DeepStack)."""


class Attend(Protocol):
    """The attribute `attend` of an attention module; only the call is needed.

    For `cp` it declares plain causal attention: `is_causal = True`, or `spec`, a dataclass whose fields (except `scale`
    and `window`) have their defaults. `takes_mask = True` allows masks of the context; `prepare(ctx, x)` runs before the
    first block; `weights(q, k, ctx)` returns probabilities for `forge_core.interp`.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ctx: Any, /) -> Tensor:
        """q (B, S, H, D), k and v (B, S, K, D) -> (B, S, H, D), within the documents of `ctx.document_ids`."""
        ...


_PROTOCOLS = (ModuleInit, ModuleCost, ModuleSharding, ModuleInputs, ModuleForward, ModuleImages)
#: Name -> "method", or the annotation of the attribute.
NAMES: dict[str, str] = {
    name: kind
    for protocol in _PROTOCOLS
    for name, kind in (dict.fromkeys(vars(protocol), "method") | protocol.__annotations__).items()
    if not name.startswith("_")
}
#: Libraries whose classes, and overrides of whose attributes, are not checked.
_LIBRARIES = ("abc", "builtins", "torch", "torchao", "transformers", "typing")
#: Words that other code uses, too: their types are not checked.
_WORDS = ("attend", "front", "point", "points", "spec", "statistics", "tokens")
#: Names of transformers that are near to one here.
_OTHERS = ("set_input_embeddings", "set_output_embeddings")
#: Classes without problems: a hundred layers of one class cost one look.
_good: WeakSet[type] = WeakSet()


def check_names(model: nn.Module) -> None:
    """Raise ValueError for class attributes of modules whose name is almost one of Forge's, or whose type is another.

        class MyMixer(nn.Module):
            def paralel_roles(self): ...  # "is not a name that Forge reads; did you mean parallel_roles?"

    Classes of torch and transformers are not checked, nor what overrides their attributes. Cost: a walk over the
    modules, and the names of each class once.
    """
    new = dict.fromkeys(cls for cls in map(type, model.modules()) if cls not in _good)
    problems = {problem.key: problem for cls in new for problem in _problems_of_class(cls)}
    raise_problems("", problems.values())
    _good.update(new)


def _problems_of_class(cls: type) -> Iterator[Problem]:
    """Problems of the attributes that a class and its bases define."""
    foreign = {base for base in cls.__mro__ if base.__module__.partition(".")[0] in _LIBRARIES}
    theirs = {name for base in foreign for name in vars(base)}
    fix = "correct it, or rename it if it is not meant for Forge"
    for owner in (base for base in cls.__mro__ if base not in foreign):
        for name, value in vars(owner).items():
            if name.startswith("_") or name in theirs:
                continue

            key = f"{owner.__qualname__}.{name}"
            if wanted := _type_instead(name, value):
                rule = f"is read by Forge and must be {wanted}, not a {type(value).__name__}"
                yield Problem(key, "type", ..., rule, fix)
            elif name in NAMES or name in _OTHERS:
                continue
            elif near := [known for known in NAMES if misspells(name, known)]:
                rule = f"is not a name that Forge reads; did you mean {near[0]}?"
                yield Problem(key, "misspelled", ..., rule, fix)


def _type_instead(name: str, value: Any) -> str:
    """The type that a class attribute of this name must have; "" if it has it, or the name is not one of Forge's."""
    kind, fits, rule = NAMES.get(name), True, ""
    computed = hasattr(value, "__get__") and not isinstance(value, FunctionType)  # a property
    if kind == "method":
        container = name == "blocks" and computed  # a property that returns a ModuleList
        rule, fits = "a method", callable(value) or isinstance(value, classmethod) or container
    elif kind == "bool":
        rule, fits = "a bool", computed or isinstance(value, bool)
    elif kind == "Sequence[str]":
        names = isinstance(value, tuple | list) and all(isinstance(n, str) for n in value)
        rule, fits = "a tuple of names", computed or names

    # None stands for a name that is not defined
    return "" if fits or value is None or name in _WORDS else rule
