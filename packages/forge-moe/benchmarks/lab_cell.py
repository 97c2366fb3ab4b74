"""One cell of the lab: a scenario through a layer with one backend and one dispatcher.

Shapes: T tokens of a rank, K slots per token, E experts, D width, F hidden width, W ranks.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peak_memory import peak_bytes
from routing_scenarios import SCENARIOS, Shape
from torch import Tensor

from forge_moe import MoE, MoEConfig, expert_parallelize

STEPS = 4
BOUNDS = {"float32": 1e-5, "bfloat16": 3e-2, "float8": 0.2}


@dataclass(frozen=True)
class Settings:
    """Sizes of the lab; `num_tokens` is per rank, and so are the times."""

    num_tokens: int = 1024
    dim: int = 256
    hidden_dim: int = 512
    num_experts: int = 8
    top_k: int = 2
    dtype: str = "float32"
    rounds: int = 5
    device: str = "cpu"


@dataclass(frozen=True)
class Cell:
    """What was measured. Times are of forward and backward of the slowest rank, errors of the worst.

    milliseconds: median over steps and rounds; slowest_step: the largest of the steps' medians.
    peak_mib: most bytes of tensors alive at once that a step made, on any rank; on a GPU the
    allocator's. error: max|a - b| / max|b| over outputs and gradients of inputs and experts, against a
    loop over experts in float64 on one process. load: fullest expert over the mean, worst step.
    """

    scenario: str
    backend: str
    dispatcher: str
    milliseconds: float
    slowest_step: float
    peak_mib: float
    error: float
    load: float
    exact: bool


def run_cell(
    settings: Settings, scenario: str, backend: str, dispatcher: str, mesh: Any = None
) -> Cell:
    """Measure one cell; with a `mesh` of one axis, collectively over its ranks.

    Raises ValueError for what the layer refuses with that backend, dtype or device.
    """
    rank, ranks = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)
    # alone, the hot rank is one of four that might be
    shape = Shape(settings.num_tokens, settings.num_experts, settings.top_k, max(ranks, 4))
    layer = _layer(settings, backend)
    reference = {name: p.detach().double() for name, p in layer.named_parameters()}
    if mesh is not None:
        options: Any = {"ranks_per_node": ranks // 2} if dispatcher == "hierarchical" else {}
        expert_parallelize(layer, mesh, **options, dispatcher=dispatcher)  # type: ignore[arg-type]
    ids = [
        [SCENARIOS[scenario](shape, r, step).to(settings.device) for r in range(ranks)]
        for step in range(STEPS)
    ]
    inputs = [_input(settings, r, len(of_rank)) for r, of_rank in enumerate(ids[0])]
    steps = [_step(layer, inputs[rank], ids[step][rank]) for step in range(STEPS)]

    seconds = _seconds(steps, settings.rounds, mesh)
    error = _error(layer, reference, inputs, ids[-1], rank, steps[-1]())
    bound = BOUNDS["float8" if backend == "float8" else settings.dtype]
    (error,) = _worst([error], mesh)
    (peak,) = _worst([peak_bytes(steps[-1], settings.device) / 2**20], mesh)
    return Cell(
        scenario=scenario,
        backend=backend,
        dispatcher=dispatcher,
        milliseconds=1e3 * median(median(of_step) for of_step in seconds),
        slowest_step=1e3 * max(median(of_step) for of_step in seconds),
        peak_mib=peak,
        error=error,
        load=max(_load(torch.cat(of_step), settings.num_experts) for of_step in ids),
        exact=error <= bound,
    )


def _layer(settings: Settings, backend: str) -> MoE:
    config = MoEConfig(
        dim=settings.dim,
        hidden_dim=settings.hidden_dim,
        num_experts=settings.num_experts,
        top_k=settings.top_k,
        backend=backend,  # type: ignore[arg-type]  # checked by the config
    )
    torch.manual_seed(0)
    layer = MoE(config)
    with torch.no_grad():
        for parameter in layer.parameters():  # outputs of the size of the inputs
            parameter.normal_(std=parameter.size(-2) ** -0.5)
    return layer.to(settings.device, getattr(torch, settings.dtype))


def _input(settings: Settings, rank: int, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, settings.dim, generator=generator)
    return x.to(settings.device, getattr(torch, settings.dtype)).requires_grad_()


def _step(layer: MoE, x: Tensor, ids: Tensor) -> Callable[[], Tensor]:
    """Forward and backward with these routes; the gradient of the output is the output."""
    rule = layer.router.rule._replace(choose=lambda scores, config, valid: ids)

    def step() -> Tensor:
        layer.router.rule = rule
        x.grad = None
        layer.zero_grad()
        y: Tensor = layer(x)
        y.backward(y.detach())
        return y.detach()

    return step


def _seconds(steps: list[Callable[[], Tensor]], rounds: int, mesh: Any) -> list[list[float]]:
    """Seconds of each step, one entry a round, of the slowest rank; one more round goes first."""
    seconds: list[list[float]] = [[] for _ in steps]
    for index in range(rounds + 1):
        for of_step, step in zip(seconds, steps):
            if mesh is not None:
                dist.barrier(mesh.get_group())
            start = time.perf_counter()
            y = step()
            if y.is_cuda:
                torch.cuda.synchronize(y.device)
            (slowest,) = _worst([time.perf_counter() - start], mesh)
            if index:
                of_step.append(slowest)
    return seconds


def _worst(values: list[float], mesh: Any) -> list[float]:
    """The largest of each value over the ranks."""
    if mesh is None:
        return values
    found = torch.tensor(values, dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(found, dist.ReduceOp.MAX, mesh.get_group())
    return found.tolist()


def _error(
    layer: MoE,
    reference: dict[str, Tensor],
    inputs: list[Tensor],
    ids: list[Tensor],
    rank: int,
    y: Tensor,
) -> float:
    """Worst error of this rank after a step: of y, its input's gradient, its experts' gradients."""
    weights = {name: value.requires_grad_() for name, value in reference.items()}
    x = torch.cat(inputs).detach().double().requires_grad_()
    wanted = by_loop(weights, x, torch.cat(ids))
    wanted.backward(wanted.detach())
    start = sum(len(i) for i in inputs[:rank])
    own = slice(start, start + len(inputs[rank]))
    assert x.grad is not None
    pairs = [(y, wanted.detach()[own]), (inputs[rank].grad, x.grad[own])]
    for name, parameter in layer.experts.named_parameters():
        full, grad = weights[f"experts.{name}"].grad, parameter.grad
        assert full is not None
        assert grad is not None
        local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
        first = rank * local.size(0) if local.size(0) < full.size(0) else 0
        pairs.append((local, full[first : first + local.size(0)]))
    return max(_relative(got, want) for got, want in pairs)


def _relative(got: Tensor | None, want: Tensor) -> float:
    if not want.numel():
        return 0.0
    assert got is not None
    return float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30))


def by_loop(weights: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
    """The layer as its definition says it, expert by expert: x (T, D), ids (T, K) -> (T, D)."""
    logits = x @ weights["router.weight"].T  # (T, E)
    shares = logits.gather(1, ids).softmax(1)  # (T, K)
    y = torch.zeros_like(x)
    for e in range(logits.size(1)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        gate = F.silu(x[token] @ weights["experts.gate_proj"][e])  # (rows, F)
        out = gate * (x[token] @ weights["experts.up_proj"][e]) @ weights["experts.down_proj"][e]
        y = y.index_add(0, token, shares[token, slot].unsqueeze(1) * out)
    return y


def _load(ids: Tensor, num_experts: int) -> float:
    counts = ids.flatten().bincount(minlength=num_experts)
    return float(counts.max() / counts.float().mean().clamp(min=1e-9))
