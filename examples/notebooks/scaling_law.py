# %% [markdown]
# # Fit a scaling law
#
# How does the loss fall with parameters and tokens, and can small runs tell the loss of a larger one? This notebook trains
# four sizes with three token budgets each, fits `L(N, D) = E + A / N^alpha + B / D^beta` (Hoffmann et al. 2022) to the three
# smaller sizes, and predicts the largest one, which the fit has not seen.
#
# The budgets of a size are decays of one trunk at a constant rate, so that a budget costs a part of its steps; each is, bit for bit,
# the run that had trained all its steps itself. Set `STUDY` to the file of a study of yours whose sweep is done
# (`forge-train sweep study.toml`); `examples/scaling/study.toml` is one that takes about 7 minutes of processor time.

# %%
import re
import string
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import numpy

from forge_core.scaling import bootstrap, fit_scaling, interval
from forge_lab import read_study
from forge_train import Trainer, load_job, read_run

STUDY = None  # the file of a study of yours, such as "examples/scaling/study.toml"

TOML = """
study = {{dir = "{folder}/study", tokens_per_parameter = [8.0, 16.0, 32.0]}}
sizes = {{d8.dim = 8, d12.dim = 12, d16.dim = 16, d24.dim = 24}}
schedules.wsd = {{name = "wsd", wsd = {{decay_fraction = 0.25}}}}
[base]
model = {{num_layers = 1, num_heads = 2, vocab_size = 28, init_std = 0.1}}
data.seq_len = 64
data.sources.letters = {{name = "npy", path = "{folder}/train.npy"}}  # ids as numpy saves them
data.validation = {{name = "npy", path = "{folder}/validation.npy"}}
train.global_batch = 4
optimizer.lr = 2e-2
schedule.warmup_steps = 5
parallel.precision = "fp32"
eval = {{every_steps = 10000, sequences = 200}}  # at the end only
metrics = {{every_steps = 100, console = "off"}}
sample.max_new_tokens = 0
"""
folder = Path(tempfile.mkdtemp())
if STUDY is None:
    # the manual of Python in small letters, all else one space: few symbols, so that small models get far
    text = re.sub("[^a-z]+", " ", " ".join(topics.values()).lower())
    ids = numpy.array(
        [(" " + string.ascii_lowercase).index(letter) + 1 for letter in text], "uint16"
    )
    numpy.save(folder / "validation.npy", ids[:13_000])
    numpy.save(folder / "train.npy", ids[13_000:])
    (folder / "study.toml").write_text(TOML.format(folder=folder))
study = read_study(Path(STUDY or folder / "study.toml"))
for run in study.runs:  # trunks come first
    if STUDY is None:
        run.write()
        Trainer(load_job(run.file)).fit()
measured = [run for run in study.runs if run.budget is not None and run.is_done()]
losses = {
    run.name: [v for v in read_run(run.dir).metrics["val_loss"] if v is not None][-1]
    for run in measured
}
for run in measured:
    print(f"{run.name:12} N {run.parameters:9,}  D {run.tokens:11,}  loss {losses[run.name]:.4f}")

# %% [markdown]
# ## Fit the smaller sizes, predict the largest
#
# With nine runs and five constants the intervals matter more than the numbers: `bootstrap` fits the runs again, drawn with
# replacement. Runs as short as these cannot tell `E`, which the fit puts at 0, and `A` and `alpha` are known together at best.
# The error on the held-out size is the number to trust a fit by.

# %%
largest = max(run.parameters for run in measured)
small = [run for run in measured if run.parameters < largest]
held_out = [run for run in measured if run.parameters == largest]


def columns(runs: list) -> tuple[list[int], list[int], list[float]]:
    """N, D and the loss of runs."""
    return [r.parameters for r in runs], [r.tokens for r in runs], [losses[r.name] for r in runs]


fit = fit_scaling(*columns(small))
resampled = bootstrap(*columns(small), resamples=30)
for constant in ("E", "A", "alpha", "B", "beta"):
    low, high = interval([getattr(other, constant) for other in resampled])
    print(
        f"{constant:5} {getattr(fit, constant):9.3g}   95 % of resampled fits: {low:9.3g} to {high:9.3g}"
    )
errors = {r.name: fit.loss(r.parameters, r.tokens) / losses[r.name] - 1 for r in held_out}
for name, error in errors.items():
    print(f"{name}: predicted {error:+.2%} off")

# %% [markdown]
# ## Curves
#
# Left: each size over its tokens, with the fit as lines; the largest size (hollow) was not fitted. Right: what was
# predicted over what was measured; points on the diagonal are predicted exactly.

# %%
sizes = sorted({run.parameters for run in measured})
colours = dict(zip(sizes, plt.get_cmap("viridis")(numpy.linspace(0, 0.85, len(sizes)))))
fig, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
for n in sizes:
    own = sorted((r.tokens, losses[r.name]) for r in measured if r.parameters == n)
    tokens = numpy.geomspace(own[0][0], own[-1][0], 50)
    face = "none" if n == largest else colours[n]
    label = f"{n:,} parameters" + ", held out" * (n == largest)
    left.plot(tokens, [fit.loss(n, d) for d in tokens], color=colours[n])
    left.scatter(*zip(*own), color=colours[n], facecolors=face, label=label, zorder=3)
    right.scatter(
        [loss for _, loss in own],
        [fit.loss(n, d) for d, _ in own],
        color=colours[n],
        facecolors=face,
        zorder=3,
    )
left.set_xscale("log")
left.set_xlabel("tokens")
left.set_ylabel("validation loss (nats)")
left.set_title("Runs (points) and the fit (lines)")
left.legend(fontsize=8)
edges = min(losses.values()) - 0.05, max(losses.values()) + 0.05
right.plot(edges, edges, color="0.6", linewidth=1)
right.set_aspect("equal")
right.set_xlabel("measured loss (nats)")
right.set_ylabel("fitted loss (nats)")
right.set_title("Hollow: predicted, not fitted")
plt.show()

# %% [markdown]
# ## The best size for a budget of operations
#
# For a number of operations `6 N D` there is one best size. The line is the optimum of the fit to all runs, the band
# holds the resampled fits; the points are the runs. Beyond them the band widens: that is how far one can see.

# %%
whole = fit_scaling(*columns(measured))
others = bootstrap(*columns(measured), resamples=30)
spent = [6.0 * r.parameters * r.tokens for r in measured]
flops = numpy.geomspace(min(spent), 10 * max(spent), 30)
best = [whole.optimum(c)[0] for c in flops]
bands = numpy.array([interval([other.optimum(c)[0] for other in others]) for c in flops])
fig, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
axes.fill_between(flops, bands[:, 0], bands[:, 1], alpha=0.2, label="95 % of resampled fits")
axes.plot(flops, best, label="best size by the fit")
axes.scatter(
    spent,
    [r.parameters for r in measured],
    c=[losses[r.name] for r in measured],
    cmap="magma",
    zorder=3,
)
fig.colorbar(axes.collections[-1], ax=axes, label="validation loss (nats)")
axes.set_xscale("log")
axes.set_yscale("log")
axes.set_ylim(min(sizes) / 10, max(sizes) * 30)
axes.set_xlabel("operations, 6 N D")
axes.set_ylabel("parameters")
axes.set_title("Runs, and the best size for what a run may cost")
axes.legend(loc="upper left")
plt.show()

# %% [markdown]
# ## Checks
#
# The optimum spends what it may and no neighbour of it is better; a fit to losses made from known constants finds them. Of the
# small study: more tokens help each size, and the held-out size is predicted within 6 %.

# %%
for c in flops[::10]:
    n, d = whole.optimum(c)
    assert abs(6 * n * d / c - 1) < 1e-6
    assert all(whole.loss(n, d) <= whole.loss(n * k, d / k) for k in (0.9, 1.1))
made = [1.0 + 20 / r.parameters**0.3 + 50 / r.tokens**0.4 for r in measured]
found = fit_scaling(*columns(measured)[:2], made)
assert abs(found.alpha - 0.3) < 0.01
assert abs(found.beta - 0.4) < 0.01
if STUDY is None:
    assert len(measured) == 12
    for n in sizes:
        by_tokens = [
            losses[r.name] for r in sorted(measured, key=lambda r: r.tokens) if r.parameters == n
        ]
        assert by_tokens == sorted(by_tokens, reverse=True)
    assert max(abs(error) for error in errors.values()) < 0.06
print("all checks hold")
