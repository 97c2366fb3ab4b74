"""Verified checkpoints for `transformers.Trainer`, instead of its own (`save_strategy="no"`)."""

from transformers import TrainerCallback

from forge_ckpt import Store


class ForgeCheckpoints(TrainerCallback):
    """Saves every `every` steps; training goes on from the newest sound checkpoint.

    `data` is the training set, a stream that begins at its row `data.start`.
    """

    def __init__(self, path, data, every=100):
        self.store, self.data, self.every = Store(path), data, every

    def on_train_begin(self, args, state, control, model, optimizer, lr_scheduler, **_):
        self.state = {"model": model, "optimizer": optimizer, "schedule": lr_scheduler}
        state.global_step = self.store.load(self.state) or 0
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.data.start = state.global_step * rows

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.every == 0:
            self.store.save(state.global_step, self.state, wait=False)

    def on_train_end(self, args, state, control, **_):
        self.store.close()
