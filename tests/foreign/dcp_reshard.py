"""A job that saves with torch's own dcp.save, and a tool that converts and reshards its checkpoints.

python dcp_reshard.py FOLDER: two FSDP ranks train and save; the tool makes a checkpoint of three files of it; one
process trains on from there, and so does one from the DCP checkpoint that the tool writes back. It prints the largest
difference of weights, bits included.
"""

import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from only import only
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

only("forge_ckpt")

from forge_ckpt import Store  # noqa: E402


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    return model, lambda: torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded_job(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    model, make_optimizer = build()
    fully_shard(model)
    optimizer = make_optimizer()
    train(model, optimizer, 0, 3)
    weights, slots = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": slots}, checkpoint_id=f"{folder}/step-3")
    dist.destroy_process_group()


def from_store(path):
    model, make_optimizer = build()
    optimizer = make_optimizer()
    with Store(path) as store:
        assert store.load({"model": model, "optimizer": optimizer}) == 3
    train(model, optimizer, 3, 6)
    return model.state_dict()


def from_dcp(path):
    model, make_optimizer = build()
    optimizer = make_optimizer()
    weights, slots = get_state_dict(model, optimizer)
    dcp.load(state := {"model": weights, "optimizer": slots}, checkpoint_id=path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"])
    train(model, optimizer, 3, 6)
    return model.state_dict()


def forge_ckpt(*words):
    """The command, in this process."""
    sys.argv = ["forge-ckpt", *map(str, words)]
    try:
        runpy.run_module("forge_ckpt", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{words} ended with {end.code}") from end


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.multiprocessing.spawn(sharded_job, (str(folder),), nprocs=2)
    for command in (
        ["convert", folder / "step-3", folder / "one"],
        ["reshard", folder / "one", folder / "three", "--ranks", 3],
        ["verify", folder / "three"],
        ["convert", folder / "step-3", folder / "named", "--optimizer", "names"],
        ["convert", folder / "named", folder / "back", "--to", "dcp"],
    ):
        forge_ckpt(*command)
    assert len(list((folder / "three/step-00000003").glob("data-*.bin"))) == 3
    wanted = from_dcp(folder / "step-3")
    for found in (from_store(folder / "three"), from_dcp(folder / "back")):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    print("equal", len(wanted))
