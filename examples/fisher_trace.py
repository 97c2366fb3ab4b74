"""An extension of your own: the running trace of the empirical Fisher information, as a column of metrics."""

import torch

from forge_parallel import global_grad_norm
from forge_train import Extension


class FisherTrace(Extension):
    """Adds `fisher_trace`: the squared gradients of a step, summed over all parameters, averaged over steps."""

    name = "fisher_trace"

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.sums = torch.zeros(2)  # weighted squares, weights

    def start(self, run):
        self.run, self.sums = run, self.sums.to(run.device)

    def after_backward(self, step, batch):
        self.norm, _ = global_grad_norm(self.run.compute.counted)  # one all-reduce, in each layout

    def after_update(self, step, bad):
        new = torch.stack([self.norm.square(), torch.ones_like(self.norm)])
        sums = torch.lerp(new, self.sums, self.decay)
        self.sums = torch.where(bad > 0, self.sums, sums)  # not those of a skipped step

    def numbers(self, step):
        return self.sums

    def columns(self, numbers):
        return {self.name: numbers[0] / numbers[1] if numbers[1] else None}

    def state_dict(self):
        return {"sums": self.sums.tolist()}

    def load_state_dict(self, state):
        self.sums = torch.tensor(state["sums"], device=self.sums.device)
