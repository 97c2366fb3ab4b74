"""Axes of jobs with images. The files that such a job reads are written by `files_images.py`."""

from __future__ import annotations

from typing import Any

from tests.fuzz.job import NO, NONE, Axis, Job, table

from forge_testing.vlm_jobs import TRANSFORMERS

#: Height and width of images of one size, and of a patch.
SIDE, PATCH = 8, 4
#: The id of the byte tokenizer that stands for a part of an image; ids of discrete tokens of images.
PLACEHOLDER, DISCRETE = 257, 16
_FACTOR = ("pixel_shuffle", "pixel_shuffle_mlp", "average_pool", "attentional_pool")


def _fusion(name: str, **keys: Any) -> Any:
    def found(job: Job) -> dict[str, Any]:
        model = {"model.name": "vlm", "model.fusion.name": name}
        own = {f"model.fusion.{name}.{key}": value for key, value in keys.items()}
        return {**model, **own, **_modality(job)}

    return found


def _modality(job: Job) -> dict[str, Any]:
    if job.has("image tokens"):
        first = job.sizes["vocab_size"] - DISCRETE
        ids = {"first_id": first, "num_ids": DISCRETE, "discrete": True}
        return {"model.vision.name": "none", **table("model.modalities.image", **ids)}
    return {"model.modalities.image.first_id": PLACEHOLDER, **_encoder(job)}


def _encoder(job: Job) -> dict[str, Any]:
    if job["encoder"] == "transformers":
        return dict(TRANSFORMERS)
    width = job.sizes["dim"] if job["adapter"] == "none" else job.pick("vit dim", (12, 16))
    sizes = {"image_size": SIDE, "patch_size": PATCH, "dim": width, "num_heads": 2}
    sizes |= {
        "num_layers": job.pick("vit layers", (1, 2)),
        "hidden_dim": job.pick("vit hidden", (10, 24)),
    }
    return {
        "model.vision.name": job["encoder"].partition(",")[0],
        **table("model.vision.vit", **sizes),
    }


def _moma(router: str, **keys: Any) -> Any:
    return lambda job: _fusion(
        "moma",
        router=router,
        num_experts=job.sizes["num_experts"],
        hidden_dim=job.pick("moma", (6, 9)),
        **keys,
    )(job)


def _cross(job: Job) -> dict[str, Any]:
    sees, norm = job.pick("sees", ("last", "group", "all")), job.pick("cross norm", (True, False))
    return _fusion("cross_attention", every_n_layers=1, sees=sees, qk_norm=norm)(job)


def _adapter(name: str, **keys: Any) -> dict[str, Any]:
    return {"model.adapter.name": name, **table(f"model.adapter.{name}", **keys)}


def tokens_of_image(job: Job) -> int:
    """Tokens of an image of one size."""
    if job["images"] == "cross_attention":
        return 1
    if job["adapter"] == "resampler":
        return 4
    return 1 if job["adapter"] in _FACTOR else (SIDE // PATCH) ** 2


def _mrope(job: Job) -> dict[str, Any]:
    pairs = job.sizes["head_dim"] // 2
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    layout = job.pick("mrope", ("chunked", "interleaved"))
    return {"model.positions": "mrope", **table("model.mrope", sections=sections, layout=layout)}


IMAGES = {
    "images": Axis(
        "images",
        {
            **NONE,
            "joint_decoder": _fusion("joint_decoder"),
            "cross_attention": _cross,
            "mixture_of_transformers": _fusion("mixture_of_transformers"),
            "moma": _moma("token_choice", balance_loss=0.1),
            "moma, expert choice": _moma("expert_choice"),
            "moma, auxiliary router": _moma("auxiliary_router", auxiliary_dim=10),
        },
        {"none": 20.0, "joint_decoder": 1.5},
    ),
    "image tokens": Axis("images", {"encoded": NO, "discrete": NO}, {"encoded": 2.0}),
    "encoder": Axis(
        "images",
        {
            "vit": NO,
            "packed_vit": NO,
            "packed_vit, merged": {"model.vision.vit.merge": 2},
            "transformers": NO,
        },
        {"vit": 3.0},
        against=frozenset({"transformers"}),
    ),
    "adapter": Axis(
        "images",
        {
            "mlp": NO,
            "mlp, no bias": _adapter("mlp", bias=False, hidden_dim=11),
            "linear": _adapter("linear"),
            "none": _adapter("none"),
            "pixel_shuffle": _adapter("pixel_shuffle", factor=2),
            "pixel_shuffle_mlp": _adapter("pixel_shuffle_mlp", factor=2),
            "average_pool": _adapter("average_pool", factor=2),
            "attentional_pool": _adapter("attentional_pool", factor=2, num_heads=2),
            "resampler": _adapter(
                "resampler", num_latents=4, num_layers=1, num_heads=2, hidden_dim=14
            ),
        },
    ),
    "image positions": Axis(
        "images",
        {
            "sequential": NO,
            "text_preserving": {"model.positions": "text_preserving"},
            "mrope": _mrope,
        },
    ),
    "sees both ways": Axis(
        "images",
        {
            **NONE,
            "image": {"model.bidirectional": "image"},
            "clip": {"model.bidirectional": "clip"},
            "document": {"model.bidirectional": "document"},
            "prefix_lm": {"model.bidirectional": "prefix_lm"},
        },
        {"none": 2.0},
    ),
    "weights of answers": Axis("images", {"token": NO, "sample": NO, "sqrt": NO, "message": NO}),
    # samples with two images, one or none; rows of one sample; batches that all have images, or none
    "image rows": Axis("images", {"packed": NO, "single": NO, "groups": NO}),
    # as the files are, as forge-vlm prepares them, read while training, or frames of videos
    "image files": Axis(
        "images",
        {"records": NO, "prepared": NO, "streamed": NO, "videos": NO},
        {"records": 4.0},
        against=frozenset({"videos"}),
    ),
    "branches": Axis("images", {"no": NO, "yes": NO}, {"no": 3.0}),
}
