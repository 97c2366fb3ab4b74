"""A loop like torchtitan's, with Forge's Muon: meta device, FSDP2, clipping, LambdaLR, distributed checkpoint."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

pytestmark = [pytest.mark.lane("test"), pytest.mark.uses("forge_core")]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(32, 16)
        self.layers = nn.ModuleDict({str(i): nn.Linear(16, 16) for i in range(2)})
        self.output = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = x + torch.relu(layer(x))
        return self.output(x)


def train(shard: bool) -> tuple[list[float], dict]:
    from forge_core import Muon, param_groups

    with torch.device("meta"):
        model = Model()
    for module in [*model.layers.values(), model] if shard else []:
        fully_shard(module)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.1)
    optimizer = Muon(param_groups(model, muon=True), lr=3e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    losses, tokens = [], torch.arange(64).view(4, 16) % 32
    for _ in range(12):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, get_optimizer_state_dict(model, optimizer)["state"]


def test_a_sharded_model_trains_as_one_process() -> None:
    alone, state = train(shard=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded, other = train(shard=True)
    finally:
        dist.destroy_process_group()
    assert alone[-1] < 0.6 * alone[0]
    assert sharded == pytest.approx(alone, rel=1e-4)
    assert state.keys() == other.keys()
    assert {"momentum_buffer"} == state["layers.0.weight"].keys()
    assert {"exp_avg", "exp_avg_sq", "step"} == state["tok_embeddings.weight"].keys()
