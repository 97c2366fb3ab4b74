"""Tensor parallelism of models that do odd things: right, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_parallel._torch_compat import overlap_matmuls
from forge_parallel.prove import prove
from forge_testing import run_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
OWN_RANKS = pytest.mark.cpu_only(reason="prove forks its ranks, on CPUs")
WIDTH = 16
ROLES = {
    "emb.*": "vocab",
    "*norm.*": "sequence",
    "*.up.*": "colwise",
    "*.gate.*": "colwise",
    "*.down.*": "rowwise",
    "head.*": "sharded_logits",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(self.up(h) * torch.sigmoid(self.gate(h)))


class GradModes(Block):
    """The first of two siblings computes without a graph."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        with torch.no_grad():
            gate = torch.sigmoid(self.gate(h))
        return x + self.down(self.up(h) * gate)


class InPlace(Block):
    """What two siblings see is written to between them."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).detach()
        with torch.no_grad():
            gate = torch.sigmoid(self.gate(h))
            up = self.up(h.mul_(2.0))
        return x + self.down(up * gate)


class Queries(Block):
    """An opaque module that is given the stream three times."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.mixer(x, x, value=x + 1, need_weights=False)
        return super().forward(x + mixed)


class Latent(Block):
    """A narrow value that a rank computes from its tokens and all units inside read."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.shared = nn.Linear(WIDTH, 4), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scale = self.shared(self.narrow(h)).sum(-1, keepdim=True)
        return x + self.down(self.up(h) * scale * torch.sigmoid(self.gate(h) * scale))


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module], **more: str) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(64, WIDTH), nn.LayerNorm(WIDTH)
        self.layers, self.more = nn.ModuleList(blocks), more
        self.head = nn.Linear(WIDTH, 64, bias=False)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def parallel_roles(self) -> dict[str, str]:
        return ROLES | self.more

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


ODD = {
    "siblings of two grad modes": lambda: Net([GradModes(), GradModes()]),
    "siblings of a changed input": lambda: Net([InPlace(), InPlace()]),
    "opaque with three streams": lambda: Net([Queries()], **{"*.mixer.*": "opaque"}),
    "opaque inside opaque": lambda: Net(
        [Queries()], **{"*.mixer.in_*": "opaque", "*.mixer.out_proj.*": "opaque"}
    ),
    "enter": lambda: Net([Latent(), Latent()], **{"*.narrow.*": "sequence", "*.shared": "enter"}),
    "a block used three times": lambda: Net([Block()] * 3),
}


@OWN_RANKS
@pytest.mark.parametrize("kind", ODD)
def test_equal_to_one_process(kind: str) -> None:
    rows = prove(ODD[kind], worlds=(2,), only="tp")
    assert [row.verdict for row in rows] == ["green"] * 2, rows


def symmetric() -> tuple[bool, bool]:
    from torch._inductor import config
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    name = dist.group.WORLD.group_name
    before, flag = is_symm_mem_enabled_for_group(name), config._micro_pipeline_tp
    overlap_matmuls(name)
    config._micro_pipeline_tp = flag
    return before, is_symm_mem_enabled_for_group(name)


def test_async_tp_gives_its_ranks_symmetric_memory() -> None:
    """Without it inductor leaves their collectives as they are. The overlap itself needs a GPU."""
    assert run_on_ranks(2, symmetric) == [(False, True)] * 2
