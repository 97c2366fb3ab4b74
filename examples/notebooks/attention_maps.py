# %% [markdown]
# # Attention maps
#
# Which tokens does each head look at, and is it a head of a known kind? This notebook draws the
# attention of all heads over a text, measures two kinds of heads on random tokens that repeat, and then
# asks by ablation whether the model needs them.
#
# An *induction head* continues a pattern: after `... a b ... a` it looks at the token behind the earlier `a`
# and copies it. For that a head of an earlier layer must have told each token which one stands before it, a
# *previous-token head* (Olsson et al. 2022). Without changes the notebook trains a model of two layers
# on letters that repeat, in which both kinds grow within 500 steps. Set `RUN` to look at a run of yours.

# %%
import math
import string
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy
import torch
import torch.nn.functional as F

from forge_core.interp import ActivationStore, attention_weights, intervene
from forge_train import Trainer, load_job, load_model, load_trained

RUN = None  # the folder of a run of yours, such as "runs/mine"
TEXT = "forgetrainforgetrainforgetrain"

JOB = """
[model]
dim = 48
num_layers = 2
num_heads = 2
hidden_dim = 96
vocab_size = 27
init_std = 0.05
[data]
seq_len = 32
packing = {name = "best_fit"}     # each row is one document
[data.sources.repeats]
name = "npy"                      # ids as numpy saves them
npy = {eos_id = 0}
[train]
steps = 500
global_batch = 32
[optimizer]
lr = 4e-3
[schedule]
name = "constant"
warmup_steps = 20
[parallel]
precision = "fp32"
[eval]
every_steps = 0
[metrics]
every_steps = 100
[sample]
max_new_tokens = 0
"""
LETTERS = "." + string.ascii_lowercase  # id 0 ends a document
folder = Path(tempfile.mkdtemp())
if RUN is None:
    # documents of 31 letters: 4 to 16 random ones, again and again
    draw = numpy.random.default_rng(0)
    documents = [
        numpy.resize(draw.integers(1, 27, draw.integers(4, 17)), 31) for _ in range(16_000)
    ]
    numpy.save(folder / "ids.npy", numpy.concatenate([[*d, 0] for d in documents]).astype("uint16"))
    (folder / "job.toml").write_text(JOB)
    keys = {"run.dir": str(folder / "run"), "data.sources.repeats.path": str(folder / "ids.npy")}
    Trainer(load_job(folder / "job.toml", keys)).fit()
    model, _, step = load_model(folder / "run")
    ids = [LETTERS.index(letter) for letter in TEXT]
    labels = list(TEXT)
else:
    model, tokenizer, step = load_trained(RUN)
    ids = tokenizer.encode(TEXT)
    labels = [tokenizer.decode([i]).replace("\n", "\\n") for i in ids]
tokens = torch.tensor([ids])

# %% [markdown]
# ## All heads over a text
#
# Each row of a map is a token that attends, each column a token that is attended to; the weights of a row sum to 1. A line
# directly below the diagonal is a previous-token head. The text is a word that repeats every ten letters, so an
# induction head draws lines nine and nineteen places below the diagonal.

# %%
with torch.no_grad(), attention_weights(model) as weights:
    model(tokens)
maps = torch.stack([w[0] for w in weights.values()])  # (layers, heads, S, S)
num_layers, num_heads, length, _ = maps.shape
fig, grid = plt.subplots(
    num_layers,
    num_heads,
    figsize=(4.6 * num_heads, 4.4 * num_layers),
    squeeze=False,
    layout="constrained",
)
for layer in range(num_layers):
    for head in range(num_heads):
        axes = grid[layer, head]
        image = axes.imshow(maps[layer, head], cmap="magma", vmin=0, vmax=1)
        axes.set_xticks(range(length), labels, fontsize=7)
        axes.set_yticks(range(length), labels, fontsize=7)
        axes.set_title(f"layer {layer}, head {head}")
grid[-1, 0].set_xlabel("token that is attended to")
grid[-1, 0].set_ylabel("token that attends")
fig.colorbar(image, ax=grid, label="attention weight", shrink=0.6)
plt.show()

# %% [markdown]
# ## Kinds of heads, as numbers
#
# A text may flatter a head. So: random tokens that have no pattern but one, that they come twice. The
# previous-token score of a head is its mean weight one place back, its induction score the mean weight, in
# the second half, on the token *behind* the earlier copy. A head that looks everywhere alike has about the
# number behind `even`.

# %%
HALF = 15
random_ids = torch.randint(
    1, model.config.vocab_size, (64, HALF), generator=torch.Generator().manual_seed(1)
)
repeated = torch.cat([random_ids, random_ids], dim=1)  # (64, 30)
with torch.no_grad(), attention_weights(model) as weights:
    repeated_logits = model(repeated)
of_heads = torch.stack(list(weights.values()))  # (layers, 64, heads, 30, 30)
scores = {
    "previous token": of_heads.diagonal(-1, 3, 4).mean((1, 3)),  # (layers, heads)
    "induction": of_heads.diagonal(1 - HALF, 3, 4)[..., 1:].mean((1, 3)),
}
even = {
    "previous token": float((1 / torch.arange(2.0, 2 * HALF + 1)).mean()),
    "induction": float((1 / torch.arange(HALF + 1.0, 2 * HALF + 1)).mean()),
}


def draw_heads(axes, values: torch.Tensor, title: str, **options) -> None:
    """A square for each head, its number in it."""
    image = axes.imshow(values, **options)
    for layer, row in enumerate(values.tolist()):
        for head, value in enumerate(row):
            dark = image.norm(value) < 0.6
            axes.text(
                head, layer, f"{value:.2f}", ha="center", va="center", color="w" if dark else "k"
            )
    axes.set_xticks(range(num_heads))
    axes.set_yticks(range(num_layers))
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.set_title(title)


fig, both = plt.subplots(1, 2, figsize=(8.5, 1.2 + 1.1 * num_layers), layout="constrained")
for axes, (name, values) in zip(both, scores.items()):
    draw_heads(
        axes,
        values,
        f"{name} score (even: {even[name]:.2f})",
        vmin=0,
        vmax=1,
        cmap="viridis",
        aspect="auto",
    )
plt.show()

# %% [markdown]
# ## Does the model need them?
#
# Left: the loss at each place of the rows. In the first half nothing can be known, and an even guess costs the
# logarithm of the vocabulary. The small model costs more towards its end: in training most rows had begun to repeat by
# then, so it bets on letters that came before. From the second letter of the second half on the model
# reads what comes next. Right: how much the loss of the second half rises when the output of one head is replaced by its mean,
# which leaves the rest of the model what it expects. A head may score high and yet be spare: another one
# does the same.

# %%
store = ActivationStore("layers.*.head_out")
with torch.no_grad(), store.watch(model):
    model(repeated)
usual = {name: store[name].mean((0, 1)) for name in store.names}  # (H, D)


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """Loss (29,) at each place that has a successor, in nats, mean over rows."""
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), repeated[:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(repeated), -1).mean(0)


def without(heads: list[tuple[int, int]]) -> torch.Tensor:
    """Loss at each place with the output of some heads, (layer, head), at its mean."""

    def change(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x.clone()
        for layer, head in heads:
            if name == f"layers.{layer}.head_out":
                x[:, :, head] = usual[name][head]
        return x

    with torch.no_grad(), intervene(model, {"layers.*.head_out": change}):
        return loss_of(model(repeated))


intact = loss_of(repeated_logits)
rise = torch.tensor(
    [
        [without([(i, h)])[HALF:].mean() - intact[HALF:].mean() for h in range(num_heads)]
        for i in range(num_layers)
    ]
)
strong = [
    (i, h) for i in range(num_layers) for h in range(num_heads) if scores["induction"][i, h] > 0.3
]
fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
left.plot(range(1, 2 * HALF), intact, marker="o", label="the model")
if strong:
    left.plot(range(1, 2 * HALF), without(strong), marker="o", label="without its induction heads")
left.axhline(
    math.log(model.config.vocab_size), linestyle="--", color="0.4", label="a uniform guess"
)
left.axvspan(HALF - 0.5, 2 * HALF - 0.5, color="tab:green", alpha=0.12, label="second half")
left.set_xlabel("position of the predicted token")
left.set_ylabel("loss (nats)")
left.set_ylim(bottom=0)
left.legend(fontsize=8)
most = float(rise.max())
draw_heads(
    right,
    rise,
    "rise of the loss without the head (nats)",
    vmin=0,
    vmax=most,
    cmap="viridis",
    aspect="auto",
)
plt.show()

# %% [markdown]
# ## Scores before the softmax
#
# The raw products of queries and keys are a point too, `attn_scores`: scaled, before the mask, and so also
# of tokens that come later. Weights are the softmax of what the mask leaves.

# %%
layer, head = divmod(int(scores["induction"].argmax()), num_heads)
name = f"layers.{layer}.attn"
store = ActivationStore([f"{name}_scores", f"{name}_weights"])
with torch.no_grad(), store.watch(model):
    model(tokens)
raw, found = store[f"{name}_scores"][0, head], store[f"{name}_weights"][0, head]
fig, axes = plt.subplots(figsize=(5.6, 4.6), layout="constrained")
limit = float(raw.abs().max())
image = axes.imshow(raw, cmap="RdBu_r", vmin=-limit, vmax=limit)
axes.set_xticks(range(length), labels, fontsize=7)
axes.set_yticks(range(length), labels, fontsize=7)
axes.set_xlabel("token that is attended to")
axes.set_ylabel("token that attends")
axes.set_title(f"scores of layer {layer}, head {head}")
fig.colorbar(image, ax=axes, label="scaled product of query and key")
plt.show()

# %% [markdown]
# ## Checks
#
# Weights of a row sum to 1 and are 0 for later tokens; they are the softmax of the masked scores; a change
# that changes nothing leaves the loss as it is. Of the small model: both kinds of heads are there, in the order
# that the theory needs, and without the induction heads the second half is as hard as the first.

# %%
mask = torch.ones(length, length, dtype=torch.bool).tril()
assert torch.allclose(maps.sum(-1), torch.ones(()), atol=1e-5)
assert not maps[..., ~mask].any()
assert torch.equal(without([]), intact)
if RUN is None:
    assert torch.allclose(raw.masked_fill(~mask, -math.inf).softmax(-1), found, atol=1e-5)
    assert scores["previous token"][0].max() > 0.3
    assert scores["induction"][1].max() > 0.4 > scores["induction"][0].max() + 0.2
    assert intact[HALF + 1 :].mean() < 0.5 * intact[: HALF - 1].mean()
    assert without(strong)[HALF + 1 :].mean() > 0.7 * intact[: HALF - 1].mean()
print("all checks hold")
