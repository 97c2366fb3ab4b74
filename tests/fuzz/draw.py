"""From a seed and a number to a job: a value for each axis, then sizes that fit all of them.

Number i of a seed has the i-th value of a shuffled list of all values for sure, which has rare ones twice. All other
values are drawn with their weights, among those that the rules leave.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

from tests.fuzz.job import Job, axes, layout_keys, readers_of, size_of, world_of
from tests.fuzz.rules import (
    MOST_RANKS,
    allowed,
    default,
    depends_on_micro_batches,
    is_possible,
    open_values,
)

#: Axes that others depend on are chosen before those, so that their weights hold.
_FIRST = (
    "images",
    "image tokens",
    "experts",
    "restart",
    "bad step",
    "sources",
    "groups",
    "precision",
    "pp",
)
_TRIES = 1000


def values() -> list[tuple[str, str]]:
    """All (axis, value) pairs."""
    return [(name, value) for name, axis in axes().items() for value in axis.values]


def draw(seed: int, number: int, attempt: int = 0, only: Mapping[str, str] | None = None) -> Job:
    """Job `number` of a seed; another one for each `attempt`.

    only: values that it has in any case, in place of the one that the number stands for.
    Raises ValueError for values that never go together.
    """
    rng = random.Random(f"{seed} {number} {attempt}")
    cycle = [pair for pair in values() if pair[1] != default(pair[0])]
    cycle += [pair for pair in cycle if _is_rare(*pair)]
    random.Random(seed).shuffle(cycle)
    wanted = dict(only) if only else dict([cycle[number % len(cycle)]])
    for _ in range(_TRIES if is_possible(wanted) else 0):
        choice = _choose(rng, wanted)
        if choice is None or not allowed(choice):
            continue
        then = _other_layout(rng, choice)
        if then is False:
            continue
        job = Job(f"{seed}.{number}.{attempt}", choice, {}, then)
        return Job(job.name, choice, draw_sizes(rng, job), then)
    raise ValueError(f"{wanted}: no job has these values; see tests/fuzz/rules.py")


def _is_rare(axis: str, value: str) -> bool:
    """Whether a value has few jobs by its weight, or by that of images."""
    return axes()[axis].area == "images" or axes()[axis].weights.get(value, 1.0) < 1.0


def _choose(rng: random.Random, wanted: Mapping[str, str]) -> dict[str, str] | None:
    """A value of each axis, without defaults; None where no value of some axis is left."""
    chosen = dict(wanted)
    layout = [name for name, axis in axes().items() if axis.area == "layout" and name != "ep"]
    first = [name for name in _FIRST if name in axes()]
    rest = [name for name in axes() if name not in (*first, *layout, "ep")]
    order = [*first, *rng.sample(layout, len(layout)), "ep", *rng.sample(rest, len(rest))]
    for name in order:
        if name in chosen:
            continue
        left = list(open_values(chosen, name))
        if axes()[name].area == "layout":
            left = [value for value in left if _fits(chosen, name, value)]
        if not left:
            return None
        weights = axes()[name].weights
        chosen[name] = rng.choices(left, [weights.get(value, 1.0) for value in left])[0]
    return {name: value for name, value in chosen.items() if value != default(name)}


def _fits(chosen: Mapping[str, str], axis: str, value: str) -> bool:
    return world_of(layout_keys({**chosen, axis: value})) <= MOST_RANKS


def _other_layout(rng: random.Random, choice: Mapping[str, str]) -> dict[str, str] | bool | None:
    """Another layout for the second attempt of the run; None where the job keeps its own, False if no other fits."""
    wish = choice.get("after the restart")
    if wish is None:
        return None
    layout = [name for name, axis in axes().items() if axis.area == "layout"]
    fixed = {name: choice.get(name, default(name)) for name in axes() if name not in layout}
    now = layout_keys(choice)
    for _ in range(100):
        found = _choose(rng, fixed)
        if found is None or not allowed(found):
            continue
        keys = layout_keys(found)
        if keys == now or (world_of(keys) == world_of(now)) != (wish == "other layout"):
            continue
        # its counts are those of the micro-batches that readers have at the same time
        if choice.get("router losses") == "global_batch" and readers_of(keys) != readers_of(now):
            continue
        return {name: found[name] for name in layout if name in found}
    return False


# ---- sizes


def draw_sizes(rng: random.Random, job: Job) -> dict[str, Any]:
    """Dims, rows and steps that fit the axes and all layouts of the job."""
    layouts = job.layouts()
    sizes = {
        **_widths(rng, job, layouts),
        **_rows(rng, job, layouts),
    }
    sizes |= _steps(rng, job, sizes)
    return sizes


def _lcm(layouts: Iterable[Mapping[str, Any]], axis: str) -> int:
    return math.lcm(*(size_of(keys, axis) for keys in layouts))


def stages_of(layout: Mapping[str, Any]) -> int:
    """Stages of a pipeline."""
    schedule = layout.get("parallel.pp_schedule", "1f1b")
    return size_of(layout, "pp") * (1 if schedule in ("1f1b", "gpipe") else 2)


def _widths(rng: random.Random, job: Job, layouts: list[dict[str, Any]]) -> dict[str, Any]:
    tp, odd = _lcm(layouts, "tp"), job["sizes"] == "odd"
    stages = max(stages_of(layout) for layout in layouts)
    layers = max(stages, rng.choice((1, 2) if job.has("experts") else (1, 2, 2, 3)))
    if job.has("mixture layers") or job.has("layer types"):
        layers = max(layers, 2)

    # at most 6 heads, and 48 dims of all of them
    kv_heads = 1 if job["kv heads"] == "one" else tp * rng.choice((1, 2) if tp == 1 else (1,))
    group = (
        rng.choice([n for n in (2, 3) if n * kv_heads <= 6]) if job["kv heads"] == "grouped" else 1
    )
    heads = kv_heads * group
    if job["kv heads"] != "grouped":
        heads = rng.choice([n for n in (1, 2, 3, 4, 6) if n % tp == 0])
        kv_heads = 1 if job["kv heads"] == "one" else heads
    widths = (8, 12, 16) if job["rope"] == "partial" else (6, 8, 10, 12)
    head_dim = rng.choice([n for n in widths if n * heads <= 48] or [min(widths)])
    dim = rng.choice((18, 22, 26, 30, 38)) if odd else heads * head_dim
    if job["mixer"] != "attention" and not odd:
        dim = heads * 8
    if job["expert backend"] == "grouped_mm":
        head_dim, dim, odd = 8, heads * 8, False
    hidden = tp * (rng.choice((11, 13, 17, 19)) if odd else 16)

    # ids of uneven parts of tp are right on disk only for few shards (rules.uneven_vocab), so these divide
    even = math.lcm(
        *(size_of(x, "tp") * size_of(x, "dp_shard") * size_of(x, "cp") for x in layouts)
    )
    large = any(
        size_of(x, "tp") > 1 and size_of(x, "dp_shard") * size_of(x, "cp") > 2 for x in layouts
    )
    vocab = rng.choice((61, 67, 73, 89, 97)) if odd else rng.choice((64, 80, 96))
    if job.has("images") and not job.has("image tokens"):
        vocab = rng.choice((259, 261)) if odd else 258  # bytes, their end, and the placeholder
    vocab = -(-vocab // even) * even if large else vocab

    ep = _lcm(layouts, "ep")
    experts = ep * rng.choice((2, 3) if ep < 4 else (1, 2)) if ep > 1 else rng.choice((4, 5, 6, 8))
    if job["experts"] == "groups":
        experts = 2 * ep * 2 if ep != 2 else 8
    top_k = rng.choice((1, 2, 2, 3))
    if job["experts"] != "softmax of all":
        top_k = max(top_k, 2)  # the weight of one expert, divided by itself, has no gradient
    return {
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "dim": dim,
        "hidden_dim": hidden,
        "vocab_size": vocab,
        # few choices of experts are close if their scores are far apart
        "init_std": 0.2 if job.has("experts") else rng.choice((0.05, 0.1, 0.2)),
        "num_experts": experts,
        "top_k": min(top_k, experts),
        "shared": tp * rng.choice((5, 8)),
    }


def _rows(rng: random.Random, job: Job, layouts: list[dict[str, Any]]) -> dict[str, Any]:
    # tp divides the tokens of a cp rank, and a ring has two chunks for each rank of cp
    unit = math.lcm(*(math.lcm(2 * size_of(x, "cp") if size_of(x, "cp") > 1 else 1,
                               size_of(x, "cp") * size_of(x, "tp")) for x in layouts))  # fmt: skip
    # a sample with two images fits: of answers alone, with questions, or with branches, which need them
    template = "vicuna" if job.has("branches") else rng.choice(("plain", "vicuna"))
    if job["image files"] == "videos":  # whose questions have the long beginning of the template
        template = "plain"
    least = 8
    if job.has("images") and not job.has("image tokens"):
        least = 60 if job.has("branches") else {"plain": 20, "vicuna": 44}[template]
    lengths = [n for n in range(least, least + 26) if n % unit == 0] or [unit]
    if job.has("experts"):  # and if they are few
        lengths = lengths[:4]
    seq_len = rng.choice(lengths)
    readers = math.lcm(*(readers_of(x) for x in layouts))
    most = max(readers_of(x) for x in layouts)
    kind, pipelined = job["micro-batches"], any(size_of(x, "pp") > 1 for x in layouts)
    if kind == "none":
        micro, batch = None, readers * rng.choice((1, 2, 3) if readers < 4 else (1, 2))
        if pipelined:
            batch = max(batch, 2 * readers)
    else:
        micro = 1 if kind == "single rows" else rng.choice((1, 2, 2, 3) if readers < 4 else (1, 2))
        count = readers * rng.choice((2, 3))
        if kind == "uneven":
            count = most * rng.choice((1, 2)) + rng.randint(1, max(1, most - 1))
        batch = micro * count
    while batch < 4:
        batch *= 2
    batch = min(batch, 24)
    if micro is None and depends_on_micro_batches(job.choice):
        micro = max(n for n in range(1, batch + 1) if batch % (n * readers) == 0 or n == 1)
    half = batch // 2 // (micro or 1) * (micro or 1)
    later = rng.choice((half, 2 * batch)) if half else 2 * batch
    return {
        "template": template,
        "seq_len": seq_len,
        "later_seq_len": rng.choice([n for n in lengths if n != seq_len] or [seq_len + unit]),
        "global_batch": batch,
        "later_batch": later,
        "micro_batch": micro,
    }


def _steps(rng: random.Random, job: Job, sizes: Mapping[str, Any]) -> dict[str, Any]:
    steps = rng.choice((3, 4, 5, 6))
    if job.has("bad step") or job.has("restart"):
        steps = max(steps, 5)
    bad = rng.randint(4, steps) if job["bad step"] == "spike" else rng.randint(2, max(2, steps))
    rows = steps * sizes["global_batch"]
    return {
        "steps": steps,
        "warm-up": rng.randint(1, steps // 2),
        "stop": rng.randint(1, steps - 2),
        "bad": bad,
        "phase": rng.randint(sizes["global_batch"] // 2, max(2, rows - sizes["global_batch"])),
        "rows": rows + 3 if job["epochs"] == "one" else max(3, rows // rng.choice((2, 3))),
    }
