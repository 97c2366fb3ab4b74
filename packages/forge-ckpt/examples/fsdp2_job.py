"""A plain FSDP2 job that goes on where it was killed: torchrun --nproc-per-node 2 fsdp2_job.py CHECKPOINTS"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from forge_ckpt import Store

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer}
with Store(sys.argv[1], keep_last=2) as store:
    for step in range((store.load(state) or 0) + 1, 13):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        store.save(step, state, wait=False)  # the next save, or the end, waits for it
dist.destroy_process_group()
