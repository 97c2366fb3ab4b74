"""transformers.Trainer with batches, checkpoints and stop signals of Forge: trainer_loop.py FOLDER STOP_AT"""

import os
import signal
import sys

import transformers

from forge_ckpt import Store
from forge_data import BuiltinCorpus, Loader, PackedStream
from forge_resilience import StopSignal


class Forge(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, model, optimizer, lr_scheduler, **_):
        self.saved = {
            "model": model,
            "optimizer": optimizer,
            "schedule": lr_scheduler,
            "data": loader,
        }
        self.first = state.global_step = store.load(self.saved) or 0

    def on_step_end(self, args, state, control, **_):
        if state.global_step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGTERM)
        control.should_training_stop |= stop.requested

    def on_train_end(self, args, state, control, model, **_):  # the Trainer has read one batch more
        data = loader.state_dict(after=state.global_step - self.first)
        store.save(state.global_step, {**self.saved, "data": data})
        print(state.global_step, data["digest_chain"], model.lm_head.weight.sum().item())


def inputs(batches):  # labels of Forge are shifted already
    (b,) = batches
    return {
        "input_ids": b.tokens,
        "position_ids": b.positions,
        "labels": b.labels,
        "shift_labels": b.labels,
    }


transformers.set_seed(0)
config = transformers.LlamaConfig(vocab_size=320, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)  # fmt: skip
loader = Loader(PackedStream(BuiltinCorpus("validation"), 16), global_batch=2)
arguments = transformers.TrainingArguments(sys.argv[1], max_steps=6, per_device_train_batch_size=1, save_strategy="no", report_to="none", use_cpu=True)  # fmt: skip
with Store(f"{sys.argv[1]}/store") as store, StopSignal() as stop:
    transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, inputs, loader, callbacks=[Forge()]).train()  # fmt: skip
sys.exit(75 if stop.requested else 0)
