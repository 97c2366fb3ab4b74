"""A loop of accelerate that every rank leaves after the same step, saved, with code 75; the same command goes on.

accelerate launch accelerate_stop.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

from forge_resilience import Agreement, ExitCode, StopSignal, Vote


class Progress:
    """The number of steps, which accelerate saves with the model."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main(folder, steps=8, on_step=lambda step: None):
    accelerator, progress = Accelerator(), Progress()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(progress)
    if Path(folder).exists():
        accelerator.load_state(folder)

    # votes are CPU tensors, which a group of NCCL does not carry
    agreement = Agreement(dist.new_group(backend="gloo") if dist.is_initialized() else None)
    told = None
    with StopSignal(announce=accelerator.is_main_process) as stop:
        while progress.step < steps and not told:
            pending = agreement.start(Vote(stop=stop.number))
            batch = torch.full((2, 4), progress.step + 1.0, device=accelerator.device)
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            on_step(progress.step)
            told = pending.wait().stop  # (rank, signal), the same on all ranks
        accelerator.save_state(folder)
    return ExitCode.REQUEUE if told else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
