"""What one forward keeps for its backward: a block of each kind, traced without values.

The model is copied with fake parameters of this rank's shapes; blocks of a kind beyond the second are left
out, and what tensor and context parallelism send is replaced by tensors of the right shape, so no process
group is needed.

Shapes: B rows, S tokens of a row here, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from forge_parallel.plan.profile import Profile
from forge_parallel.recompute import _is_kept


@dataclass
class Kept:
    """Bytes of one block (or of what stands before or after the blocks) for one row of a micro-batch.

    saved: kept for the backward without recomputation; inputs: its own tensor arguments; selective: those
    and the outputs of products; largest: its largest tensor. sent: whole bytes that pass through the
    collectives of one forward, by axis.
    """

    saved: int = 0
    inputs: int = 0
    selective: int = 0
    largest: int = 0
    sent: dict[str, int] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """Experts for each token."""
        return max(1, round(self.sent.get("rows", 0) / self.inputs)) if self.inputs else 1


@dataclass
class Trace:
    """`kinds` as in Profile; `shared` is kept once by all blocks (rotary tables); `logits` elements."""

    kinds: list[Kept]
    first: Kept
    last: Kept
    shared: int
    logits: int


def trace(
    profile: Profile,
    *,
    tp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    gather_keys: bool = True,
    rows: int = 1,
) -> Trace:
    """Trace `rows` rows of `profile.seq_len / cp` tokens through the model as one rank has it.

    Attention is counted as a flash kernel does it (q, k, v, output, log-sum-exp), an RMS norm as a fused
    one. Bytes grow in proportion to rows. Cost: about 10 ms per kind of block; no values are computed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # private, torch 2.0 to 2.13

    tracer = _Tracer(profile, tp, cp, sequence_parallel, gather_keys)
    model = _copy(profile)
    with FakeTensorMode(), _Kernels(tracer):
        _shrink(model, profile, tp, dtype)
        tracer.attach(model)
        tokens = torch.zeros(rows, profile.seq_len // cp, dtype=torch.int64)
        with tracer.watching():
            out = model(tokens)
        logits = out if isinstance(out, Tensor) else next(iter(out.values()), out)
    return tracer.result(logits)


class _Skip(nn.Module):
    """Stands for a block of a kind that was seen twice."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


def _copy(profile: Profile) -> nn.Module:
    """The model on the meta device, third and later blocks of a kind replaced by `_Skip`."""
    kept = {id(b) for blocks in profile.samples for b in blocks}
    memo: dict[int, Any] = {id(b): _Skip() for b in profile.block_modules if id(b) not in kept}
    for tensor in [*profile.model.parameters(), *profile.model.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(profile.model, memo)


def _shrink(model: nn.Module, profile: Profile, tp: int, dtype: torch.dtype) -> None:
    """Fake parameters of one rank: cut by their roles, in the dtype of the forward."""
    rows = {r.name: r for r in profile.ends(True, True).rows}
    names = {id(b): n for n, b in profile.model.named_modules()}
    for kind, blocks in enumerate(profile.samples):
        for block in blocks:
            prefix = names[id(block)]
            rows |= {f"{prefix}.{r.name}": r for r in profile.kinds[kind].rows}
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            row = rows.get(f"{prefix}.{name}" if prefix else name)
            if id(parameter) not in made:
                shape = row.local(tp, 1) if row else tuple(parameter.shape)
                own = torch.float32 if row and row.own == 4 else dtype
                made[id(parameter)] = nn.Parameter(
                    torch.empty(shape, dtype=own), parameter.requires_grad
                )
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class _Resize(torch.autograd.Function):
    """A collective without values: one dim has another size; nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int) -> Tensor:
        ctx.shape = x.shape
        shape = list(x.shape)
        shape[dim] = size
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].new_empty(ctx.shape), None, None


class _FusedNorm(torch.autograd.Function):
    """What a fused RMS norm keeps: its input, the weight, one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        weight = ctx.saved_tensors[1]
        return torch.empty_like(grads[0]), None if weight is None else torch.empty_like(weight)


class _Kernels(TorchFunctionMode):
    """A GPU's kernels where the CPU has a chain of operators; whole keys under context parallelism."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.rms_norm:
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            return _FusedNorm.apply(args[0], weight)
        if func is F.scaled_dot_product_attention and self.tracer.cp > 1:
            q, *keys = args[:3]
            keys = [self.tracer.send("cp", k, -2, k.size(-2) * self.tracer.cp) for k in keys]
            kwargs = {**kwargs, "is_causal": False}  # the length of q is not that of k
            if self.tracer.gather_keys:
                args = (q, *keys, *args[3:])
        return func(*args, **kwargs)


class _Outputs(TorchDispatchMode):
    """Notes the outputs of products for selective recomputation."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_kept(func):
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor):
                    self.tracer.products[_key(tensor)] = _bytes(tensor)
                    self.tracer.alive.append(tensor)
        return out


class _Tracer:
    """Hooks on the copy, and what they saw."""

    def __init__(
        self, profile: Profile, tp: int, cp: int, sequence_parallel: bool, gather_keys: bool
    ) -> None:
        self.profile, self.tp, self.cp = profile, tp, cp
        self.sequence_parallel, self.gather_keys = sequence_parallel, gather_keys
        self.first, self.last = Kept(), Kept()
        self.seen: list[list[tuple[Kept, dict[int, int]]]] = [[] for _ in profile.kinds]
        self.here = self.first
        self.saved: dict[int, int] = {}
        self.products: dict[int, int] = {}
        self.parameters: set[int] = set()
        self.alive: list[Tensor] = []
        self._gathered: tuple[Tensor, Tensor] | None = None

    # ---- what is kept

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t), _Outputs(self):
            yield
        self._close(self.here)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = _key(tensor)
        if key not in self.parameters:
            self.saved[key] = _bytes(tensor)
            self.alive.append(tensor)  # so that no later storage gets its address
        return tensor

    def _close(self, part: Kept) -> dict[int, int]:
        """Book what was saved since the last border on `part`."""
        saved, self.saved = self.saved, {}
        part.saved += sum(saved.values())
        part.selective += sum(self.products.values())
        self.products = {}
        part.largest = max([part.largest, *saved.values()])
        self._gathered = None
        return saved

    def _enter(self, kind: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._close(self.here)
            self.here = Kept()
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            self.here.inputs = sum(_bytes(t) for t in tensors)
            self.alive += tensors

        return hook

    def _leave(self, kind: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self.here.selective += self.here.inputs
            self.seen[kind].append((self.here, self._close(self.here)))
            self.here = self.last

        return hook

    def result(self, logits: Any) -> Trace:
        shared: dict[int, int] = {}
        kinds = []
        for runs in self.seen:
            kept, saved = runs[-1]
            if len(runs) > 1:  # what both of a kind keep is there once for all
                both = {k: n for k, n in saved.items() if k in runs[0][1]}
                kept.saved -= sum(both.values())
                shared |= both
            kinds.append(kept)
        return Trace(kinds, self.first, self.last, sum(shared.values()),
                     logits.numel() if isinstance(logits, Tensor) else 0)  # fmt: skip

    # ---- what is sent

    def attach(self, model: nn.Module) -> None:
        """Hooks on blocks, and on the layers where tensor parallelism communicates."""
        self.parameters = {_key(t) for t in [*model.parameters(), *model.buffers()]}
        names = {id(b): n for n, b in self.profile.model.named_modules()}
        for kind, blocks in enumerate(self.profile.samples):
            for block in blocks:
                module = model.get_submodule(names[id(block)])
                module.register_forward_pre_hook(self._enter(kind), with_kwargs=True, prepend=True)
                module.register_forward_hook(self._leave(kind), with_kwargs=True)
        experts = [n for n, r in self.profile.roles.items() if r == "expert"]
        for name, module in model.named_modules():
            if any(fnmatchcase(f"{name}.", pattern) for pattern in experts):
                module.register_forward_pre_hook(self._count_rows)
        if self.tp > 1:
            self._attach_tp(model)

    def _attach_tp(self, model: nn.Module) -> None:
        roles = self.profile.roles
        stacks = [n.rpartition(".")[0] for n, r in roles.items() if r == "expert"]
        mixtures = {name.rpartition(".")[0] for name in stacks}
        for name, module in model.named_modules():
            if name in mixtures and not self.sequence_parallel:
                module.register_forward_pre_hook(self._cut)
                module.register_forward_hook(self._uncut)
            whole = name in roles or (bool(module._parameters) and not list(module.children()))
            role = next((r for n, r in roles.items() if fnmatchcase(f"{name}.weight", n)), None)
            if not whole or role not in ("colwise", "gather_output", "rowwise", "vocab"):
                continue
            enters = role in ("colwise", "gather_output")
            # a mixture has its tokens cut over tp always, so its shared experts gather them
            if self.sequence_parallel or any(name.startswith(f"{m}.") for m in mixtures):
                hook: Any = self._gather if enters else self._scatter
            else:
                hook = self._sum_gradients if enters else self._sum
            if enters:
                module.register_forward_pre_hook(hook)
            else:
                module.register_forward_hook(hook)

    def send(self, axis: str, x: Tensor, dim: int, size: int) -> Tensor:
        """x with another size of `dim`, as a collective leaves it; the larger side is counted."""
        out: Tensor = _Resize.apply(x, dim, size)
        self.products[_key(out)] = _bytes(
            out
        )  # selective recomputation keeps what collectives gave
        self.alive.append(out)
        self.here.sent[axis] = self.here.sent.get(axis, 0) + max(_bytes(x), _bytes(out))
        return out

    def _gather(self, module: nn.Module, args: Any) -> Any:
        x = args[0]
        if self._gathered is None or self._gathered[0] is not x:  # once for siblings
            self._gathered = (x, self.send("tp", x, -2, x.size(-2) * self.tp))
        return (self._gathered[1], *args[1:])

    def _scatter(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return self.send("tp", out, -2, out.size(-2) // self.tp)

    def _sum(self, module: nn.Module, args: Any, out: Tensor) -> None:
        """An all-reduce in the forward alone: the bytes of a gather and a scatter, every second pass."""
        self.here.sent["tp"] = self.here.sent.get("tp", 0) + _bytes(out)

    def _sum_gradients(self, module: nn.Module, args: Any) -> None:
        """One in the backward alone, once for siblings."""
        if self._gathered is None or self._gathered[0] is not args[0]:
            self._gathered = (args[0], args[0])
            self.here.sent["tp"] = self.here.sent.get("tp", 0) + _bytes(args[0])

    def _cut(self, module: nn.Module, args: Any) -> Any:
        return (self.send("tp", args[0], -2, args[0].size(-2) // self.tp), None)

    def _uncut(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return self.send("tp", out, -2, out.size(-2) * self.tp)

    def _count_rows(self, module: nn.Module, args: Any) -> None:
        self.here.sent["rows"] = self.here.sent.get("rows", 0) + _bytes(args[0])


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
