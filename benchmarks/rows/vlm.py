"""A training step of the joint decoder next to transformers' LLaVA with the same weights, images and sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from benchmarks.rows import Row, Setting
from torch import Tensor

IMAGE = 3


class Pictures(NamedTuple):
    """Case: both models, tokens and labels (B, S), images (B, 3, H, W)."""

    ours: Any
    theirs: Any
    tokens: Tensor
    labels: Tensor
    images: Tensor


def pictures(setting: Setting) -> Pictures:
    import transformers

    from forge_core import families
    from forge_vlm import VLM, ModalityConfig, VisionConfig, VLMConfig

    transformers.logging.set_verbosity_error()
    dim, layers, vocab, side, length = setting.of((256, 6, 16_000, 112, 192), (32, 1, 64, 28, 8))
    vision = {
        "model_type": "clip_vision_model", "hidden_size": dim // 2, "intermediate_size": 2 * dim,
        "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": side, "patch_size": 14,
    }  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=dim, intermediate_size=3 * dim, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    select = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, **select
    )
    torch.manual_seed(0)
    theirs: Any = transformers.LlavaForConditionalGeneration(config)
    encoder = VisionConfig(
        "transformers", transformers=vision, select_layer=(-1,), select_feature="patch"
    )
    own = vars(families.LLAMA.config_from_hf(text.to_dict()))
    ours = VLM(VLMConfig(**own, vision=encoder, modalities={"image": ModalityConfig(IMAGE)}))
    ours.load_state_dict(renamed(theirs.state_dict(), families.LLAMA, layers))

    patches, batch = (side // 14) ** 2, setting.of(4, 2)
    words = torch.randint(4, vocab, (batch, length))
    tokens = torch.cat([torch.full((batch, patches), IMAGE), words], dim=1)
    labels = torch.full_like(tokens, -100)
    labels[:, patches - 1 : -1] = words
    given = (tokens, labels, torch.randn(batch, 3, side, side))
    return Pictures(
        ours.to(setting.device), theirs.to(setting.device), *(t.to(setting.device) for t in given)
    )


def renamed(state: dict[str, Tensor], family: Any, layers: int) -> dict[str, Tensor]:
    """A state of LLaVA by the names of our model."""
    names = {}
    for hf, forge, _ in family.rows:
        for i in range(layers if "{i}" in hf else 1):
            name = hf.format(i=i).replace("model.", "model.language_model.", 1)
            names[name] = forge.format(i=i)
    found = {}
    for name, value in state.items():
        name = name.replace("model.multi_modal_projector.", "adapter.")
        found[names.get(name, name.replace("model.vision_tower.", "vision.model."))] = value
    return found


def step(model: Any, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A loss and its gradients, which each call clears first."""

    def run() -> Tensor:
        model.zero_grad()
        value = loss()
        value.backward()
        return value.detach()

    return run


def forge(case: Pictures) -> Callable[[], Tensor]:
    from forge_core import cross_entropy

    return step(
        case.ours,
        lambda: cross_entropy(case.ours(case.tokens, images=case.images), case.labels).mean,
    )


def llava(case: Pictures) -> Callable[[], Tensor]:
    labels = torch.where(case.tokens == IMAGE, -100, case.tokens)  # transformers shifts by itself
    given = {"input_ids": case.tokens, "pixel_values": case.images, "labels": labels}
    return step(case.theirs, lambda: case.theirs(**given).loss)


ROWS = [
    Row("vlm-llava", pictures, {"forge": forge, "transformers": llava},
        "CLIP encoder of 4 layers, decoder of dim 256 and 6 layers, V 16,000, 4 sequences of an image and 192 tokens, fp32, "
        "forward and backward; transformers: LlavaForConditionalGeneration with labels", tolerance=1e-4),
]  # fmt: skip
