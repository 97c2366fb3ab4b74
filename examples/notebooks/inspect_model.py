# %% [markdown]
# # Inspect a model
#
# What is a model made of, and what has training made of its weights? This notebook lists the
# parameters of a run by part, what a token costs, the places inside that can be read, how weights were
# drawn and how far they have moved, and where each value of the configuration came from.
#
# Without changes it trains a model of 75,600 parameters in seconds. Set `RUN` to look at a run of yours.

# %%
import copy
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from forge_core import flops_per_token, initialize, parameter_count
from forge_core.interp import ActivationStore, points_of
from forge_train import Trainer, load_job, load_model

RUN = None  # the folder of a run of yours, such as "runs/mine"

JOB = """
model = {dim = 48, num_layers = 2, num_heads = 4, num_kv_heads = 2}
optimizer.lr = 1e-2
schedule.warmup_steps = 10
parallel.precision = "fp32"
metrics.every_steps = 40
sample.max_new_tokens = 0
train = {steps = 80, global_batch = 8}
data = {seq_len = 64, sources.text.name = "builtin"}  # English text that every Python installation has, as bytes
"""
folder = Path(tempfile.mkdtemp())
if RUN is None:
    (folder / "job.toml").write_text(JOB)
    Trainer(load_job(folder / "job.toml", {"run.dir": str(folder / "run")})).fit()
run = Path(RUN or folder / "run")
model, config, step = load_model(run)
print(model)

# %% [markdown]
# ## Parameters by part
#
# Layers of one kind are one line. `initialize` draws each parameter from the seed and its own name, so
# the weights at step 0 can be made again from the configuration alone: the last two columns compare
# their standard deviation with that of the checkpoint.

# %%
fresh = copy.deepcopy(model)
initialize(fresh, config.init_seed)
first, now = dict(fresh.named_parameters()), dict(model.named_parameters())


def kind_of(name: str) -> str:
    """layers.3.mixer.q_proj.weight -> layers.*.mixer.q_proj.weight"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


kinds = list(dict.fromkeys(map(kind_of, now)))
members = {kind: [name for name in now if kind_of(name) == kind] for kind in kinds}
numbers = {kind: sum(now[name].numel() for name in members[kind]) for kind in kinds}


def spread(weights: dict[str, torch.Tensor], kind: str) -> float:
    """Standard deviation of all weights of a kind."""
    return float(torch.cat([weights[n].detach().flatten() for n in members[kind]]).std())


total = parameter_count(model)
print(f"{total:,} parameters at step {step}\n")
print(
    f"{'parameter':38} {'shape':>12} {'layers':>6} {'number':>8} {'share':>6} {'std 0':>7} {'std':>7}"
)
for kind in kinds:
    shape = " x ".join(map(str, now[members[kind][0]].shape))
    print(
        f"{kind:38} {shape:>12} {len(members[kind]):6} {numbers[kind]:8,} {numbers[kind] / total:6.1%}"
        f" {spread(first, kind):7.4f} {spread(now, kind):7.4f}"
    )

# %% [markdown]
# Matrices are most of a model. Left: where its parameters are. Right: the matrices began normal with
# one standard deviation (the projections back into the stream with a smaller one, as there are more of
# them to add up), and training has widened them. Vectors, the scales of norms, began at exactly 1.

# %%
matrices = [kind for kind in kinds if now[members[kind][0]].ndim >= 2]
fig, (left, right) = plt.subplots(1, 2, figsize=(11, 0.36 * len(matrices) + 1.4), sharey=True)
rows = range(len(matrices))
left.barh(rows, [numbers[kind] for kind in matrices], color="tab:blue")
left.set_yticks(rows, [kind.removesuffix(".weight") for kind in matrices])
left.invert_yaxis()
left.set_xlabel("parameters, all layers together")
left.set_title(f"Where the {total:,} parameters are")
start = [spread(first, kind) for kind in matrices]
end = [spread(now, kind) for kind in matrices]
right.hlines(rows, start, end, color="0.75", linewidth=3)
right.scatter(start, rows, color="0.4", label="step 0, drawn again", zorder=3)
right.scatter(end, rows, color="tab:red", label=f"step {step}", zorder=3)
right.set_xlim(left=0)
right.set_xlabel("standard deviation of the weights")
right.set_title("How far training widened them")
right.legend()
fig.tight_layout()
plt.show()

# %% [markdown]
# ## What a token costs
#
# `flops_per_token` counts a training step: two operations for each weight of a matrix and token in the
# forward, twice that in the backward, and attention, which grows with the row. The dashed line is the
# rule of thumb, 6 operations per parameter. Embeddings are looked up, not multiplied, so a small model
# with a large vocabulary costs less than the rule says, and long rows cost more.

# %%
lengths = [2**k for k in range(5, 15)]
costs = [flops_per_token(model, n) for n in lengths]
fig, axes = plt.subplots(figsize=(6.5, 4))
axes.plot(lengths, costs, marker="o", label="flops_per_token(model, tokens)")
axes.axhline(6 * total, linestyle="--", color="0.4", label=f"6 x {total:,} parameters")
axes.axvline(
    config.data.seq_len, color="tab:green", label=f"rows of this run: {config.data.seq_len}"
)
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45)
axes.set_xlabel("tokens in a row")
axes.set_ylabel("operations of a training step, per token")
axes.set_title("Attention takes over in long rows")
axes.legend()
plt.show()

# %% [markdown]
# ## Places that can be read
#
# `points_of` names the places inside the model that `ActivationStore` reads and `intervene` changes.
# Below they are read once, for a row of bytes, to see their shapes.

# %%
text = b"The quick brown fox jumps over the lazy dog."
tokens = torch.tensor([list(text)])
store = ActivationStore(["*"])
with torch.no_grad(), store.watch(model):
    logits = model(tokens)
places = list(dict.fromkeys(map(kind_of, points_of(model))))
print(f"{len(points_of(model))} points of {len(places)} kinds, for {tokens.size(1)} tokens:")
for kind in places:
    name = next(n for n in store.names if fnmatchcase(n, kind))
    print(f"{kind:24} {tuple(store[name].shape)}")

# %% [markdown]
# ## Where each value of the configuration is from
#
# A run directory keeps its resolved configuration, each value with its origin. These are the values that
# somebody gave, in a file or as a flag; all others are defaults, or were derived from the data.

# %%
section, given = "", []
for line in (run / "config.toml").read_text().splitlines():
    if line.startswith("["):
        section = line.strip("[]")
    key, _, origin = line.partition(" # ")
    if origin and not origin.startswith(("default", "derived")):
        given.append((f"{section}.{key}", origin))
for key, origin in given:
    print(f"{key:40} {origin}")

# %% [markdown]
# ## Checks
#
# What the pictures claim, as assertions: the weights of step 0 are a function of the seed, matrices began
# with the standard deviation of the table, watching changed nothing, and longer rows cost more.

# %%
again = copy.deepcopy(fresh)
initialize(again, config.init_seed)
assert all(torch.equal(a, b) for a, b in zip(again.parameters(), fresh.parameters()))
assert sum(numbers.values()) == total
assert torch.equal(store["logits"], model(tokens).detach())
assert costs == sorted(costs)
if RUN is None:
    assert abs(spread(first, "embedding.weight") / config.model.init_std - 1) < 0.05
    assert all(a < b for a, b in zip(start, end)), "each kind of matrix is wider than it began"
print("all checks hold")
