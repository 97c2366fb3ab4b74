"""Recomputation: a block saves its inputs and computes other activations again in its backward.

"full" saves nothing inside a block and costs one more forward of it. "selective" also saves the outputs of expensive
operators (matmuls, attention, sums and exchanges over ranks), so that only norms, activations, rotations, casts and
gathers run twice. "full" in every k-th block is between the two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forge_parallel._shared.problems import invalid
from forge_parallel._torch_compat import (
    DispatchMode,
    alias,
    in_backward,
    mutated_arguments,
    storage_id,
)
from forge_parallel.structure import mark

__all__ = ["is_recomputing", "recompute", "selective_contexts"]

Pair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
MODES = ("none", "full", "selective")


def is_recomputing() -> bool:
    """Whether this forward runs inside of a backward: hooks of its modules see values that they have seen before."""
    return in_backward()


_IN_PLACE = "c10d"
# Names and not operators: some exist only in some versions and builds of torch, or after an import.
_SAVED_OPERATORS = {
    # matmuls, the float8 and the grouped ones with them: all the FLOPs of a block but attention's
    "aten": "mm addmm bmm baddbmm _scaled_mm _grouped_mm _scaled_grouped_mm "
    # attention: as many FLOPs in long sequences; its log-sum-exp is an output, too
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _flash_attention_forward",
    "torch_attn": "_varlen_attn",
    # collectives, which stall all ranks; except gathers, whose outputs are larger than their inputs by the
    # number of ranks, and which run again
    "_c10d_functional": "reduce_scatter_tensor all_reduce all_to_all_single",
    # as torch.distributed calls it, which writes into its first argument: exchanges of expert parallelism
    _IN_PLACE: "alltoall_base_",
}

#: Keywords under which layers of transformers are given keys and values of earlier tokens.
_CACHES = ("past_key_values", "past_key_value", "layer_past")

_CHANGED = (
    "{} changed in place a tensor that selective recomputation saved in a block's forward; use an operation that "
    "makes a new tensor, or recompute = 'full'"
)


def recompute(
    blocks: Iterable[nn.Module],
    mode: str = "full",
    every: int = 1,
    contexts: Callable[[], Pair] | None = None,
) -> int:
    """Let every `every`-th of `blocks`, from the first on, recompute in its backward; in place.

        recompute(model.blocks(), "selective")
        recompute(model.blocks(), "full", every=2, contexts=forge_moe.recompute_contexts)

    "full" keeps only a block's inputs and costs one more forward of it. "selective" also keeps the
    outputs of matmuls, attention, functional collectives other than gathers and all-to-all exchanges,
    and recomputes the rest. Gradients are the same bits as without. `contexts` makes a (record, replay) pair for each forward:
    decisions that the recomputation must not make again, such as routes of experts. A backward in two halves
    (zero-bubble schedules) recomputes twice, which is supported. Random numbers are drawn as in the forward;
    shapes, dtypes and devices of recomputed tensors are checked against it. Without grad a block runs unchanged.

    Names of parameters stay. Inside FSDP2 a block is recomputed after its weights are gathered for the
    backward. Returns how many blocks recompute. Raises ValueError for an unknown mode or `every` < 1.
    """
    if mode not in MODES:
        raise invalid(
            "recompute", "unknown", mode, f"must be one of {', '.join(MODES)}", "use none"
        )
    if every < 1:
        raise invalid(
            "recompute_every", "range", every, "must be at least 1", "use 1 for every block"
        )
    if mode == "none":
        return 0
    from forge_parallel.axes.local import add_mixin  # late: DTensor costs half a second to import

    chosen = list(blocks)[::every]
    factories = [f for f in (contexts, selective_contexts if mode == "selective" else None) if f]
    for block in chosen:
        mark(block, "recompute")
        add_mixin(block, TrainingForward)
        block.recompute_contexts = factories  # type: ignore[assignment]
    return len(chosen)


class TrainingForward:
    """Mixin of a block whose forward is compiled, a checkpoint, or both, while there is a graph to build.

    `recompute` and `compile_blocks` set the two attributes on the block.
    """

    recompute_contexts: Sequence[Callable[[], Pair]] | None = None  # None: not a checkpoint
    compiled: Callable[..., Any] | None = None  # takes the block, so that deep copies call it, too

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward: compiled, a checkpoint, or both where gradients are enabled; else as it is."""
        run = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        kwargs = {name: self._without_cache(name, value) for name, value in kwargs.items()}
        # inside of the checkpoint, which then calls compiled code twice
        if self.compiled is not None:
            run = partial(self.compiled, self)
        if self.recompute_contexts is None:
            return run(*args, **kwargs)
        factories = self.recompute_contexts

        def contexts() -> Pair:
            pairs = [make() for make in factories]
            return _ContextStack([p[0] for p in pairs]), _ContextStack([p[1] for p in pairs])

        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _without_cache(self, name: str, value: Any) -> Any:
        """The value of a keyword, None for an empty cache of keys, as transformers makes in every forward.

        A recomputation would append its keys a second time, and torch.compile would specialize on the layer index
        that the cache reads. A cache with keys (of a learned prefix) stays, but cannot be recomputed.
        """
        if name not in _CACHES or not hasattr(value, "get_seq_length"):
            return value
        layers = (getattr(m, "layer_idx", None) for m in cast(nn.Module, self).modules())
        tokens = value.get_seq_length(next((i for i in layers if i is not None), 0))
        if tokens and self.recompute_contexts is not None:
            rule = "tokens are held, to which a recomputation would add its own twice"
            raise invalid(name, "cache", tokens, rule, "use recompute = 'none' with a prefix")
        return value if tokens else None


def is_selective(block: nn.Module) -> bool:
    """Whether a block recomputes selectively."""
    return selective_contexts in (getattr(block, "recompute_contexts", None) or ())


class _ContextStack:
    """Several contexts as one that can be entered repeatedly: a backward in two halves recomputes twice."""

    def __init__(self, contexts: list[AbstractContextManager[Any]]) -> None:
        self.contexts = contexts
        self.stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context)
            self.stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self.stacks.pop().__exit__(*error)


class _SavedOutput(NamedTuple):
    """The output of one call of an operator, with version counters that show later in-place changes."""

    value: Any
    shapes: list[torch.Size]  # of the call's inputs
    versions: list[int]


class _SaveOutputs(DispatchMode):
    """Runs a forward and keeps what the operators of `_SAVED_OPERATORS` give, in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[Any, list[_SavedOutput]] = defaultdict(list)
        self.memory: set[int] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # a saved output is an alias: an in-place change would reach it and give silently wrong gradients
        for position, name in mutated_arguments(operator):
            target = args[position] if position < len(args) else kwargs.get(name)
            if any(storage_id(t) in self.memory for t in tensors_in(target)):
                raise RuntimeError(_CHANGED.format(operator))
        out = operator(*args, **kwargs)
        if is_saved(operator):
            # an exchange in place: its buffer, and a work handle on which a second wait returns at once
            saved = _map(alias, (args[0], out) if operator.namespace == _IN_PLACE else out)
            versions = [t._version for t in tensors_in(saved)]
            self.outputs[_call_key(operator, args)].append(
                _SavedOutput(saved, _shapes(args), versions)
            )
            self.memory.update(storage_id(t) for t in tensors_in(saved))
        return out


class _ReplayOutputs(DispatchMode):
    """Runs the forward again with the saved outputs instead of the operators, as often as it is entered.

    torch's own selective checkpoint gives each tensor once; a backward in two halves needs it twice.
    """

    def __init__(self, record: _SaveOutputs) -> None:
        super().__init__()
        self.outputs = record.outputs
        self.call: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self.call.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not is_saved(operator):
            return operator(*args, **(kwargs or {}))
        key = _call_key(operator, args)
        outputs, call = self.outputs[key], self.call[key]
        self.call[key] += 1

        if call >= len(outputs) or outputs[call].shapes != _shapes(args):
            raise RuntimeError(
                f"recomputation calls {operator} with {_shapes(args)} at place {call}, where the forward "
                "did something else; a block must do the same each time"
            )
        saved = outputs[call]
        if [t._version for t in tensors_in(saved.value)] != saved.versions:
            raise RuntimeError(_CHANGED.format("something"))

        if operator.namespace == _IN_PLACE:
            buffer, work = saved.value
            args[0].copy_(buffer)
            return work
        return _map(alias, saved.value)


def selective_contexts() -> Pair:
    """A (record, replay) pair that keeps what selective recomputation keeps."""
    record = _SaveOutputs()
    return record, _ReplayOutputs(record)


@cache
def is_saved(operator: Any) -> bool:
    """Whether selective recomputation saves the outputs of an operator."""
    space, _, name = operator.name().partition("::")  # an overload such as mm.out has a suffix
    return name in _SAVED_OPERATORS.get(space, "").split()


def _call_key(operator: Any, args: Any) -> Any:
    """Calls with the same key are replayed in their order.

    Of exchanges in place it has the shapes: the forward also exchanges counts, which are recorded and not exchanged
    again.
    """
    return (operator, *_shapes(args)) if operator.namespace == _IN_PLACE else operator


def _shapes(args: Any) -> list[torch.Size]:
    """Shapes of the tensors among positional arguments."""
    return [a.shape for a in args if isinstance(a, Tensor)]


def tensors_in(out: Any) -> list[Tensor]:
    """The tensors of an operator's argument or output: one, or some among other things."""
    return [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor)]


def _map(function: Callable[[Tensor], Tensor], out: Any) -> Any:
    """Apply a function to the tensors of an operator's output."""
    if isinstance(out, (tuple, list)):
        return type(out)(_map(function, o) for o in out)
    return function(out) if isinstance(out, Tensor) else out
