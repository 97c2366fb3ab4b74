"""A loop of Lightning's Fabric with a Loader, which goes on from a checkpoint of Fabric: fabric_loop.py FILE STEPS"""

import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from forge_data import BuiltinCorpus, Loader, PackedStream

file, steps = Path(sys.argv[1]), int(sys.argv[2])
fabric = Fabric(accelerator="cpu", devices=1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(320, 8), torch.nn.Linear(8, 320))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
loader = Loader(PackedStream(BuiltinCorpus("validation"), 16, seed=0), global_batch=2)
state = {"model": model, "optimizer": optimizer, "data": {}}
if file.exists():
    fabric.load(file, state)
    loader.load_state_dict(state["data"])
batches = fabric.setup_dataloaders(DataLoader(loader, batch_size=None, num_workers=2))
for _, batch in zip(range(steps), batches):
    loss = torch.nn.functional.cross_entropy(
        model(batch.tokens).flatten(0, 1), batch.labels.flatten()
    )
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(*batch.instance_ids.tolist(), loss.item())
state["data"] = loader.state_dict(after=batch)
fabric.save(file, state)
