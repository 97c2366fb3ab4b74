"""Plain models for the tests of tensor parallelism, and one process to compare with."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from forge_parallel.axes.roles import Role
from forge_parallel.structure import structure_of
from forge_testing import device

VOCAB, DIM, HEADS, KV, HEAD = 37, 16, 4, 2, 4


class Attention(nn.Module):
    """Grouped queries with norms of heads, biases everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HEAD
        self.q_proj = nn.Linear(DIM, HEADS * HEAD)
        self.k_proj = nn.Linear(DIM, KV * HEAD)
        self.v_proj = nn.Linear(DIM, KV * HEAD)
        self.o_proj = nn.Linear(HEADS * HEAD, DIM)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class OverHeads(nn.Module):
    """An RMS norm of a row's numbers, of which ranks may hold parts."""

    mean_over_ranks: Any = None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        squares = x.square().sum(-1, keepdim=True)
        mean = (
            squares / x.size(-1) if self.mean_over_ranks is None else self.mean_over_ranks(squares)
        )
        return x * (mean + 1e-3).rsqrt() * self.weight


class WholeNorms(Attention):
    """Norms over all heads, and a factor for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = OverHeads(HEADS * HEAD), OverHeads(KV * HEAD)
        self.factors = nn.Parameter(torch.ones(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_norm(self.q_proj(x)).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x)).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj((out * self.factors[:, None, None]).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(DIM, hidden, bias=False)
        self.up_proj = nn.Linear(DIM, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, DIM, bias=False)

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixer(nn.Module):
    """Mixes all tokens of a row in a way that nothing declares."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": nn.Linear(DIM, DIM)})
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["a"](x.cumsum(dim=1) / x.size(1)) * self.scale


@dataclass(frozen=True)
class Context:
    valid: Tensor | None = None
    document_ids: Tensor | None = None


class Experts(nn.Module):
    def __init__(self, num: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num, DIM, DIM) / 4)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("td,edf,te->tf", x, self.weight, weights)


class Routed(nn.Module):
    """Soft experts for each token, a shared expert with a gate; pads get nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4, bias=False)
        self.experts = Experts()
        self.shared = FeedForward(8)
        self.gate = nn.Linear(DIM, 1, bias=False)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor, ctx: Context | None = None) -> Tensor:
        self.seen.append(tuple(x.shape))
        tokens = x.flatten(0, -2)  # (T, D)
        out = self.experts(tokens, self.router(tokens).softmax(-1))
        if ctx is not None and ctx.valid is not None:
            out = out * ctx.valid.flatten()[:, None]
        out = out + self.shared(tokens) * self.gate(tokens).sigmoid()
        return out.view(x.shape)


class Block(nn.Module):
    def __init__(self, feed_forward: nn.Module, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer_norm, self.mixer = nn.RMSNorm(DIM), mixer
        self.norm, self.feed_forward = nn.LayerNorm(DIM), feed_forward

    def forward(self, x: Tensor, ctx: Context | None = None) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.feed_forward(self.norm(x), ctx)


class TiedHead(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class Model(nn.Module):
    """Three blocks: attention with a feed-forward, an opaque mixer, experts."""

    def __init__(self, tied: bool = False, kinds: str = "aor", vocab: int = VOCAB) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, DIM, padding_idx=3)
        blocks = {
            "a": lambda: Block(FeedForward(), Attention()),
            "o": lambda: Block(FeedForward(), Mixer()),
            "r": lambda: Block(Routed(), Attention()),
            "n": lambda: Block(FeedForward(), WholeNorms()),
        }
        self.layers = nn.ModuleList([blocks[kind]() for kind in kinds])
        self.norm = nn.RMSNorm(DIM)
        self.head: nn.Module = TiedHead() if tied else nn.Linear(DIM, vocab, bias=False)
        self.tied = tied

    def forward(self, tokens: Tensor, ctx: Context | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x, ctx)
        x = self.norm(x)
        return self.head(x, self.embedding.weight) if self.tied else self.head(x)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def parallel_roles(self) -> dict[str, Any]:
        roles: dict[str, Any] = {
            "embedding.*": "vocab",
            "norm.*": "sequence",
            "head" if self.tied else "head.*": "sharded_logits",
            "layers.*.mixer_norm.*": "sequence",
        }
        for i, block in enumerate(self.layers):
            roles[f"layers.{i}.norm.*"] = "sequence"
            if isinstance(block.mixer, Mixer):
                roles[f"layers.{i}.mixer.*"] = "opaque"
            else:
                whole = isinstance(block.mixer, WholeNorms)
                roles[f"layers.{i}.mixer.q_proj.*"] = "colwise"
                for name in ("k_proj", "v_proj"):
                    roles[f"layers.{i}.mixer.{name}.*"] = "shared_heads" if whole else "colwise"
                roles[f"layers.{i}.mixer.o_proj.*"] = "rowwise"
                if whole:
                    roles[f"layers.{i}.mixer.factors"] = "by_heads"
                    roles[f"layers.{i}.mixer.q_norm.*"] = "norm_over_heads"
                    roles[f"layers.{i}.mixer.k_norm.*"] = Role("norm_over_heads", shared=True)
                else:
                    roles[f"layers.{i}.mixer.?_norm.*"] = "replicate_sum_grad"
            inside = f"layers.{i}.feed_forward"
            if isinstance(block.feed_forward, Routed):
                roles[f"{inside}.experts.*"] = "expert"
                roles[f"{inside}.router.*"] = "replicate_sum_grad"
                roles[f"{inside}.gate.*"] = "replicate_sum_grad"
                inside += ".shared"
            roles[f"{inside}.*_proj.weight"] = "colwise"
            del roles[f"{inside}.*_proj.weight"]
            for name, role in (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise")):
                roles[f"{inside}.{name}_proj.*"] = role
        return roles


def seeded(seed: int = 0, **options: Any) -> Model:
    """A model with values of its own in norms and biases too."""
    torch.manual_seed(seed)
    model = Model(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
        model.embedding.weight[3] = 0.5
    return model.to(device())


def batch(rows: int, size: int = 8, vocab: int = VOCAB) -> tuple[Tensor, Tensor, Context]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, vocab, (rows, size), generator=generator)
    tokens[0, 1] = 3
    labels = torch.randint(0, vocab, (rows, size), generator=generator)
    labels[0, :3] = -100
    valid = torch.rand(rows, size, generator=generator) > 0.2
    return tokens.to(device()), labels.to(device()), Context(valid=valid.to(device()))


def one_process(model: nn.Module, tokens: Tensor, labels: Tensor, *args: Any) -> Tensor:
    """Loss per label of one process; gradients are left in the model."""
    logits = model(tokens, *args)
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    loss = total / (labels != -100).sum()
    loss.backward()
    return loss.detach()


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh(device().type, (dp, tp), mesh_dim_names=("dp_shard", "tp"))


def shard(model: Any, mesh: DeviceMesh, everywhere: DeviceMesh | None = None) -> Any:
    """FSDP2 around every block and the root; experts over all ranks."""
    experts = [m for m in model.modules() if isinstance(m, Experts)]
    for module in [*experts, *structure_of(model).modules(model), model]:
        fully_shard(module, mesh=everywhere if module in experts else mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def errors(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    """Worst difference of each gradient, by its largest value."""
    want = dict(reference.named_parameters())
    found = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        theirs = want[name].grad
        assert theirs is not None
        found[name] = float((full - theirs).abs().max() / theirs.abs().max())
    assert list(found) == list(want)
    return found


def copy_of(model: nn.Module) -> Any:
    return copy.deepcopy(model)
