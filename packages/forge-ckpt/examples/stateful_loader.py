"""torchdata's StatefulDataLoader in a Store, one on each rank: a run goes on in the middle of an epoch."""

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from forge_ckpt import Store


def read(path, steps, rows=96, workers=2):
    """Take `steps` batches of two, from where the last call ended; returns what this rank has read."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sampler = StatefulDistributedSampler(range(rows), world, rank, shuffle=True, seed=0)
    loader = StatefulDataLoader(torch.arange(rows), 2, sampler=sampler, num_workers=workers)
    state = {f"loader{rank}": loader, "model": torch.zeros(3)}  # a name for each rank's position
    with Store(path) as store:
        begin = store.load(state) or 0
        found = [batch.tolist() for _, batch in zip(range(steps), loader)]
        store.save(begin + steps, state)
    return found
