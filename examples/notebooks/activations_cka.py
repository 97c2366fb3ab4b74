# %% [markdown]
# # Activations: layers and checkpoints compared
#
# How alike are the representations of two layers, and when in training does a layer become what it
# is in the end? This notebook writes the residual stream of several checkpoints of a run to files, compares
# them by linear CKA and SVCCA, and reads each depth with the model's own head (logit lens).
#
# Without changes it trains a model of four layers in seconds. Set `RUN` to look at a run of yours that has
# several checkpoints; it must have held-out rows.

# %%
import copy
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy
import torch
import torch.nn.functional as F

from forge_ckpt import Store
from forge_core import initialize
from forge_core.interp import ActivationStore, debiased_linear_cka, linear_cka, logit_lens, svcca
from forge_lab import extract_run
from forge_train import Trainer, load_job, load_model, load_trained

RUN = None  # the folder of a run of yours, such as "runs/mine"
ROWS = 16  # held-out rows that are read

JOB = """
model = {dim = 48, num_layers = 4, num_heads = 4}
data = {seq_len = 64, sources.text.name = "builtin"}  # English text that every Python installation has, as bytes
train = {steps = 240, global_batch = 8}
optimizer = {name = "muon", lr = 0.03, muon = {adjust = "original", adamw_lr_multiplier = 0.2}}
schedule.warmup_steps = 10
parallel.precision = "fp32"
eval.every_steps = 240
metrics.every_steps = 80
sample.max_new_tokens = 0
checkpoint = {every_steps = 40, keep_last = 10}
"""
folder = Path(tempfile.mkdtemp())
if RUN is None:
    (folder / "job.toml").write_text(JOB)
    Trainer(load_job(folder / "job.toml", {"run.dir": str(folder / "run")})).fit()
run = Path(RUN or folder / "run")
with Store(run / "checkpoints", read_only=True) as store:
    steps = store.steps()
model, tokenizer, last = load_trained(run)
print("checkpoints:", *steps)

# %% [markdown]
# ## The stream of each checkpoint
#
# `extract_run` writes points of a checkpoint on held-out rows to one .npz file, as `forge-train extract` does.
# Depth 0 is the stream before the first layer, the embedding; depth d the stream behind d layers. Step 0 is
# no checkpoint: its weights are drawn again, and an `ActivationStore` reads the same tokens.

# %%
points = ("layers.0.resid_pre", "layers.*.resid_post")
streams: dict[int, list[torch.Tensor]] = {}  # step -> for each depth (tokens, M)
for step in steps:
    out = folder / f"stream-{step}.npz"
    extract_run(run, points, out, rows=ROWS, step=step)
    with numpy.load(out) as file:
        streams[step] = [
            torch.from_numpy(file[n]).flatten(0, 1) for n in file.files if "resid" in n
        ]
        tokens, positions, documents = (
            torch.from_numpy(file[n]).long() for n in ("tokens", "positions", "document_ids")
        )
fresh = copy.deepcopy(model)
initialize(fresh, load_model(run)[1].init_seed)
store = ActivationStore(points)
with torch.no_grad(), store.watch(fresh):
    fresh(tokens, positions=positions, document_ids=documents)
streams[0] = [store[name].flatten(0, 1) for name in store.names]
steps = [0, *steps]
num_depths = len(streams[0])
print({step: [tuple(x.shape) for x in values][:2] for step, values in streams.items()})

# %% [markdown]
# ## Layers beside layers
#
# Linear CKA (Kornblith et al. 2019) is 1 for representations that are one another's rotation and scaling,
# and 0 for unrelated ones. SVCCA (Raghu et al. 2017) takes the directions that explain 99 % of each one's
# variance, and averages how well they correlate: it weighs them alike, where CKA weighs a direction by its variance. Expect
# neighbours to be alike, as each layer adds to the stream of the one before it. The tables differ from machine to machine: often one
# depth differs from all others in CKA, because a few directions have most of its variance, and less in SVCCA.

# %%
final = streams[last]
tables = {
    "linear CKA": torch.tensor([[linear_cka(x, y) for y in final] for x in final]),
    "SVCCA": torch.tensor([[svcca(x, y) for y in final] for x in final]),
}


def draw_table(axes, values: torch.Tensor):
    """Depth beside depth, numbers inside where they can be read; returns the image."""
    image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", origin="lower")
    if len(values) <= 10:
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                axes.text(
                    j,
                    i,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    color="k" if value > 0.6 else "w",
                )
        axes.set_xticks(range(len(values)))
        axes.set_yticks(range(len(values)))
    axes.set_xlabel("depth (layers passed)")
    axes.set_ylabel("depth (layers passed)")
    return image


fig, both = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
for axes, (name, values) in zip(both, tables.items()):
    image = draw_table(axes, values)
    axes.set_title(f"{name} between depths, step {last}")
fig.colorbar(image, ax=both, label="similarity (1: alike)", shrink=0.8)
plt.show()

# %% [markdown]
# ## Checkpoints beside the last one
#
# Each line is a depth: how alike its stream at a checkpoint is to its stream in the end. Which depths settle early, and
# which go on changing until the rate has fallen?

# %%
curves = [[linear_cka(streams[s][d], final[d]) for s in steps] for d in range(num_depths)]
fig, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
colours = plt.get_cmap("viridis")(numpy.linspace(0, 0.9, num_depths))
for depth, curve in enumerate(curves):
    axes.plot(steps, curve, marker="o", color=colours[depth], label=f"depth {depth}")
axes.set_xlabel("step of the checkpoint")
axes.set_ylabel(f"linear CKA with step {last}")
axes.set_ylim(0, 1.03)
axes.set_title("When each depth becomes what it is")
axes.legend(ncols=max(1, num_depths // 8))
plt.show()

# %% [markdown]
# ## How many tokens does it take?
#
# Random features have nothing in common, but with few samples linear CKA finds them alike: with as many features as
# samples it is near 1. The debiased form is near 0 from the start. Look at this picture before believing a high CKA.

# %%
width = final[0].size(1)
counts = [width // 4, width // 2, width, 2 * width, 4 * width, 16 * width]
noise = torch.randn(2, counts[-1], width, generator=torch.Generator().manual_seed(0))
biased = [linear_cka(noise[0, :n], noise[1, :n]) for n in counts]
debiased = [debiased_linear_cka(noise[0, :n], noise[1, :n]) for n in counts]
fig, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
axes.plot(counts, biased, marker="o", label="linear CKA")
axes.plot(counts, debiased, marker="o", label="debiased linear CKA")
axes.axvline(len(final[0]), color="tab:green", label=f"tokens read above: {len(final[0]):,}")
axes.set_xscale("log", base=2)
axes.set_xticks(counts, [f"{n:,}" for n in counts])
axes.set_xlabel("samples")
axes.set_ylabel("similarity")
axes.set_title(f"Two sets of {width} random features")
axes.legend()
plt.show()

# %% [markdown]
# ## Logit lens
#
# Final norm and head can read the stream of any depth, as if the model ended there. Each square is the best guess for
# the token that follows the one below it, its colour the probability of the token that really follows. The top line is
# the model's own prediction.

# %%
with torch.no_grad():
    lens = [logit_lens(model, x.view(len(tokens), -1, width)) for x in final]
    own = model(tokens, positions=positions, document_ids=documents)
length = 32
target = tokens[0, 1 : length + 1]
chances = torch.stack([x[0, :length].softmax(-1)[range(length), target] for x in lens])
fig, axes = plt.subplots(figsize=(13, 0.5 * num_depths + 1.6), layout="constrained")
image = axes.imshow(chances, cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower")


def shown(token: int) -> str:
    """A token as one can see it."""
    return tokenizer.decode([token]).replace(" ", "_").replace("\n", "\\n") or "<end>"


for depth, logits in enumerate(lens):
    for place, guess in enumerate(logits[0, :length].argmax(-1).tolist()):
        colour = "w" if chances[depth, place] > 0.5 else "k"
        axes.text(
            place, depth, shown(guess), ha="center", va="center", color=colour, family="monospace"
        )
axes.set_xticks(range(length), [shown(t) for t in tokens[0, :length].tolist()], family="monospace")
axes.set_yticks(range(num_depths))
axes.set_xlabel("the text, token by token (_ is a space)")
axes.set_ylabel("depth")
fig.colorbar(image, ax=axes, label="p(next token)", pad=0.01)
plt.show()

together = documents[:, 1:] == documents[:, :-1]  # pairs within a document
for depth, logits in enumerate(lens):
    losses = F.cross_entropy(logits[:, :-1][together], tokens[:, 1:][together])
    print(f"depth {depth}: {float(losses):.3f} nats a token")

# %% [markdown]
# ## Checks
#
# A representation is like itself, and like its own rotation and scaling; the lens at the last depth is the model;
# checkpoints come nearer to the last one; the last depth is most like the one before it.

# %%
for name in tables:
    assert torch.allclose(
        tables[name].diagonal(), torch.ones(num_depths).to(tables[name]), atol=1e-6
    )
    assert torch.allclose(tables[name], tables[name].T, atol=1e-4)
rotation, _ = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1)))
assert abs(linear_cka(final[-1], 3 * final[-1] @ rotation) - 1) < 1e-5
assert torch.allclose(lens[-1], own, atol=1e-4)
assert biased[0] > 0.7 > 0.2 > abs(debiased[0])
if RUN is None:
    assert all(curve[0] < curve[-2] <= 1 for curve in curves)
    assert all(values[-1, :-1].argmax() == num_depths - 2 for values in tables.values())
print("all checks hold")
