"""transformers.Trainer with batches, checkpoints and stop signals of Forge: trainer_loop.py FOLDER STOP_AT"""

import signal
import sys
from typing import Any

import transformers as hf

from forge_ckpt import Store
from forge_data import Batch, BuiltinCorpus, Loader, PackedStream
from forge_resilience import StopSignal


class Forge(hf.TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.saved = {name: given[name] for name in ("model", "optimizer", "lr_scheduler")}
        self.first = state.global_step = store.load({**self.saved, "data": loader}) or 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == int(sys.argv[2]):
            signal.raise_signal(signal.SIGTERM)
        control.should_training_stop |= stop.requested

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        data = loader.state_dict(after=state.global_step - self.first)  # it has read one batch more
        store.save(state.global_step, {**self.saved, "data": data})
        print(state.global_step, data["digest_chain"], given["model"].lm_head.weight.sum().item())


def inputs(batches: list[Batch]) -> dict[str, Any]:  # labels of Forge are shifted already
    return {"input_ids": (b := batches[0]).tokens, "position_ids": b.positions, "labels": b.labels, "shift_labels": b.labels}  # fmt: skip


config = hf.LlamaConfig(vocab_size=320, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)  # fmt: skip
loader = Loader(PackedStream(BuiltinCorpus("validation"), 16), global_batch=2)
arguments = hf.TrainingArguments(sys.argv[1], max_steps=6, per_device_train_batch_size=1, save_strategy="no", report_to="none", use_cpu=True)  # fmt: skip
with Store(f"{sys.argv[1]}/store") as store, StopSignal() as stop:
    hf.Trainer(None, arguments, inputs, loader, model_init=lambda: hf.LlamaForCausalLM(config), callbacks=[Forge()]).train()  # fmt: skip
sys.exit(75 if stop.requested else 0)
