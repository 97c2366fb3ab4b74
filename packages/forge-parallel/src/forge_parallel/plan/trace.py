"""Trace of a forward without values: bytes saved for the backward and bytes sent, for each kind of block.

The model is copied with fake parameters of this rank's shapes; blocks of a kind beyond the second are left out.
Collectives of tensor and context parallelism are replaced by new tensors of the right shape. torch's fake process group
would have to be the default group of the process, which may have a real one.

Shapes: B sequences, S tokens of a sequence on this rank, D width.
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
from forge_parallel.axes.precision import own_dtype
from forge_parallel.axes.roles import HEADS
from forge_parallel.compile import compiled_parts
from forge_parallel.plan.profile import Profile, local_shape
from forge_parallel.recompute import is_saved, tensors_in


@dataclass
class BlockTrace:
    """Bytes of one block, or of the modules before or after the blocks, for one sequence of a micro-batch.

    saved      for the backward without recomputation
    compiled   those of them that the compiler saves too
    inputs     tensor arguments
    selective  inputs and outputs of matmuls
    largest    largest tensor
    sent       unsharded tensors in the collectives of one forward, by axis; "rows": inputs of experts
    """

    saved: int = 0
    compiled: int = 0
    inputs: int = 0
    selective: int = 0
    largest: int = 0
    sent: Counter[str] = field(default_factory=Counter)

    @property
    def top_k(self) -> int:
        """Experts of each token."""
        return max(1, round(self.sent["rows"] / self.inputs)) if self.inputs else 1

    def saved_under(self, mode: str, compiled: bool = False) -> int:
        """Bytes saved under a mode of recomputation."""
        everything = self.compiled if compiled else self.saved
        return {"none": everything, "full": self.inputs, "selective": self.selective}[mode]


@dataclass
class Trace:
    """Traces by kind of block, as in Profile; `shared` bytes are saved once for all blocks (rotary tables); number of
    `logits`."""

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
    """Trace `rows` sequences of `profile.seq_len / cp` tokens through the model as one rank has it.

    Attention is counted as a flash kernel saves it (q, k, v, output, log-sum-exp), an RMS norm as a fused one. Bytes are
    proportional to `rows`. Cost: about 10 ms per kind of block; no values are computed.

    A model may define `plan_forward(tokens)`, a forward with the other inputs of a sequence (images, for instance) that
    reads no values.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # private, torch 2.0 to 2.15

    with FakeTensorMode():
        model = _shard_model(profile, tp, dtype)
        tracer = _Tracer(profile, model, tp, cp, sequence_parallel, gather_keys)
        tokens = torch.zeros(rows, profile.seq_len // cp, dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(tracer.on_save, lambda t: t)
        with tracer, hooks, _Operators(tracer):
            mtp = {"next_tokens": tokens[:, None].expand(-1, profile.ahead, -1)}  # (B, ahead, S)
            out = getattr(model, "plan_forward", model)(tokens, **mtp if profile.ahead else {})
    tracer.close()
    logits = out if isinstance(out, Tensor) else next(iter(out.values()))
    shared = sum(tracer.shared.values())
    return Trace(tracer.kinds, tracer.first, tracer.last, shared, logits.numel())


# Operators that the compiler fuses like those that torch tags as pointwise.
_POINTWISE = (torch.ops.aten._to_copy, torch.ops.aten.cat)


class _Skip(nn.Module):
    """Stand-in for the third and later blocks of a kind."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


def _shard_model(profile: Profile, tp: int, dtype: torch.dtype) -> nn.Module:
    """Copy the model with empty parameters of a rank's shapes, in the dtype of the forward, and with `_Skip` for the
    third and later blocks of a kind."""
    model = profile.model
    samples = [model.get_submodule(name) for name in profile.samples]
    copies: dict[int, Any] = {
        id(b): _Skip() for b in profile.structure.modules(model) if b not in samples
    }
    own = {id(p): d for m in model.modules() if (d := own_dtype(m)) for p in m.parameters()}
    for name, p in model.named_parameters():
        # with more tp ranks than heads, some ranks share a head, and each of them computes all of it
        ranks = min(tp, profile.heads(name) or tp)
        shape = local_shape(tuple(p.shape), profile.role(name), ranks)
        empty = torch.empty(shape, dtype=own.get(id(p), dtype))
        copies[id(p)] = nn.Parameter(empty, p.requires_grad)
    for buffer in model.buffers():
        copies[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, copies)


class _Resize(torch.autograd.Function):
    """A collective without values: changes the size of dim -2, and saves nothing, as no backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        return x.new_empty((*x.shape[:-2], size, x.size(-1)))  # (B, size, D)


class _FusedNorm(torch.autograd.Function):
    """Saves as much as a fused RMS norm: its input, the weight, one fp32 number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)


class _Operators(DispatchMode):
    """Records the outputs that selective recomputation saves, and those that a compiled backward computes again.

    torch's partitioner computes results of pointwise operators again if only such operators read them: it fuses them
    into the kernels of the backward, for which their inputs are saved. An operand of a matmul would have to be written
    to memory once more, so it is saved.
    """

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_saved(func):
            for tensor in tensors_in(out):
                self.tracer.record(tensor, self.tracer.matmuls)

        given = {storage_id(t) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        made = {storage_id(t) for t in tensors_in(out)} - given  # a view allocates nothing
        by_element = torch.Tag.pointwise in func.tags or func.overloadpacket in _POINTWISE
        if by_element:
            self.tracer.fused |= made
        elif made:
            self.tracer.fused -= made | given
        return out


class _Tracer(TorchFunctionMode):
    """Adds the saved and sent bytes of a forward of `model`, a copy, to the trace of the running block (`here`).

    As a function mode it replaces chains of CPU operators by single ones that save as much as a GPU's kernels. Under
    context parallelism it passes the keys of all ranks to attention, which saves them if the exchange gathers.
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
        self.matmuls: dict[int, int] = {}
        self.fused: set[int] = set()  # storages that a compiled backward computes again
        self._compiles = False
        self._eager: set[int] = set()  # storages saved by modules that are not compiled
        self._saved: dict[int, int] = {}
        self._saved_by: dict[int, dict[int, int]] = {}  # the last block of a kind
        self._alive: list[Tensor] = []
        self._parameters = {storage_id(t) for t in [*model.parameters(), *model.buffers()]}
        self._entering: tuple[Tensor, Tensor] | None = None  # a layer's input, sharded and gathered
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
        """Whether attention reads keys of all cp ranks: not in an encoder before the blocks, nor with a mask, as attention
        to images has, which all ranks hold."""
        is_before = self.here is self.first
        return self.sizes["cp"] > 1 and not is_before and kwargs.get("attn_mask") is None

    def _attach(self, profile: Profile, model: nn.Module) -> None:
        """Register hooks on blocks and experts, and on the layers where tensor parallelism communicates."""
        for name, kind in profile.samples.items():
            block = model.get_submodule(name)
            block.register_forward_pre_hook(self._enter_block, with_kwargs=True, prepend=True)
            for part in compiled_parts(block):
                part.register_forward_pre_hook(partial(self._set_compiled, True))
                part.register_forward_hook(partial(self._set_compiled, False))
            block.register_forward_hook(partial(self._leave_block, kind))

        matched = profile.matched
        for name, module in model.named_modules():
            if name in matched.experts:
                module.register_forward_pre_hook(self._count_routed)
            if self.sizes["tp"] == 1:
                continue
            if name in matched.routed and not self.sequence_parallel:
                module.register_forward_pre_hook(self._shard_input)
                module.register_forward_hook(self._gather_output)
            # a mixture always shards its tokens over tp, so its shared experts gather them
            sharded = self.sequence_parallel or matched.is_routed(name)
            role = matched.leaves[name].name if name in matched.leaves else None
            if role in ("colwise", "enter", *HEADS):
                module.register_forward_pre_hook(self._gather if sharded else self._sum_gradients)
            elif role in ("rowwise", "vocab"):
                module.register_forward_hook(self._scatter if sharded else self._sum)

        for name in _opaque(profile, model) if self.sizes["tp"] > 1 else ():
            if self.sequence_parallel:
                module = model.get_submodule(name)
                module.register_forward_pre_hook(self._gather)
                module.register_forward_hook(self._scatter, prepend=True)

    # ---- saved activations

    def record(self, tensor: Tensor, where: dict[int, int]) -> None:
        """Add a tensor's bytes to `where`, by storage."""
        where[storage_id(tensor)] = _bytes(tensor)
        self._alive.append(tensor)  # so that no later storage gets its address

    def on_save(self, tensor: Tensor) -> Tensor:
        """Hook on tensors that autograd saves."""
        if storage_id(tensor) not in self._parameters:
            self.record(tensor, self._saved)
            if not self._compiles:
                self._eager.add(storage_id(tensor))
        return tensor

    def _set_compiled(self, begins: bool, *_: Any) -> None:
        """Hook at the begin and the end of a module that may be compiled."""
        self._compiles = begins

    def close(self) -> dict[int, int]:
        """Add the tensors saved since the last call to `here`, and return their bytes by storage."""
        here, saved = self.here, self._saved
        here.saved += sum(saved.values())
        again = self.fused - self._eager
        here.compiled += sum(size for key, size in saved.items() if key not in again)
        here.selective += sum(self.matmuls.values())
        here.largest = max([here.largest, *saved.values()])
        self._saved, self._entering = {}, None
        self.matmuls.clear()
        return saved

    def _enter_block(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Hook before a block: begin its trace."""
        self.close()
        tensors = tensors_in((*args, *kwargs.values()))
        self.here = BlockTrace(inputs=sum(map(_bytes, tensors)))
        self._alive += tensors

    def _leave_block(self, kind: int, *_: Any) -> None:
        """Hook after a block of this kind: end its trace."""
        saved, before = self.close(), self._saved_by.get(kind, {})
        # a tensor that two blocks save exists once for all of them
        both = {key: size for key, size in saved.items() if key in before}
        self.here.saved -= sum(both.values())
        self.here.compiled -= sum(both.values())
        self.here.selective += self.here.inputs
        self.shared |= both
        self._saved_by[kind], self.kinds[kind], self.here = saved, self.here, self.last

    # ---- collectives

    def _gathered(self, axis: str, x: Tensor) -> Tensor:
        """Return x (B, S, D) after an all-gather of its tokens over an axis."""
        return self._send(axis, x, x.size(-2) * self.sizes[axis])

    def _send(self, axis: str, x: Tensor, size: int) -> Tensor:
        """Return the output of a collective with input x; the larger of both is counted."""
        out: Tensor = _Resize.apply(x, size)
        self.record(out, self.matmuls)  # selective recomputation saves outputs of collectives
        self.here.sent[axis] += max(_bytes(x), _bytes(out))
        return out

    def _gather(self, module: nn.Module, args: Any) -> Any:
        """Hook before a layer: gather its input over tp, once for siblings with the same input."""
        if self._entering is None or self._entering[0] is not args[0]:  # once for siblings
            self._entering = (args[0], self._gathered("tp", args[0]))
        return (self._entering[1], *args[1:])

    def _scatter(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """Hook after a layer: reduce-scatter its output over tp."""
        return self._send("tp", out, out.size(-2) // self.sizes["tp"])

    def _sum(self, module: nn.Module, args: Any, out: Tensor) -> None:
        """Count an all-reduce in the forward only: the bytes of a gather and a scatter, every second pass."""
        self.here.sent["tp"] += _bytes(out)

    def _sum_gradients(self, module: nn.Module, args: Any) -> None:
        """Count an all-reduce in the backward only, once for siblings."""
        if self._entering is None or self._entering[0] is not args[0]:
            self._entering = (args[0], args[0])
            self.here.sent["tp"] += _bytes(args[0])

    def _shard_input(self, module: nn.Module, args: Any) -> Any:
        """Hook before a mixture: shard its tokens over tp."""
        return (self._scatter(module, args, args[0]), None)

    def _gather_output(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """Hook after a mixture: gather its tokens over tp."""
        return self._gathered("tp", out)

    def _count_routed(self, module: nn.Module, args: Any) -> None:
        """Hook before experts: count the bytes of their routed tokens."""
        self.here.sent["rows"] += _bytes(args[0])


def _opaque(profile: Profile, model: nn.Module) -> list[str]:
    """Outermost modules inside blocks without a parameter that tp shards. They compute all tokens; no mixtures."""
    found: list[str] = []
    for block in profile.samples:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if any(name == o or name.startswith(f"{o}.") for o in found):
                continue
            roles = {profile.role(f"{name}.{n}") for n, _ in module.named_parameters()}
            if roles == {"opaque"} and not profile.matched.is_routed(name):
                found.append(name)
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
