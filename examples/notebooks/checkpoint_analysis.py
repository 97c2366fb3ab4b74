# %% [markdown]
# # Analyse checkpoints
#
# What is in the checkpoints of a run, are they sound, and how did the weights get where they are? This
# notebook lists and verifies the steps of a store, follows norms, singular values and updates of the matrices over
# training, looks at the moments of AdamW, and compares two checkpoints. It needs `forge_ckpt` alone: no model is built,
# and checkpoints of any layout of ranks are read one whole tensor at a time.
#
# Without changes it trains a model of two layers in seconds. Set `RUN` to look at a run of yours that has
# several checkpoints.

# %%
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy
import torch

from forge_ckpt import CorruptCheckpoint, SavedTensors, Store
from forge_train import Trainer, load_job

RUN = None  # the folder of a run of yours, such as "runs/mine"

JOB = """
model = {dim = 48, num_layers = 2, num_heads = 4}
parallel.precision = "fp32"
schedule.warmup_steps = 20
optimizer.lr = 6e-3
data = {seq_len = 64, sources.text.name = "builtin"}  # English text that every Python installation has, as bytes
train = {steps = 200, global_batch = 8}
eval.every_steps = 0
metrics.every_steps = 100
checkpoint = {every_steps = 20, keep_last = 20}
sample.max_new_tokens = 0
"""
folder = Path(tempfile.mkdtemp())
if RUN is None:
    (folder / "job.toml").write_text(JOB)
    Trainer(load_job(folder / "job.toml", {"run.dir": str(folder / "run")})).fit()
path = Path(RUN or folder / "run") / "checkpoints"

# %% [markdown]
# ## Steps, sizes, verification
#
# `verify` reads all bytes of a checkpoint and compares them with its digests. `read_only` takes no lock: the run may go on
# meanwhile.

# %%
with Store(path, read_only=True) as store:
    steps = store.steps()
    for step in steps:
        store.verify(step)
    content = store.inspect(steps[-1])
print(f"{len(steps)} sound checkpoints: {steps}")
print(f"step {steps[-1]}: {content['bytes']:,} bytes in {len(content['files'])} files")
by_name: dict[str, int] = {}
for name, tensor in content["tensors"].items():
    key = name.split(".")[0]
    by_name[key] = by_name.get(key, 0) + tensor["bytes"]
for key, size in by_name.items():
    print(f"{key:12} {size:10,} bytes in tensors")

# %% [markdown]
# ## Norms and updates of the matrices
#
# Left: the norm of each matrix over the run. Right: how far it moved from one checkpoint to the next, as a share of its
# norm. Steady growth on the left with a falling curve on the right is usual: the rate falls, and the same
# step is a smaller part of larger weights.


# %%
def open_step(step: int) -> SavedTensors:
    return SavedTensors(path / f"step-{step:08d}")


with open_step(steps[-1]) as saved:
    matrices = [name for name in saved.names(["model.*"]) if saved.meta(name).ndim == 2]
history: dict[str, list[torch.Tensor]] = {name: [] for name in matrices}
for step in steps:
    with open_step(step) as saved:
        for name in matrices:
            history[name].append(saved.read(name).float())
norms = {name: [float(w.norm()) for w in weights] for name, weights in history.items()}
moves = {
    name: [float((b - a).norm() / a.norm()) for a, b in pairwise(weights)]
    for name, weights in history.items()
}
colours = plt.get_cmap("tab20")(numpy.arange(len(matrices)) % 20)
fig, (left, right) = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
for name, colour in zip(matrices, colours):
    left.plot(
        steps, norms[name], color=colour, label=name.removeprefix("model.").removesuffix(".weight")
    )
    right.plot(steps[1:], moves[name], color=colour)
left.set_title("Norm of each matrix")
left.set_ylabel("Frobenius norm")
left.set_yscale("log")
right.set_title("Distance to the checkpoint before")
right.set_ylabel("norm of the change / norm of the matrix")
right.set_yscale("log")
for axes in (left, right):
    axes.set_xlabel("step")
if len(matrices) <= 40:
    fig.legend(loc="outside right upper", fontsize=7)
plt.show()

# %% [markdown]
# ## Singular values
#
# The singular values of a matrix say in how many directions it acts. Those of a random matrix lie close together. The
# stable rank, the squared norm over the square of the largest value, puts that into one number. In the first steps a few
# directions grow first (all tokens learn how frequent each token is), and it drops; then others follow.

# %%
watched = max(matrices, key=lambda name: moves[name][0])
spectra = [torch.linalg.svdvals(w) for w in history[watched]]
ranks = {
    name: [float(w.norm() ** 2 / torch.linalg.matrix_norm(w, 2) ** 2) for w in ws]
    for name, ws in history.items()
}
fig, (left, right) = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
shades = plt.get_cmap("viridis")(numpy.linspace(0, 0.95, len(steps)))
for values, shade in zip(spectra, shades):
    left.plot(range(1, len(values) + 1), values, color=shade)
scale = plt.cm.ScalarMappable(plt.Normalize(steps[0], steps[-1]), "viridis")
fig.colorbar(scale, ax=left, label="step")
left.set_yscale("log")
left.set_xlabel("number of the singular value")
left.set_ylabel("singular value")
left.set_title(f"Spectrum of {watched.removeprefix('model.')}")
for name, colour in zip(matrices, colours):
    right.plot(
        steps, ranks[name], color=colour, label=name.removeprefix("model.").removesuffix(".weight")
    )
right.set_xlabel("step")
right.set_ylabel("stable rank")
right.set_title("In how many directions each matrix acts")
if len(matrices) <= 40:
    fig.legend(loc="outside right upper", fontsize=7)
plt.show()

# %% [markdown]
# ## The moments of AdamW
#
# The optimizer's state is in the checkpoint, too. The ratio of the first moment to the root of the second one is
# the step that AdamW takes, in units of the learning rate: near 1 where gradients agree from step to
# step, near 0 where they are noise. It is drawn before the corrections of the first steps, which are near 1 here.

# %%
with open_step(steps[-1]) as saved:
    states = saved.names(["optimizer.*"])
    first = {n: saved.read(n).float() for n in states if n.endswith("exp_avg")}
    second = {n: saved.read(n).float() for n in states if n.endswith("exp_avg_sq")}
print("names of the optimizer's state:", *states[:4], "...", sep="\n  ")
ratios = {
    n.removeprefix("optimizer.").removesuffix(".exp_avg"): (
        m / second[f"{n}_sq"].sqrt().clamp(min=1e-12)
    )
    .abs()
    .flatten()
    for n, m in first.items()
    if m.ndim == 2
}
if ratios:
    fig, axes = plt.subplots(figsize=(8, 0.28 * len(ratios) + 1.4), layout="constrained")
    axes.boxplot(list(ratios.values()), orientation="horizontal", whis=(5, 95), showfliers=False)
    axes.set_yticks(range(1, len(ratios) + 1), list(ratios), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("|first moment| / root of the second moment")
    axes.set_title(
        f"Signal in the gradients at step {steps[-1]} (box: quartiles, whiskers: 5 to 95 %)"
    )
    plt.show()

# %% [markdown]
# ## Two checkpoints compared
#
# As `forge-ckpt diff A B` does in a shell: which tensors differ, and by how much?

# %%
one, two = steps[len(steps) // 2], steps[-1]
with open_step(one) as a, open_step(two) as b:
    assert a.names() == b.names()
    rows = []
    for name in a.names(["model.*"]):
        x, y = a.read(name).float(), b.read(name).float()
        rows.append((float((y - x).norm() / x.norm()), float((y - x).abs().max()), name))
print(f"step {one} and step {two}\n{'relative':>9} {'largest':>8}  tensor")
for relative, largest, name in sorted(rows, reverse=True):
    print(f"{relative:9.3f} {largest:8.4f}  {name}")

# %% [markdown]
# ## Damage is found
#
# One flipped bit in a copy of a checkpoint is enough.

# %%
copy = folder / "damaged"
shutil.copytree(path / f"step-{two:08d}", copy / f"step-{two:08d}")
with (copy / f"step-{two:08d}" / "data-0.bin").open("r+b") as file:
    file.seek(1000)
    byte = file.read(1)[0]
    file.seek(1000)
    file.write(bytes([byte ^ 1]))
with Store(copy, read_only=True) as store:
    try:
        store.verify(two)
        damage = None
    except CorruptCheckpoint as error:
        damage = str(error)
print(damage)

# %% [markdown]
# ## Checks
#
# The damage was seen; spectra and norms belong to the same matrices; a stable rank is between 1 and the number of
# singular values; the moments are those of the parameters.

# %%
assert damage is not None
for values, norm in zip(spectra, norms[watched]):
    assert abs(float(values.norm()) / norm - 1) < 1e-4
assert all(
    1 - 1e-4 <= r <= min(history[n][0].shape) + 1e-3 for n, values in ranks.items() for r in values
)
if RUN is None:
    assert set(ratios) == {name.removeprefix("model.") for name in matrices}
    assert all(norm[0] < norm[-1] for norm in norms.values()), "matrices have grown"
    assert all(move[-1] < move[0] for move in moves.values()), "and move less as the rate falls"
print("all checks hold")
