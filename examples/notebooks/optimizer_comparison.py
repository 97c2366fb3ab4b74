# %% [markdown]
# # Compare optimizers
#
# Which optimizer learns most from the same tokens? A fair answer needs the same initial weights, the same data in the
# same order, the same number of tokens, and for each optimizer a learning rate of its own: the best rate of Lion is several
# times below that of AdamW, and that of Muon is of another scale. This notebook trains AdamW, Lion and Muon at
# several rates, checks that all read the same rows, and draws what they make of them.
#
# It trains nine models of 41,000 parameters, a second each. The answer for them is not the answer for yours:
# set `BASE` to a job of your own, and `RATES` and `SETTINGS` to what you want to compare. `docs/optimizers.md` of the
# repository has a larger study with several seeds.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy

from forge_train import Trainer, load_job, read_run

BASE = None  # a job of yours, such as "apps/train/configs/debug.toml"

JOB = """
model = {dim = 32, num_layers = 2, num_heads = 4}
data = {seq_len = 64, sources.text.name = "builtin"}  # English text that every Python installation has, as bytes
train = {steps = 75, global_batch = 8}
schedule.warmup_steps = 10
parallel.precision = "fp32"
eval = {every_steps = 15, sequences = 16, at_start = true}
metrics = {every_steps = 5, console = "off"}
checkpoint.every_steps = 0
sample.max_new_tokens = 0
"""
RATES = {
    "adamw": (1e-2, 3e-2, 1e-1),
    "lion": (1e-3, 3e-3, 1e-2),
    "muon": (2e-2, 6e-2, 2e-1),
}
SETTINGS = {
    "lion": {"optimizer.betas": [0.9, 0.99]},
    "muon": {"optimizer.muon.adjust": "original", "optimizer.muon.adamw_lr_multiplier": 0.2},
}
folder = Path(tempfile.mkdtemp())
base = Path(BASE or folder / "job.toml")
if BASE is None:
    base.write_text(JOB)
runs = {}
for name, rates in RATES.items():
    for rate in rates:
        keys = {"optimizer.name": name, "optimizer.lr": rate, **SETTINGS.get(name, {})}
        run_dir = folder / f"{name}-{rate:g}"
        Trainer(load_job(base, {**keys, "run.dir": str(run_dir)})).fit()
        runs[name, rate] = read_run(run_dir)
final = {
    key: [v for v in run.metrics["val_loss"] if v is not None][-1] for key, run in runs.items()
}
best = {name: min(rates, key=lambda rate: final[name, rate]) for name, rates in RATES.items()}
for (name, rate), loss in final.items():
    print(f"{name:6} lr {rate:<6g} validation loss {loss:.4f}{'  best' * (best[name] == rate)}")

# %% [markdown]
# ## Rates
#
# The loss in the end over the learning rate. An optimizer whose best rate lies at the edge of what was tried
# has not been judged yet: try a rate beyond it.

# %%
colours = dict(zip(RATES, ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")))
fig, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
for name, rates in RATES.items():
    axes.plot(
        rates, [final[name, rate] for rate in rates], marker="o", color=colours[name], label=name
    )
    axes.plot(best[name], final[name, best[name]], marker="*", markersize=16, color=colours[name])
axes.set_xscale("log")
axes.set_xlabel("learning rate")
axes.set_ylabel("validation loss in the end (nats)")
axes.set_title("Each optimizer has its own rate (star: the best)")
axes.legend()
plt.show()

# %% [markdown]
# ## Curves at the best rates
#
# Left: the validation loss over tokens, the same tokens for all. Right: the norm of the gradients before clipping. Norms say where the
# weights are, not how good the optimizer is.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
for name, rate in best.items():
    metrics = runs[name, rate].metrics
    measured = [(t, v) for t, v in zip(metrics["tokens"], metrics["val_loss"]) if v is not None]
    left.plot(*zip(*measured), marker="o", color=colours[name], label=f"{name}, lr {rate:g}")
    steps = [(s, n) for s, n in zip(metrics["step"], metrics["grad_norm"]) if n is not None]
    right.plot(*zip(*steps), color=colours[name])
left.set_xlabel("tokens")
left.set_ylabel("validation loss (nats)")
left.set_title("The same tokens in the same order")
left.legend()
right.set_xlabel("step")
right.set_ylabel("norm of the gradients")
right.set_yscale("log")
right.set_title("Norm of the gradients before clipping")
plt.show()

# %% [markdown]
# ## How much training does an optimizer save?
#
# Where does each curve pass the final loss of the worst of the three? That is a comparison in tokens, which a
# difference of losses does not give. (A curve whose rate would have fallen earlier would pass it a little sooner.)

# %%
target = max(final[name, rate] for name, rate in best.items())
needed = {}
for name, rate in best.items():
    metrics = runs[name, rate].metrics
    tokens, losses = zip(
        *[(t, v) for t, v in zip(metrics["tokens"], metrics["val_loss"]) if v is not None]
    )
    needed[name] = float(
        numpy.interp(-target, [-v for v in numpy.minimum.accumulate(losses)], tokens)
    )
    print(f"{name:6} reaches {target:.3f} after {needed[name]:8,.0f} of {tokens[-1]:,} tokens")
fig, axes = plt.subplots(figsize=(6.5, 0.5 * len(needed) + 1.2), layout="constrained")
axes.barh(list(needed), list(needed.values()), color=[colours[name] for name in needed])
axes.invert_yaxis()
axes.set_xlabel(f"tokens until a validation loss of {target:.3f}")
plt.show()

# %% [markdown]
# ## Checks
#
# The comparison is fair: the digests of the rows of each step are the same in all runs, and so are tokens and, before the first
# step, losses. Of the small model: all learn, and no best rate of AdamW or Lion is that of the other.

# %%
one = next(iter(runs.values())).metrics
for run in runs.values():
    assert run.metrics["instances"] == one["instances"]
    assert run.metrics["tokens"] == one["tokens"]
    assert run.metrics["val_loss"][0] == one["val_loss"][0]
assert max(needed.values()) <= one["tokens"][-1]
if BASE is None:
    assert one["step"][0] == 0
    assert all(final[name, rate] < one["val_loss"][0] - 1.5 for name, rate in best.items())
    assert best["lion"] < best["adamw"]
print("all checks hold")
