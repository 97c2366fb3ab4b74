"""A callback of Lightning that ends training on a signal after the same step on all ranks, saved, with code 75."""

import torch.distributed as dist
from lightning.pytorch import Callback

from forge_resilience import Agreement, ExitCode, StopSignal, Vote


class ForgeStop(Callback):
    """`trainer.fit(model, data, ckpt_path=stop.path_if_saved)`, then `sys.exit(stop.exit_code)`."""

    def __init__(self, path):
        self.path, self.stop, self.told = path, StopSignal(), None

    @property
    def path_if_saved(self):
        return self.path if self.path.exists() else None

    @property
    def exit_code(self):
        return ExitCode.REQUEUE if self.told else ExitCode.DONE

    def on_fit_start(self, trainer, module):
        # votes are CPU tensors, which a group of NCCL does not carry
        self.agreement = Agreement(
            dist.new_group(backend="gloo") if dist.is_initialized() else None
        )
        self.stop.__enter__()  # in place of Lightning's handlers, which end the process without code 75

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.told = self.agreement.start(Vote(stop=self.stop.number)).wait().stop
        if self.told:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True

    def teardown(self, trainer, module, stage):
        self.stop.__exit__(None, None, None)
