"""Activations that a forward saves for its backward, and bytes that it sends: each kind of block, without values.

The model is copied with fake parameters of this rank's shapes; blocks of a kind beyond the second are left out.
Collectives of tensor and context parallelism are replaced by new tensors of the right shape, so no process group is
needed: torch's fake group would have to be the default group of the process, which may have a real one.

Shapes: B rows, S tokens of a row here, D width.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from forge_parallel._torch_compat import DispatchMode, storage_id
from forge_parallel.axes.fsdp import own_dtype
from forge_parallel.axes.roles import HEADS
from forge_parallel.compile import compiled_parts
from forge_parallel.plan.profile import Profile, local_shape
from forge_parallel.recompute import is_saved, tensors_in


@dataclass
class BlockTrace:
    """Bytes of one block (or of what stands before or after the blocks) for one row of a micro-batch.

    saved: for the backward without recomputation; compiled: those of them that the compiler saves, too; inputs: its
    tensor arguments; selective: those and the outputs of products; largest: its largest tensor. sent: bytes of the
    unsharded tensors in the collectives of one forward, by axis.
    """

    saved: int = 0
    compiled: int = 0
    inputs: int = 0
    selective: int = 0
    largest: int = 0
    sent: Counter[str] = field(default_factory=Counter)

    @property
    def slots(self) -> int:
        """Experts for each token."""
        return max(1, round(self.sent["rows"] / self.inputs)) if self.inputs else 1

    def under(self, mode: str, compiled: bool = False) -> int:
        """Bytes that a mode of recomputation keeps."""
        whole = self.compiled if compiled else self.saved
        return {"none": whole, "full": self.inputs, "selective": self.selective}[mode]


@dataclass
class Trace:
    """`kinds` as in Profile; `shared` bytes are saved once for all blocks (rotary tables); `logits` elements."""

    kinds: dict[int, BlockTrace]
    first: BlockTrace
    last: BlockTrace
    shared: int
    logits: int


def trace(
    profile: Profile,
    tp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    gather_keys: bool = True,
    rows: int = 1,
) -> Trace:
    """Trace `rows` rows of `profile.seq_len / cp` tokens through the model as one rank has it.

    A model may offer `plan_forward(tokens)`, a forward with all that a row has beside tokens, images for instance, that
    reads no values.

    Attention is counted as a flash kernel does it (q, k, v, output, log-sum-exp), an RMS norm as a fused
    one. Bytes grow in proportion to rows. Cost: about 10 ms per kind of block; no values are computed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # private, torch 2.0 to 2.15

    with FakeTensorMode():
        model = _part_of_a_rank(profile, tp, dtype)
        tracer = _Tracer(profile, model, tp, cp, sequence_parallel, gather_keys)
        tokens = torch.zeros(rows, profile.seq_len // cp, dtype=torch.int64)
        keep = torch.autograd.graph.saved_tensors_hooks(tracer.keep, lambda t: t)
        with tracer, keep, _Operators(tracer):
            further = {"next_tokens": tokens[:, None].expand(-1, profile.ahead, -1)}
            out = getattr(model, "plan_forward", model)(tokens, **further if profile.ahead else {})
    tracer.close()
    logits = out if isinstance(out, Tensor) else next(iter(out.values()))
    shared = sum(tracer.shared.values())
    return Trace(tracer.kinds, tracer.first, tracer.last, shared, logits.numel())


#: Operators that are fused like those that torch calls pointwise.
_BY_ELEMENT = (torch.ops.aten._to_copy, torch.ops.aten.cat)


class _Skip(nn.Module):
    """In place of the third and later blocks of a kind."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


def _part_of_a_rank(profile: Profile, tp: int, dtype: torch.dtype) -> nn.Module:
    """A copy with empty parameters, cut by their roles and in the dtype of the forward, and with `_Skip` for
    the third and later blocks of a kind."""
    model = profile.model
    samples = [model.get_submodule(name) for name in profile.samples]
    copies: dict[int, Any] = {
        id(b): _Skip() for b in profile.structure.modules(model) if b not in samples
    }
    own = {id(p): d for m in model.modules() if (d := own_dtype(m)) for p in m.parameters()}
    for name, p in model.named_parameters():
        # of a copy of shared heads a rank computes one
        rows = min(tp, profile.heads(name) or tp)
        shape = local_shape(tuple(p.shape), profile.role(name), rows)
        empty = torch.empty(shape, dtype=own.get(id(p), dtype))
        copies[id(p)] = nn.Parameter(empty, p.requires_grad)
    for buffer in model.buffers():
        copies[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, copies)


class _Resize(torch.autograd.Function):
    """A collective without values: it changes the size of dim -2, and saves nothing, as no backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        return x.new_empty((*x.shape[:-2], size, x.size(-1)))


class _FusedNorm(torch.autograd.Function):
    """Saves as much as a fused RMS norm: its input, the weight, one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)


class _Operators(DispatchMode):
    """Records the outputs that selective recomputation saves, and those that a compiled backward computes again.

    torch's partitioner does so with results of operators on single elements that only such operators read: it fuses
    them into the kernels of the backward, for which their inputs are saved. An operand of a product would have to be written
    out once more, so it is saved.
    """

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_saved(func):
            for tensor in tensors_in(out):
                self.tracer.note(tensor, self.tracer.products)
        given = {storage_id(t) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        made = {storage_id(t) for t in tensors_in(out)} - given  # a view makes nothing
        by_element = torch.Tag.pointwise in func.tags or func.overloadpacket in _BY_ELEMENT
        self.tracer.fused -= made if not by_element else set()
        self.tracer.fused |= made if by_element else set()
        if made and not by_element:
            self.tracer.fused -= given
        return out


class _Tracer(TorchFunctionMode):
    """Adds the saved and sent bytes of a forward of `model`, a copy, to the part that runs (`here`).

    As a mode it replaces chains of CPU operators by single ones that save as much as a GPU's kernels, and under
    context parallelism passes keys of all ranks to attention, which saves them if the exchange gathers.
    """

    def __init__(
        self,
        profile: Profile,
        model: nn.Module,
        tp: int,
        cp: int,
        sequence_parallel: bool,
        gather_keys: bool,
    ) -> None:
        super().__init__()
        self.sizes, self.sequence_parallel = {"tp": tp, "cp": cp}, sequence_parallel
        self.gather_keys = gather_keys
        self.first, self.last = BlockTrace(), BlockTrace()
        self.here = self.first
        self.kinds: dict[int, BlockTrace] = {}
        self.shared: dict[int, int] = {}
        self.products: dict[int, int] = {}
        self.fused: set[int] = set()  # storages that a compiled backward computes again
        self._compiles = False
        self._eager: set[int] = set()  # storages that are saved by what is not compiled
        self._saved: dict[int, int] = {}
        self._saved_by: dict[int, dict[int, int]] = {}  # the last block of a kind
        self._alive: list[Tensor] = []
        self._parameters = {storage_id(t) for t in [*model.parameters(), *model.buffers()]}
        self._entering: tuple[Tensor, Tensor] | None = None  # a layer's input, and all of it
        self._attach(profile, model)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.rms_norm:
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            return _FusedNorm.apply(args[0], weight)
        if func is F.scaled_dot_product_attention and self._spans_ranks(kwargs):
            q, *keys = args[:3]
            keys = [self._gathered("cp", k) for k in keys]
            kwargs = {**kwargs, "is_causal": False}  # the length of q is not that of k
            if self.gather_keys:
                args = (q, *keys, *args[3:])
        if func is F.scaled_dot_product_attention and args[0].dtype == torch.float32:
            # no flash kernel of a GPU shares heads in fp32: keys and values are repeated
            q, *keys = args[:3]
            keys = [k.repeat_interleave(q.size(1) // k.size(1), dim=1) for k in keys]
            args, kwargs = (q, *keys, *args[3:]), {**kwargs, "enable_gqa": False}
        return func(*args, **kwargs)

    def _spans_ranks(self, kwargs: dict[str, Any]) -> bool:
        """Whether it is attention among the tokens of rows that ranks of cp share: not that of an encoder before the
        blocks, nor one with a mask, to the images of whole rows."""
        before = self.here is self.first
        return self.sizes["cp"] > 1 and not before and kwargs.get("attn_mask") is None

    def _attach(self, profile: Profile, model: nn.Module) -> None:
        """Hooks on blocks and experts, and on the layers where tensor parallelism communicates."""
        for name, kind in profile.samples.items():
            block = model.get_submodule(name)
            block.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            for part in compiled_parts(block):
                part.register_forward_pre_hook(partial(self._compile, True))
                part.register_forward_hook(partial(self._compile, False))
            block.register_forward_hook(partial(self._leave, kind))
        matched = profile.matched
        for name, module in model.named_modules():
            if name in matched.experts:
                module.register_forward_pre_hook(self._count_rows)
            if self.sizes["tp"] == 1:
                continue
            if name in matched.routed and not self.sequence_parallel:
                module.register_forward_pre_hook(self._cut)
                module.register_forward_hook(self._uncut)
            # a mixture has its tokens cut over tp always, so its shared experts gather them
            cut = self.sequence_parallel or matched.is_routed(name)
            role = matched.leaves[name].name if name in matched.leaves else None
            if role in ("colwise", "enter", *HEADS):
                module.register_forward_pre_hook(self._gather if cut else self._sum_gradients)
            elif role in ("rowwise", "vocab"):
                module.register_forward_hook(self._scatter if cut else self._sum)

        for name in _opaque(profile, model) if self.sizes["tp"] > 1 else ():
            module = model.get_submodule(name)
            if self.sequence_parallel:
                module.register_forward_pre_hook(self._gather)
                module.register_forward_hook(self._scatter, prepend=True)

    # ---- saved activations

    def note(self, tensor: Tensor, where: dict[int, int]) -> None:
        where[storage_id(tensor)] = _bytes(tensor)
        self._alive.append(tensor)  # so that no later storage gets its address

    def keep(self, tensor: Tensor) -> Tensor:
        """The hook on tensors that autograd saves."""
        if storage_id(tensor) not in self._parameters:
            self.note(tensor, self._saved)
            if not self._compiles:
                self._eager.add(storage_id(tensor))
        return tensor

    def _compile(self, begins: bool, *_: Any) -> None:
        """Note that a part which may be compiled begins or ends."""
        self._compiles = begins

    def close(self) -> dict[int, int]:
        """Add tensors saved since the last call to the part that ends here."""
        part, saved = self.here, self._saved
        part.saved += sum(saved.values())
        again = self.fused - self._eager
        part.compiled += sum(size for key, size in saved.items() if key not in again)
        part.selective += sum(self.products.values())
        part.largest = max([part.largest, *saved.values()])
        self._saved, self._entering = {}, None
        self.products.clear()
        return saved

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.close()
        tensors = tensors_in((*args, *kwargs.values()))
        self.here = BlockTrace(inputs=sum(map(_bytes, tensors)))
        self._alive += tensors

    def _leave(self, kind: int, *_: Any) -> None:
        saved, before = self.close(), self._saved_by.get(kind, {})
        both = {key: size for key, size in saved.items() if key in before}  # there once for all
        self.here.saved -= sum(both.values())
        self.here.compiled -= sum(both.values())
        self.here.selective += self.here.inputs
        self.shared |= both
        self._saved_by[kind], self.kinds[kind], self.here = saved, self.here, self.last

    # ---- collectives

    def _gathered(self, axis: str, x: Tensor) -> Tensor:
        return self._send(axis, x, x.size(-2) * self.sizes[axis])

    def _send(self, axis: str, x: Tensor, size: int) -> Tensor:
        """x as a collective leaves it; the larger side is counted."""
        out: Tensor = _Resize.apply(x, size)
        self.note(out, self.products)  # selective recomputation saves outputs of collectives
        self.here.sent[axis] += max(_bytes(x), _bytes(out))
        return out

    def _gather(self, module: nn.Module, args: Any) -> Any:
        if self._entering is None or self._entering[0] is not args[0]:  # once for siblings
            self._entering = (args[0], self._gathered("tp", args[0]))
        return (self._entering[1], *args[1:])

    def _scatter(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return self._send("tp", out, out.size(-2) // self.sizes["tp"])

    def _sum(self, module: nn.Module, args: Any, out: Tensor) -> None:
        """An all-reduce in the forward alone: the bytes of a gather and a scatter, every second pass."""
        self.here.sent["tp"] += _bytes(out)

    def _sum_gradients(self, module: nn.Module, args: Any) -> None:
        """One in the backward alone, once for siblings."""
        if self._entering is None or self._entering[0] is not args[0]:
            self._entering = (args[0], args[0])
            self.here.sent["tp"] += _bytes(args[0])

    def _cut(self, module: nn.Module, args: Any) -> Any:
        return (self._scatter(module, args, args[0]), None)

    def _uncut(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return self._gathered("tp", out)

    def _count_rows(self, module: nn.Module, args: Any) -> None:
        self.here.sent["rows"] += _bytes(args[0])


def _opaque(profile: Profile, model: nn.Module) -> list[str]:
    """The outermost modules inside blocks of which tp cuts nothing, and which see whole tokens; no mixtures."""
    found: list[str] = []
    for block in profile.samples:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            inside = any(name == o or name.startswith(f"{o}.") for o in found)
            names = [f"{name}.{n}" for n, _ in module.named_parameters()]
            routed = profile.matched.is_routed(name)
            if (
                names
                and not inside
                and not routed
                and all(profile.role(n) == "opaque" for n in names)
            ):
                found.append(name)
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
