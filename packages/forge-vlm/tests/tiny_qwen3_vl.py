"""A tiny Qwen3-VL of transformers with random weights, and this package's model with the same ones."""

import json

import torch

from forge_vlm import VLM
from forge_vlm.families import QWEN3_VL

IMAGE, VIDEO = 126, 127
VISION = dict(
    depth=3,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=64,
    num_position_embeddings=16,
    deepstack_visual_indexes=[0, 1],
)
TEXT = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    head_dim=16,
)
ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}


def theirs(rope=ROPE, **options):
    """Every parameter is random: a norm of ones or a bias of zeros would hide what it does."""
    import transformers as T

    config = T.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=dict(VISION),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=124,
        vision_end_token_id=125,
        **options,
    )
    torch.manual_seed(0)
    model = T.Qwen3VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model


def renamed(rows, tensors, back=False):
    """Tensors by the other side's names; the rows of this family only rename."""
    names = {}
    for their, our, _ in rows:
        for layer in range(TEXT["num_hidden_layers"]):
            pair = [name.replace("{i}", str(layer)) for name in (their, our)]
            names[pair[back]] = pair[not back]
    return {names[name]: value for name, value in tensors.items()}


def ours(model):
    """This package's model with the weights of transformers' `model`."""
    config = QWEN3_VL.config_from_hf(json.loads(model.config.to_json_string()))
    made = VLM(config).eval()
    tensors = dict(model.state_dict())
    if config.tie_embeddings:
        del tensors["lm_head.weight"]
    made.load_state_dict(renamed(QWEN3_VL.rows_of(config), tensors))
    return made


def batch(*rows, seed=0):
    """Keywords of both models for rows of parts: a number of text tokens, or (id, grid in patches) of an image or a
    frame. Padding is on the left of the shorter rows."""
    draw = torch.Generator().manual_seed(seed)
    lines, grids = [], []
    for parts in rows:
        line = []
        for part in parts:
            if isinstance(part, int):
                line += torch.randint(3, 120, (part,), generator=draw).tolist()
            else:
                place, (time, high, wide) = part
                line += [place] * (time * high * wide // 4)
                grids.append((place, [time, high, wide]))
        lines.append(line)
    size = max(map(len, lines))
    tokens = torch.tensor([[0] * (size - len(line)) + line for line in lines])
    mask = torch.tensor([[0] * (size - len(line)) + [1] * len(line) for line in lines])
    patches = [torch.randn(t * h * w, 96, generator=draw) for _, (t, h, w) in grids]
    return lines, tokens, mask, patches, grids


def their_inputs(tokens, mask, patches, grids):
    """transformers takes images and videos apart; grids of frames in a row are those of a video."""
    given = {"input_ids": tokens, "attention_mask": mask}
    given["mm_token_type_ids"] = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
    names = {
        IMAGE: ("pixel_values", "image_grid_thw"),
        VIDEO: ("pixel_values_videos", "video_grid_thw"),
    }
    for place, (pixels, grid) in names.items():
        own = [i for i, (p, _) in enumerate(grids) if p == place]
        if own:
            given[pixels] = torch.cat([patches[i] for i in own])
            given[grid] = torch.tensor([grids[i][1] for i in own])
    return given


def our_inputs(patches, grids):
    return {"patches": torch.cat(patches), "grids": torch.tensor([g for _, g in grids])}
