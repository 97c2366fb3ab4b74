"""Features of jobs of vision-language models, for `jobs.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs_types import EP, JobFeature
from tests.vlm.file_jobs import (
    OF_QWEN,
    STRIP_KEYS,
    STRIP_OPTIONS,
    ids_job,
    packed_job,
    qwen3_vl_job,
    save_clip,
    write_ids,
    write_qwen3_vl,
    write_strips,
)

from forge_testing.references import once
from forge_testing.vlm_jobs import TRANSFORMERS, write_vlm_job

#: Of each twelve rows the last six have no image: of two or more readers one has none at all.
TEXT = {"data.sources.squares.options": {"group": 12, "text": 6}}
#: Images on every reader in the first step, none on the last reader in the second, none at all in the third.
MIXED = {"data.sources.squares.options": {"group": 36, "text": 18}}
#: For losses of micro-batches: every process takes those of one reader.
THREE_ROWS = {"train.micro_batch": 3}
MOMA = {**TEXT, **THREE_ROWS, "model.fusion.name": "moma"}
IDS = {"eval.every_steps": 0}
#: The layout that cuts the stream twice, which models with an encoder refuse.
TWICE = frozenset({"tp cp"})
#: Layouts with micro-batches of another size than THREE_ROWS.
OTHER_ROWS = frozenset({"three readers"})
#: Layouts with another number of blocks than COMMON.
DEEPER = frozenset({"pp interleaved", "pp zero bubble", "pp zbv", "pp dualpipev"})
MODALITIES = ("loss.modality.text", "loss.modality.image")
#: A part of the encoder is never trained; another one and the text are from the third step on, the adapter always.
STAGES = """
[optimizer.groups]
never = { patterns = ["vision.patches.*", "vision.positions.*", "vision.layers.0.*"], lr_multiplier = 0.0 }
vision = { patterns = ["vision.layers.1.*"], lr_multiplier = 0.0 }
text = { patterns = ["embedding.*", "layers.*", "norm.*", "lm_head.*"], lr_multiplier = 0.0 }
[train.stages]
whole = { start_step = 3, lr_multipliers = { vision = 0.5, text = 0.1 } }
"""


def shared(name: str, write: Callable[[Path], Any]) -> Path:
    """A folder that is written once in a session: jobs on it have the same text, and so one reference."""

    def make(folder: Path) -> str:
        write(folder)
        return str(folder)

    return Path(once(["files of jobs", name], make))


def of_stages(folder: Path) -> Path:
    return write_vlm_job(folder, STAGES)


def of_strips(folder: Path) -> Path:
    """Pictures of several shapes in files, packed; every fourth conversation has none."""
    job, own = packed_job(folder), 'name = "forge_testing.squares:Squares"'
    path = shared("strips", write_strips) / "strips.jsonl"
    given = f'name = "forge_vlm.data:open_source"\npath = "{path}"'
    job.write_text(job.read_text().replace(own, given))
    return job


def of_ids(folder: Path) -> Path:
    """Images as tokens, without an encoder."""
    return _of_twelve(ids_job(folder, shared("ids", write_ids) / "ids.npy"))


def of_clip(folder: Path) -> Path:
    """The encoder begins with the weights of a folder of transformers."""
    return write_vlm_job(folder, f'[init]\nencoder = "{shared("clip", save_clip)}"\n')


def of_qwen3_vl(folder: Path) -> Path:
    """Encoder and text begin with the weights of a folder; features for the first blocks, positions of three axes."""
    return _of_twelve(qwen3_vl_job(folder, shared("qwen3_vl", write_qwen3_vl)))


def _of_twelve(job: Path) -> Path:
    text = job.read_text()
    assert "global_batch = 4" in text
    job.write_text(text.replace("global_batch = 4", "global_batch = 12"))
    return job


#: Of weights and moments of a model with an encoder: over six seeds of initial weights the largest error was 7e-5,
#: with an encoder of transformers 1e-4.
MOMENTS = 1e-4
FEATURES: dict[str, JobFeature] = {
    "pictures": JobFeature(write_vlm_job, without=EP | TWICE, bound=MOMENTS),
    "pictures on some readers": JobFeature(
        write_vlm_job,
        {**MIXED, "train.loss": "fused_cross_entropy", "parallel.recompute": "full"},
        without=EP | TWICE,
        bound=MOMENTS,
    ),
    "picture towers": JobFeature(
        write_vlm_job,
        {**TEXT, "model.fusion.name": "mixture_of_transformers"},
        without=EP | TWICE,
    ),
    "picture experts": JobFeature(
        write_vlm_job,
        {**MOMA, "model.fusion.moma.experts": {"image": 6}, "model.feed_forward_bias": True},
        micro_batch=3,
        without=TWICE | OTHER_ROWS,
        bound=MOMENTS,
    ),
    "picture experts that choose": JobFeature(
        write_vlm_job,
        {
            **MOMA,
            "eval.every_steps": 0,
            "model.fusion.moma.router": "expert_choice",
            "model.fusion.moma.gumbel_noise": 1.0,
        },
        micro_batch=3,
        without=frozenset({"cp"}) | OTHER_ROWS,
    ),
    "cross-attention": JobFeature(
        write_vlm_job,
        {
            "model.fusion.name": "cross_attention",
            "data.sources.squares.options": {"group": 12, "text": 6, "places": 1},
        },
        without=EP | TWICE | {"pp"},
    ),
    "pictures and experts": JobFeature(
        write_vlm_job,
        {
            **TEXT,
            **THREE_ROWS,
            "model.moe.num_experts": 4,
            "model.moe.top_k": 2,
            "model.moe.aux_loss_weight": 0.01,
        },
        micro_batch=3,
        without=TWICE | OTHER_ROWS,
    ),
    "pictures of several shapes": JobFeature(
        of_strips,
        {**STRIP_KEYS, "data.sources.squares.options": STRIP_OPTIONS},
        without=EP | TWICE,
    ),
    "image tokens": JobFeature(of_ids, IDS, without=EP, columns=MODALITIES, bound=3e-5),
    "image tokens of towers": JobFeature(
        of_ids,
        {**IDS, "model.fusion.name": "mixture_of_transformers"},
        without=EP,
        columns=MODALITIES,
    ),
    "image tokens of experts": JobFeature(
        of_ids,
        {**IDS, "model.fusion.name": "moma", "model.fusion.moma.balance_loss": 0.0},
        columns=MODALITIES,
    ),
    "stages of an encoder": JobFeature(  # prose: the name of a case
        of_stages, {**TEXT, "model.vision.vit.num_layers": 2}, without=EP | TWICE, bound=MOMENTS
    ),
    "an encoder of a folder": JobFeature(  # prose: the name of a case
        of_clip, {**TRANSFORMERS, **TEXT}, without=EP | TWICE, bound=2 * MOMENTS
    ),
    "adapters of Qwen3-VL": JobFeature(
        of_qwen3_vl,
        {
            "model.num_layers": 3,
            "eval.every_steps": 0,
            "lora.rank": 4,
            "lora.base_dtype": "fp32",
            "lora.patterns": OF_QWEN,
        },
        without=EP | TWICE | DEEPER,
    ),
}
