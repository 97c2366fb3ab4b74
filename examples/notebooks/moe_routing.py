# %% [markdown]
# # Routing of a mixture of experts
#
# Are the experts evenly busy, how sure is the router, which tokens go where, and has an expert a field of its own? This
# notebook draws the balance over training from a run's metrics, reads the choices of the trained routers on held-out
# text, and compares experts with kinds of characters.
#
# Without changes it trains two models in seconds, of two layers with eight experts each, two for each byte: one keeps its
# experts busy by a bias of the router that follows their load (no loss, no gradient), the other does
# nothing. Set `RUN` to look at a run of yours.

# %%
import math
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy
import torch

from forge_lab import extract_run
from forge_moe.statistics import coactivation
from forge_moe.traces import TraceWriter, read_trace, trace_routes, traced_layers
from forge_train import Trainer, load_job, load_trained, read_run

RUN = None  # the folder of a run of yours, such as "runs/mine"
ROWS = 64  # held-out rows that are read

JOB = """
model = {dim = 48, num_layers = 2, num_heads = 4, moe = {num_experts = 8, top_k = 2, width_multiplier = 0.5}}
optimizer = {name = "muon", lr = 0.03, muon = {adjust = "original", adamw_lr_multiplier = 0.2}}
schedule.warmup_steps = 10
data = {seq_len = 64, sources.text.name = "builtin"}  # English text that every Python installation has, as bytes
train = {steps = 120, global_batch = 8}
parallel.precision = "fp32"
eval.every_steps = 120
metrics = {every_steps = 4, console = "off"}
sample.max_new_tokens = 0
"""
folder = Path(tempfile.mkdtemp())
runs = {}  # what a run is called -> its folder
if RUN is None:
    (folder / "job.toml").write_text(JOB)
    for name, rate in {"balanced by a bias": 1e-2, "left alone": 0.0}.items():
        runs[name] = folder / name.replace(" ", "_")
        keys = {"run.dir": str(runs[name]), "model.moe.bias_update_rate": rate}
        Trainer(load_job(folder / "job.toml", keys)).fit()
else:
    runs["this run"] = Path(RUN)
run = next(iter(runs.values()))
for name, path in runs.items():
    print(
        f"{name}: validation loss {[v for v in read_run(path).metrics['val_loss'] if v is not None][-1]:.3f}"
    )

# %% [markdown]
# ## Balance over training
#
# The load of the fullest and of the emptiest expert of each layer, over the mean: 1 is even, 0 is an expert without a
# token, and the number of experts divided by `top_k` the worst there can be. Without balance a few experts get ahead,
# learn faster, and are chosen more. The loss of so small a model hardly suffers: that is no reason to pay for experts that no
# token sees.

# %%
fig, panels = plt.subplots(
    1, len(runs), figsize=(6 * len(runs), 4), sharey=True, squeeze=False, layout="constrained"
)
for axes, (name, path) in zip(panels[0], runs.items()):
    metrics = read_run(path).metrics
    layers = [key.split(".")[1] for key in metrics if key.endswith(".max_load")]
    colours = plt.get_cmap("viridis")(numpy.linspace(0, 0.8, len(layers)))
    for layer, colour in zip(layers, colours):
        axes.plot(
            metrics["step"],
            metrics[f"moe.{layer}.max_load"],
            color=colour,
            label=f"layer {layer}, fullest",
        )
        low = metrics[f"moe.{layer}.min_load"]
        axes.plot(
            metrics["step"], low, color=colour, linestyle="--", label=f"layer {layer}, emptiest"
        )
    axes.axhline(1, color="0.6", linewidth=1)
    axes.set_xlabel("step")
    axes.set_title(name)
panels[0][0].set_ylabel("tokens of an expert / mean")
panels[0][0].set_ylim(bottom=0)
if len(layers) <= 8:
    panels[0][0].legend(fontsize=8)
plt.show()

# %% [markdown]
# ## The choices on held-out text
#
# `extract_run` gives held-out tokens and the routers' logits on them; `trace_routes` writes each choice, which the logits
# alone do not say where a bias takes part. `top_k` experts serve a token, so the loads of a layer, as shares of tokens, sum to
# `top_k`.

# %%
model, tokenizer, step = load_trained(run)
experts_of = traced_layers(model)  # layer -> number of experts
extract_run(run, ("*.router_logits",), folder / "routers.npz", rows=ROWS)
with numpy.load(folder / "routers.npz") as file:
    tokens, positions, documents = (
        torch.from_numpy(file[n]).long() for n in ("tokens", "positions", "document_ids")
    )
    logits = [
        torch.from_numpy(file[n]).flatten(0, 1) for n in file.files if n.endswith("router_logits")
    ]
trace_file = folder / "routes"
with (
    torch.no_grad(),
    TraceWriter(trace_file, experts_of) as trace,
    trace_routes(model, trace, step=lambda: step),
):
    model(tokens, positions=positions, document_ids=documents)
choices = {record.layer: record.ids for record in read_trace(trace_file)}  # (tokens, top_k)
top_k = next(iter(choices.values())).size(1)
loads = {
    layer: torch.bincount(ids.flatten(), minlength=experts_of[layer]) / len(ids)
    for layer, ids in choices.items()
}
short = {
    layer: f"layer {next(part for part in layer.split('.') if part.isdigit())}" for layer in choices
}
sure = [-(x.log_softmax(-1).exp() * x.log_softmax(-1)).sum(-1) for x in logits]  # nats, (tokens,)
fig, (left, right) = plt.subplots(1, 2, figsize=(12, 3.8), layout="constrained")
width = 0.8 / len(loads)
for number, (layer, load) in enumerate(loads.items()):
    left.bar(numpy.arange(len(load)) + number * width, load, width, label=short[layer])
left.axhline(top_k / len(load), color="0.4", linestyle="--", label="even")
left.set_xlabel("expert")
left.set_ylabel("share of the tokens that choose it")
left.set_title(f"Load on held-out text; a layer's bars sum to {top_k}")
left.legend()
for layer, entropy in zip(choices, sure):
    right.hist(entropy, bins=40, histtype="step", linewidth=2, label=short[layer])
right.axvline(math.log(len(load)), color="0.4", linestyle="--", label="all experts equally likely")
right.set_xlim(left=0)
right.set_xlabel("entropy of the router (nats)")
right.set_ylabel("tokens")
right.set_title("How sure the router is (softmax of its logits)")
right.legend()
plt.show()

# %% [markdown]
# ## Which tokens go where
#
# The beginning of the held-out text; each token has the colour of the first expert that its router chose. Runs of one
# colour over a word, or one colour for all spaces, show what a layer sorts by.

# %%
COLUMNS, LINES = 64, 5


def shown(token: int) -> str:
    """A token as one can see it."""
    return tokenizer.decode([token]).replace(" ", "_").replace("\n", "\\n") or "|"


flat = tokens.flatten()
count = min(COLUMNS * LINES, len(flat))
palette = plt.get_cmap("tab20" if len(load) > 10 else "tab10")
fig, panels = plt.subplots(
    len(choices), 1, figsize=(13, 1.7 * len(choices)), squeeze=False, layout="constrained"
)
for axes, (layer, ids) in zip(panels[:, 0], choices.items()):
    picture = torch.full((COLUMNS * LINES,), -1)
    picture[:count] = ids[:count, 0]
    image = axes.imshow(
        picture.view(LINES, COLUMNS),
        cmap=palette,
        vmin=-0.5,
        vmax=palette.N - 0.5,
        aspect="auto",
        alpha=0.6,
    )
    for place in range(count):
        line, column = divmod(place, COLUMNS)
        axes.text(
            column,
            line,
            shown(int(flat[place])),
            ha="center",
            va="center",
            family="monospace",
            fontsize=8,
        )
    axes.set_title(short[layer])
    axes.set_xticks([])
    axes.set_yticks([])
bar = fig.colorbar(
    image, ax=panels, label="expert with the largest weight", ticks=range(len(load)), pad=0.01
)
bar.ax.set_ylim(-0.5, len(load) - 0.5)
plt.show()

# %% [markdown]
# ## Fields of experts
#
# For each kind of character, how much more often its tokens choose an expert than tokens in general do, as a power of 2: 0 is
# no preference, 1 twice as often. The mutual information of kind and first expert says in one number how much a choice
# tells about the kind; shuffled choices tell almost nothing.

# %%
KINDS = {
    "space": str.isspace,
    "lower case": str.islower,
    "upper case": str.isupper,
    "digit": str.isdigit,
    "other": lambda letter: True,
}
letters = [tokenizer.decode([t])[:1] or "\n" for t in flat.tolist()]
kinds = torch.tensor([next(i for i, test in enumerate(KINDS.values()) if test(c)) for c in letters])


def table_of(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Number of tokens (kinds, experts) of each kind that choose each expert."""
    chosen = torch.zeros(len(KINDS), experts)
    for slot in ids.T:
        chosen.index_put_((kinds, slot), torch.ones(len(slot)), accumulate=True)
    return chosen


def information(ids: torch.Tensor, experts: int) -> float:
    """Mutual information of kind and first expert, in bits."""
    joint = table_of(ids[:, :1], experts)
    joint = joint / joint.sum()
    apart = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    return float(torch.special.xlogy(joint, joint / apart.clamp(min=1e-12)).sum() / math.log(2))


shuffle = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
fig, panels = plt.subplots(
    1,
    len(choices),
    figsize=(6.2 * len(choices), 3.4),
    squeeze=False,
    sharey=True,
    layout="constrained",
)
told = {}
for axes, (layer, ids) in zip(panels[0], choices.items()):
    chosen = table_of(ids, experts_of[layer])
    share = (chosen + 1) / (chosen + 1).sum(1, keepdim=True)  # one more of each, so that none is 0
    preference = torch.log2(share / (chosen.sum(0) / chosen.sum()).clamp(min=1e-4))
    image = axes.imshow(preference, cmap="RdBu_r", vmin=-3, vmax=3, aspect="auto")
    for (row, column), value in numpy.ndenumerate(preference.numpy()):
        colour = "w" if abs(value) > 2 else "k"
        axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(chosen.size(1)))
    axes.set_yticks(range(len(KINDS)), KINDS)
    axes.set_xlabel("expert")
    told[layer] = information(ids, experts_of[layer]), information(ids[shuffle], experts_of[layer])
    axes.set_title(
        f"{short[layer]}: {told[layer][0]:.2f} bits about the kind (shuffled {told[layer][1]:.2f})"
    )
fig.colorbar(image, ax=panels, label="log2(share of the expert here / in all text)", extend="both")
plt.show()

# %% [markdown]
# ## Which experts work together
#
# How often two experts serve the same token, over what their loads alone would give: 1 is chance.

# %%
fig, panels = plt.subplots(
    1, len(choices), figsize=(4.6 * len(choices), 4), squeeze=False, layout="constrained"
)
for axes, (layer, ids) in zip(panels[0], choices.items()):
    pairs = coactivation(ids, experts_of[layer]).double()
    together = pairs.clone().fill_diagonal_(0)
    apart = torch.outer(pairs.diagonal(), pairs.diagonal()).fill_diagonal_(0)
    chance = apart * (together.sum() / apart.sum()).clamp(min=1e-9)  # as many pairs in all
    ratio = (together / chance).fill_diagonal_(math.nan)
    image = axes.imshow(ratio, cmap="viridis", vmin=0, vmax=3)
    axes.set_xlabel("expert")
    axes.set_ylabel("expert")
    if len(ratio) <= 16:
        axes.set_xticks(range(len(ratio)))
        axes.set_yticks(range(len(ratio)))
    axes.set_title(short[layer])
fig.colorbar(image, ax=panels, label="chosen together, relative to chance", extend="max")
plt.show()

# %% [markdown]
# ## Checks
#
# The loads of a layer sum to `top_k`, no token chooses an expert twice, and tracing changed nothing. Of the small models: the bias keeps
# the experts busy where the other run does not, and choices tell about characters far more than shuffled ones.

# %%
for layer, ids in choices.items():
    assert abs(float(loads[layer].sum()) - top_k) < 1e-5
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all()
    assert coactivation(ids, experts_of[layer]).diagonal().sum() == ids.numel()
if RUN is None:
    late = {}
    for name, path in runs.items():
        metrics = read_run(path).metrics
        late[name] = numpy.mean([metrics[f"moe.{layer}.max_load"][-10:] for layer in layers])
    assert late["balanced by a bias"] < 1.6 < late["left alone"]
    assert all(found > 0.2 > 0.05 > chance for found, chance in told.values())
print("all checks hold")
