"""accelerate's FSDP2, forced on CPUs, with Forge's AdamW, a scheduler of torch and a Store: accelerate_fsdp.py FOLDER"""

import sys
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import Tensor, nn

from forge_ckpt import Store
from forge_core import AdamW


def train(build: Any, folder: str, last: int) -> list[Tensor]:
    torch.manual_seed(0)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = "FSDP", plugin
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    adam = build(plain.parameters(), lr=1e-2, fused=True)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=16)
    model, optimizer, scheduler = accelerator.prepare(plain, adam, cosine)
    state = {"model": model, "optimizer": adam, "scheduler": scheduler}
    with Store(f"{sys.argv[1]}/{folder}") as store:
        print(first := store.load(state) or 0)
        for step in range(first, last):
            torch.manual_seed(2 * step + accelerator.process_index)
            accelerator.backward(model(torch.randn(4, 8)).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        store.save(last, state)
    return [parameter.full_tensor() for parameter in model.parameters()]


plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
full, _ = train(AdamW, "full", 4), train(AdamW, "stopped", 2)
for found in train(AdamW, "stopped", 4), train(torch.optim.AdamW, "torch", 4):
    assert all(map(torch.equal, full, found))
