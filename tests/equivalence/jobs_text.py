"""Features of jobs of text models, for `jobs.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jobs_types import EP, JobFeature
from jobs_vision import shared
from tests.data.test_mixtures import mixed_job, write_tokens
from tests.data.test_phases import PHASES
from tests.use.test_optimizer_groups import PLAN, Watch

from forge_testing.jobs import MIXTURE
from forge_testing.runs import make_job

#: Their stages compute gradients of inputs and of weights apart.
HALVED = frozenset({"pp zero bubble", "pp zbv", "pp dualpipev"})
#: One rank has both ends, which cannot share a table.
BOTH_ENDS = frozenset({"pp zbv", "pp dualpipev"})
#: Layouts with micro-batches of another size than THREE_ROWS.
OTHER_ROWS = frozenset({"three readers"})
#: For losses of micro-batches: every process takes those of one reader.
THREE_ROWS = {"train.micro_batch": 3}
TABLE = """
[optimizer.groups.table]
patterns = ["embedding.*"]
lr_multiplier = 0.0
[train.stages.all]
start_step = 3
lr_multipliers = { table = 0.5 }
"""
LAYERS = """
[model.attention]
window = 6
scale = 0.3
softcap = 2.0
[model.layer_types.local]
window = 5
rope_theta = 100.0
[model.layer_types.nope]
rope = false
"""
PARTS = """
[model.feed_forward_options]
power = 2
[model.norm_options]
gain = 1.5
"""
NAMES = {
    "model.mixer": "RunningMean",
    "model.norm": "GainNorm",
    "model.feed_forward": "PowerOfReLU",
    "model.block": "ParallelBlock",
}
#: Rows of uneven padding, and a router loss of each kind and scope with the second axis that it meets: as means over the
#: tokens of a step they do not depend on micro-batches and ranks (F147).
PADDED_LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "z": ("tp", {"z_loss_weight": 1.0}),
    "sequence": ("cp", {"sequence_loss_weight": 1.0}),
    "of sequences": ("pp", {"aux_loss_weight": 1.0, "aux_scope": "sequence"}),
    "lagged": ("ep", {"aux_loss_weight": 1.0, "aux_scope": "global_batch_lagged"}),
    # the fractions of these are those of a micro-batch
    "of micro-batches": ("cp", {"aux_loss_weight": 1.0, "aux_scope": "micro_batch"}),
    "of global batches": ("tp", {"aux_loss_weight": 1.0, "aux_scope": "global_batch"}),
}
AXES = frozenset({"dp_shard", "dp_replicate", "tp", "cp", "pp", "ep"})
#: Two terms of the loss that are no part of `loss`.
TERMS = {"z_loss": 1e-2, "label_smoothing": 0.2}
TERM_COLUMNS = ("loss.z_loss", "loss.label_smoothing")
OF_EXPERTS = tuple(
    f"moe.{layer}.{name}"
    for layer in (0, 1)
    for name in ("max_load", "min_load", "dead", "entropy", "drop_rate", "max_bias")
)
#: The model is built by a function; the keys of the built-in one go.
IMPORTED: dict[str, Any] = {"model.num_layers": None, "optimizer.lr": 1e-3}
MODELS = "tests.parallel.test_imported_models"
EXTRAS = "tests.parallel.test_extras_forge"
OBJECTIVES = "tests.use.test_objectives"


def padded(name: str) -> JobFeature:
    """A router loss over rows of uneven padding, on two readers and with one more axis."""
    axis, keys = PADDED_LOSSES[name]
    by_micro_batch = keys.get("aux_scope") == "micro_batch"
    flags = {
        "data.sources.text.name": "tests.use.test_fused_loss:Padded",
        "model.vocab_size": 64,
        "model.moe.num_experts": 4,
        "train.steps": 2,
        "eval.every_steps": 0,
        **{f"model.moe.{key}": value for key, value in keys.items()},
        **(THREE_ROWS if by_micro_batch else {}),
    }
    accumulated = {
        "fsdp accumulated"
    }  # where fractions depend on micro-batches, one process has others
    other = keys.get("aux_scope") in ("micro_batch", "global_batch")
    return JobFeature(
        make_job,
        flags,
        bound=2e-5,
        micro_batch=3 if by_micro_batch else None,
        without=AXES - {"dp_shard", axis} | OTHER_ROWS | (accumulated if other else set()),
        also=frozenset() if other else frozenset(accumulated),
        columns=OF_EXPERTS,
    )


def write_questions(folder: Path) -> None:
    """Seven questions, which no number of ranks divides."""
    answers = ["he", " was", "the"]
    rows = [{"prompt": "the " * (1 + i), "choices": answers, "answer": i % 3} for i in range(7)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def of_all_columns(folder: Path) -> Path:
    """Two sources of very different density of labels, a held-out set of each, and questions."""
    padded = 'name = "tests.use.test_fused_loss:Padded"'
    extra = f'''
[data.sources.padded]
{padded}
[eval.sets.padded]
{padded}
split = "validation"
sequences = 7
[eval.choices.questions]
path = "{shared("questions", write_questions)}/questions.jsonl"
'''
    return make_job(folder, extra + MIXTURE)


def with_table(extra: str) -> Any:
    """A job with further TOML."""
    return lambda folder: make_job(folder, extra)


def of_model(name: str) -> Any:
    """A job whose model is what the function `name` builds."""

    def write(folder: Path) -> Path:
        job = make_job(folder)
        sizes = "dim = 16\nnum_layers = 1\nnum_heads = 2\n"
        assert sizes in job.read_text()
        job.write_text(job.read_text().replace(sizes, f'name = "{name}"\n'))
        return job

    return write


def of_sources(folder: Path) -> Path:
    """Three sources with weights, of which one ends, and a phase with other weights and rates."""
    return mixed_job(folder, shared("tokens", write_tokens))


def of_sources_and_experts(folder: Path) -> Path:
    job = of_sources(folder)
    job.write_text(job.read_text() + "[model.moe]\nnum_experts = 4\nwidth_multiplier = 0.5\n")
    return job


SOURCES = tuple(f"loss.source.{name}" for name in ("text", "books", "notes"))
#: Row 94 is the first of the phase, in the eighth step.
THROUGH_A_PHASE = {"train.steps": 9, "eval.every_steps": 4, "schedule.name": "constant"}
GRADIENTS = tuple(f"gradient.{part}" for part in ("0", "1", "rest"))
FEATURES: dict[str, JobFeature] = {
    # data and losses
    "sources and experts": JobFeature(
        of_sources_and_experts, THROUGH_A_PHASE, columns=SOURCES, also=frozenset({"three readers"})
    ),
    "sources of the fused loss": JobFeature(
        of_sources,
        {**THROUGH_A_PHASE, "train.loss": "fused_cross_entropy"},
        without=EP,
        columns=SOURCES,
    ),
    "phases of other rows": JobFeature(
        with_table(PHASES),
        {"train.steps": 12, "model.max_seq_len": 48, "data.num_workers": 2},
        without=EP | {"pp"},
    ),
    "fused loss of a tied table that thaws": JobFeature(
        with_table(TABLE),
        {
            "train.loss": "fused_cross_entropy",
            **{f"train.fused_cross_entropy.{key}": value for key, value in TERMS.items()},
            "model.tie_embeddings": True,
        },
        without=EP | BOTH_ENDS,
        columns=TERM_COLUMNS,
    ),
    "loss terms of weighted labels": JobFeature(
        make_job,
        {
            "data.sources.text.name": "tests.use.test_fused_loss:Weighted",
            "model.vocab_size": 64,
            **{f"train.cross_entropy.{key}": value for key, value in TERMS.items()},
        },
        without=EP,
        also=frozenset({"pp zero bubble"}),
        columns=TERM_COLUMNS,
    ),
    "tokens ahead": JobFeature(
        make_job,
        {
            "model.mtp.num_modules": 2,
            "model.mtp.weight": 0.4,
            "train.cross_entropy.z_loss": 1e-3,
            "model.parametrization": "mup",
            "model.mup.base_dim": 8,
            "model.mup.base_num_layers": 1,
        },
        without=EP | HALVED,
        also=frozenset({"pp interleaved"}),
        columns=("loss.mtp", "loss.z_loss"),
    ),
    "distillation": JobFeature(
        make_job,
        {
            "train.objective": f"{OBJECTIVES}:distil",
            "train.objective_options": {"temperature": 2.0},
            "train.micro_batch": 2,
        },
        without=EP | {"tp", "pp"},
        columns=("objective.cross_entropy",),
    ),
    # four readers do not divide six micro-batches, and three rows are no pairs
    "preferred pairs": JobFeature(
        make_job,
        {
            "train.objective": f"{OBJECTIVES}:dpo",
            "train.objective_options": {"beta": 0.1},
            "train.micro_batch": 2,
        },
        without=EP | {"tp", "cp", "pp", "fsdp accumulated"},
        columns=("objective.preferred",),
    ),
    "a loss of logits": JobFeature(  # prose: the name of a case
        make_job,
        {
            "train.loss": "forge_testing.extensions:squared_error",
            "train.loss_options": {"scale": 0.5},
        },
        without=EP | {"tp"},
    ),
    # models and their parts
    "grouped queries": JobFeature(
        with_table("[model.rope_scaling]\nfactor = 2.0\n"),
        {
            "model.dim": 32,
            "model.num_heads": 4,
            "model.num_kv_heads": 2,
            "model.qk_norm": True,
            "optimizer.lr": 1e-3,
        },
        without=EP,
    ),
    "layers of several types": JobFeature(  # prose: the name of a case
        with_table(LAYERS),
        {
            "model.dim": 32,
            "model.num_heads": 4,
            "model.num_layers": 4,
            "model.layer_pattern": ["local", "nope", "global"],
            "optimizer.lr": 1e-3,
        },
        without=EP | {"cp"},
    ),
    "parts of somebody else": JobFeature(
        with_table(PARTS),
        {
            **{key: f"forge_testing.extensions:{name}" for key, name in NAMES.items()},
            "model.dim": 32,
            "optimizer.name": "forge_testing.models:NamedSGD",
            "optimizer.lr": 0.1,
            "optimizer.eps": 1e-8,
        },
        without=EP | {"cp"},
    ),
    "an imported model with tied ends": JobFeature(
        of_model(f"{MODELS}:tied"), IMPORTED, without=EP | BOTH_ENDS | {"tp"}
    ),
    "a foreign model": JobFeature(of_model(f"{MODELS}:foreign"), IMPORTED, without=EP | {"tp"}),
    "experts of an imported model": JobFeature(
        of_model(f"{MODELS}:roomy"), IMPORTED, without=frozenset({"tp"})
    ),
    "weighted rows with patches and places": JobFeature(
        of_model(f"{EXTRAS}:build_pictured"),
        {
            **IMPORTED,
            "data.sources.text.name": f"{EXTRAS}:PictureSource",
            "data.seq_len": 16,
        },
        without=EP | {"tp"},
        also=frozenset({"three readers"}),
    ),
    # experts
    "experts": JobFeature(
        with_table(MIXTURE),
        {"model.moe.aux_loss_weight": 0.1, "model.moe.aux_scope": "global_batch_lagged"},
        columns=OF_EXPERTS,
    ),
    "experts in micro-batches": JobFeature(
        with_table(MIXTURE),
        {
            **THREE_ROWS,
            "model.moe.aux_loss_weight": 0.1,
            "model.moe.dispatch_chunks": 2,
            "parallel.recompute": "selective",
        },
        micro_batch=3,
        without=OTHER_ROWS,
        columns=OF_EXPERTS,
    ),
    # later micro-batches of a step know the earlier ones: equal to one process where a reader has one
    "experts of the global batch": JobFeature(  # prose: the name of a case
        with_table(MIXTURE),
        {"model.moe.aux_loss_weight": 0.1, "model.moe.aux_scope": "global_batch"},
        without=OTHER_ROWS | {"pp", "fsdp accumulated"},
        columns=OF_EXPERTS,
    ),
    "columns of metrics": JobFeature(
        of_all_columns,
        {
            **{f"data.sources.{name}.weight": 0.5 for name in ("text", "padded")},
            **{f"train.cross_entropy.{key}": value for key, value in TERMS.items()},
            "model.moe.aux_loss_weight": 0.1,
            "model.moe.aux_scope": "sequence",
            "metrics.every_steps": 2,
            "metrics.source_shares": True,
            "metrics.expert_loads": True,
            "eval.every_steps": 3,
        },
        also=frozenset({"three readers"}),
        columns=(
            *OF_EXPERTS,
            *TERM_COLUMNS,
            *(f"{of}.source.{name}" for of in ("loss", "share") for name in ("text", "padded")),
            *(
                "moe.0.load",
                "eval/padded/loss",
                "eval/padded/perplexity",
                "eval/questions/accuracy",
            ),
        ),
    ),
    **{f"padded rows, loss {name}": padded(name) for name in PADDED_LOSSES},
    # optimizers and statistics
    "groups that freeze and thaw": JobFeature(
        with_table(PLAN),
        {"train.steps": 6, "model.moe.num_experts": 4, "model.moe.first_dense_layers": 1},
        also=frozenset(
            {"fsdp accumulated", "fsdp gathered", "fsdp recomputed", "fsdp compiled", "pp zbv"}
        ),
        callback=Watch,
    ),
    "groups of a class of torch": JobFeature(  # prose: the name of a case
        with_table(PLAN),
        {
            "train.steps": 6,
            "optimizer.name": "torch.optim:SGD",
            "optimizer.lr": 0.5,
            "optimizer.eps": 1e-8,
        },
        without=EP | {"pp"},
        callback=Watch,
    ),
    "schedule-free": JobFeature(
        make_job,
        {
            "train.steps": 6,
            "optimizer.name": "schedule_free_adamw",
            "schedule.name": "constant",
            "schedule.warmup_steps": 3,
            "checkpoint.every_steps": 2,
        },
        without=EP,
    ),
    "statistics of gradients": JobFeature(
        make_job,
        {
            **THREE_ROWS,
            "metrics.gradients_every_steps": 2,
            "train.loss": "fused_cross_entropy",
        },
        micro_batch=3,
        without=EP | OTHER_ROWS | {"cp", "pp", "fsdp compiled"},
        columns=tuple(f"{part}.norm" for part in GRADIENTS),
        rough_columns=tuple(
            f"{p}.{m}" for p in GRADIENTS for m in ("signal", "snr", "noise_scale")
        ),
    ),
    "statistics of gradients of experts": JobFeature(
        with_table(MIXTURE),
        {**THREE_ROWS, "metrics.gradients_every_steps": 2},
        micro_batch=3,
        without=EP | OTHER_ROWS | {"tp", "cp", "pp", "fsdp compiled"},
        columns=tuple(f"{part}.norm" for part in GRADIENTS),
        rough_columns=tuple(
            f"{p}.{m}" for p in GRADIENTS for m in ("signal", "snr", "noise_scale")
        ),
    ),
}
