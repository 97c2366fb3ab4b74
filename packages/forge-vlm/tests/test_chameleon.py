"""Chameleon of transformers, from the same weights: text and discrete image tokens."""

from dataclasses import replace

import pytest
import torch

from forge_core import SamplingConfig, cross_entropy, generate
from forge_testing.problems import rejects
from forge_vlm import VLM, FusionConfig
from forge_vlm.families.chameleon import CHAMELEON

pytestmark = pytest.mark.lane("test")

transformers = pytest.importorskip("transformers")
PLACEHOLDER, FIRST, NUMBER = 95, 20, 16


def theirs_of(swin_norm):
    names = {"".join(chr(ord("A") + int(d)) for d in str(i)): i for i in range(NUMBER)}
    config = transformers.ChameleonConfig(
        **dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2),
        **dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64),
        **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, swin_norm=swin_norm),
        vq_config=dict(
            **dict(embed_dim=8, num_embeddings=NUMBER, latent_channels=8, resolution=16),
            **dict(base_channels=32, channel_multiplier=[1, 1, 2], num_res_blocks=1),
            attn_resolutions=None,
        ),
        vocabulary_map={
            "<image>": PLACEHOLDER,
            **{f"IMGIMG{name}Z": FIRST + i for name, i in names.items()},
        },
    )
    torch.manual_seed(0)
    model = transformers.ChameleonForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0.0, 0.1).add_(parameter.ndim == 1 and "vqmodel" not in name)
    return model


def ours_of(theirs):
    config = CHAMELEON.config_from_hf(theirs.config.to_dict())
    model = VLM(config).eval()
    weights, state = {}, theirs.state_dict()
    for hf, ours, _ in CHAMELEON.rows_of(config):
        for layer in range(config.num_layers if "{i}" in hf else 1):
            name = hf.replace("{i}", str(layer))
            if name in state:
                weights[ours.replace("{i}", str(layer))] = state[name]
    model.load_state_dict(weights)
    assert len(weights) == sum("vqmodel" not in name for name in state)
    return model


def rows(theirs, seed=0):
    """Rows with an image each by the tokeniser of transformers, and what it takes: placeholders and pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    with torch.no_grad():
        images = theirs.model.get_image_tokens(pixels)
    tokens = torch.randint(40, 90, (2, 24), generator=torch.Generator().manual_seed(9))
    given = tokens.clone()
    tokens[:, 3 : 3 + images.size(1)] = images
    given[:, 3 : 3 + images.size(1)] = PLACEHOLDER
    return tokens, given, pixels


def shown(logits):
    """Logits without those of image tokens, which transformers sets to the least number."""
    return torch.cat([logits[..., :FIRST], logits[..., FIRST + NUMBER :]], dim=-1)


@pytest.mark.parametrize("swin_norm", [False, True])
def test_logits_are_those_of_transformers(swin_norm):
    theirs = theirs_of(swin_norm)
    ours = ours_of(theirs)
    tokens, given, pixels = rows(theirs)
    with torch.no_grad():
        wanted = theirs(input_ids=given, pixel_values=pixels).logits
        found = ours(tokens)
        moved = ours(rows(theirs, seed=1)[0])
    assert (wanted[..., FIRST : FIRST + NUMBER] == torch.finfo(wanted.dtype).min).all()
    scale = shown(wanted).abs().max()
    assert (shown(found) - shown(wanted)).abs().max() / scale < 1e-5
    assert (shown(moved) - shown(found))[:, -1].abs().max() / scale > 1e-3


def test_twenty_steps_are_those_of_transformers():
    theirs = theirs_of(False)
    ours = ours_of(theirs)
    tokens, _, _ = rows(theirs)
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    labels[(labels >= FIRST) & (labels < FIRST + NUMBER)] = -100  # it cannot learn them
    losses = []
    for model in (theirs, ours):
        own = [p for n, p in model.named_parameters() if "vqmodel" not in n]
        optimizer = torch.optim.AdamW(own, lr=1e-3, eps=1e-4)
        losses.append([])
        for _ in range(20):
            optimizer.zero_grad()
            out = model(tokens)
            logits = getattr(out, "logits", out)
            hidden = torch.zeros(96, dtype=torch.bool)
            hidden[FIRST : FIRST + NUMBER] = True
            loss = cross_entropy(logits.masked_fill(hidden, -1e30), labels).mean
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    for one, other in zip(*losses):
        assert abs(one - other) <= 1e-5 * abs(one)
    state = theirs.state_dict()
    found, wanted = ours.lm_head.weight, state["lm_head.weight"]
    assert (found - wanted).abs().max() / wanted.abs().max() < 1e-5


def test_it_writes_image_tokens_where_transformers_cannot():
    theirs = theirs_of(False)
    ours = ours_of(theirs)
    with torch.no_grad():
        ours.lm_head.weight[FIRST : FIRST + NUMBER] *= 10
        theirs.lm_head.weight.copy_(ours.lm_head.weight)
    prompt = rows(theirs)[0][:, :12]
    new = generate(ours, prompt, 4, SamplingConfig(temperature=0.0))
    whole = prompt
    for step in range(4):
        with torch.no_grad():
            chosen = ours(whole)[:, -1].argmax(-1)
        assert torch.equal(chosen, new[:, step])
        whole = torch.cat([whole, chosen[:, None]], dim=1)
    images = (new >= FIRST) & (new < FIRST + NUMBER)
    assert images.any()
    with torch.no_grad():
        text = theirs(input_ids=whole).logits.argmax(-1)
    assert not ((text >= FIRST) & (text < FIRST + NUMBER)).any()


def test_settings_that_it_cannot_hold_are_rejected():
    hf = theirs_of(False).config.to_dict()
    with rejects("vocabulary_map", ..., where="chameleon"):
        CHAMELEON.config_from_hf({**hf, "vocabulary_map": {"IMGIMGAZ": 3, "IMGIMGBZ": 9}})
    ours = CHAMELEON.config_from_hf(hf)
    for change, key, value, code in (
        ({"mixer": "attention"}, "mixer", "attention", "family"),
        ({"fusion": FusionConfig("moma")}, "fusion.name", "moma", "family"),
        ({"block": "sandwich"}, "block", "sandwich", "unknown"),
    ):
        with rejects(key, value, code, where="chameleon"):
            CHAMELEON.config_to_hf(replace(ours, **change))


@pytest.mark.parametrize("swin_norm", [False, True])
def test_keys_go_back_as_they_came(swin_norm):
    hf = theirs_of(swin_norm).config.to_dict()
    ours = CHAMELEON.config_from_hf(hf)
    assert CHAMELEON.config_from_hf({**hf, **CHAMELEON.config_to_hf(ours)}) == ours
