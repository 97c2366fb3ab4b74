"""Three steps from FROM, a checkpoint of Forge or of DCP, or from none; FSDP2 on ranks; dcp.save: dcp_job.py FROM TO"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from forge_ckpt import Store

source, target = map(Path, sys.argv[1:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
first = 3 if source.exists() else 0
if (source / ".metadata").exists():
    weights, slots = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": slots}, checkpoint_id=source)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=slots)
elif first:
    with Store(source) as store:
        store.load({"model": model, "optimizer": optimizer})
for step in range(first, first + 3):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights, slots = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": slots}, checkpoint_id=target)
