"""Keys that stay as they are once a run has a checkpoint.

A key is fixed where another value gives the saved state another meaning: the function that the weights compute, what the
optimizer's state is, which sample an index of the data names. Keys that only change how training goes on (learning rates,
batch, length, intervals, layouts) are free, and a resume reports them as changed. A new key is free unless it is listed here.

The lists are here and not at the fields: these are in packages that know no run, and readers of a run import none of them.
"""

from __future__ import annotations

#: What the state of the optimizer is; a fork that keeps this state must agree, too.
OPTIMIZER_KEYS = ("optimizer.name", "optimizer.state_dtype", "parallel.param_dtype")
#: Keys whose change makes another experiment, besides those of [model] and [lora].
FIXED_KEYS = (
    *("run.seed", "init.seed", "init.from", "init.keep", "init.patterns", "init.encoder"),
    *OPTIMIZER_KEYS,
    "data.seq_len",
)
#: Of [model] everything is fixed but what shapes no output: the length limit, the initial spread, the
#: weights of further losses, how products are computed.
FREE_MODEL_KEYS = (
    "model.max_seq_len",
    "model.init_std",
    "model.mtp.weight",
    "model.moe.aux_loss_weight",
    "model.moe.sequence_loss_weight",
    "model.moe.z_loss_weight",
    "model.moe.backend",
    "model.moe.dispatcher",
    "model.moe.dispatch_chunks",
)


def is_fixed(key: str) -> bool:
    """Whether a change of a key makes another experiment."""
    if key.startswith("model."):
        return key not in FREE_MODEL_KEYS
    return key in FIXED_KEYS or key.startswith("lora.")
