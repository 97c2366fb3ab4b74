"""A loop like torchtitan's, with Forge's Muon: meta device, FSDP2 where there are ranks, clipping, LambdaLR."""

from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from forge_core import Muon, param_groups

with torch.device("meta"):
    embedding, output = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)))
model = nn.Sequential(OrderedDict(tok_embeddings=embedding, layers=layers, output=output))
for module in [*layers, model] if dist.is_initialized() else []:
    fully_shard(module)
model.to_empty(device="cpu")
torch.manual_seed(0)
for parameter in model.parameters():
    nn.init.normal_(parameter.data, std=0.3)
optimizer = Muon(param_groups(model, muon=True), lr=3e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
tokens = torch.arange(64).view(4, 16) % 32
losses: list[float] = []
for _ in range(16):
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
state = get_optimizer_state_dict(model, optimizer)["state"]
