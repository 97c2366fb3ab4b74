"""A small GPT in plain torch that stops, goes on, and is watched. The lines that end with `# +` are what that takes.

python -m forge_resilience.supervise --nproc 2 --journal RUN/events.jsonl -- python nano_gpt.py RUN
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from forge_resilience import Agreement, ExitCode, Journal, StopSignal, Vote, nonfinite  # +
from forge_resilience.heartbeat import Heartbeat  # +

STEPS, SAVE_EVERY = 24, 4


class Block(nn.Module):
    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x):  # (B, S, D)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab=64, dim=32, length=16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks, self.head = nn.Sequential(Block(dim), Block(dim)), nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]]))


def loss_of(model, step, rank):
    """Cross-entropy of this rank's part of the batch of a step."""
    ids = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(1000 * step + rank))
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def save(path, step, model, optimizer):
    new = path.with_suffix(".new")
    torch.save(
        {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, new
    )
    os.replace(new, path)


def main(run):
    heartbeat = Heartbeat.from_environ()  # +
    dist.init_process_group("gloo")
    rank, path = dist.get_rank(), Path(run, "checkpoint.pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    heartbeat.enter("load")  # +
    if path.exists():
        state = torch.load(path, weights_only=True)
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    journal = Journal(Path(run, "events.jsonl") if rank == 0 else None)  # +
    journal.record("resume" if step else "start", step=step)  # +
    told = None
    with StopSignal(announce=rank == 0) as stop:  # +
        while step < STEPS and told is None:
            step += 1
            heartbeat.enter("step", step)  # +
            vote = Agreement().start(Vote(stop=stop.number))  # +
            loss_of(model, step, rank).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if nonfinite(norm):  # + the same on all ranks, as their gradients are
                journal.record("skip", step=step, grad_norm=norm)  # +
            else:
                optimizer.step()
            optimizer.zero_grad()
            told = vote.wait().stop  # + all ranks stop after the same step
            if rank == 0 and (step % SAVE_EVERY == 0 or step == STEPS or told):
                heartbeat.enter("save")  # +
                save(path, step, model, optimizer)
                journal.record("save", step=step)  # +
    heartbeat.enter("exit")  # +
    journal.record("stop" if told else "done", step=step)  # +
    dist.destroy_process_group()
    return ExitCode.REQUEUE if told else ExitCode.DONE  # +


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
