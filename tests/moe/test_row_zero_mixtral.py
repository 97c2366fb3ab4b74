"""Row zero for experts: training Mixtral in Forge equals training it outside.

The reference is `transformers`' MixtralForCausalLM with torch's own optimizer, clipping and
cross-entropy; nothing of Forge is in it. Same weights (through the reversible maps), same batches, 20
steps in fp32. Every loss, every gradient norm and all final weights agree: max|a - b| / max|b| <= 1e-5.

eps is 1e-4: with 1e-8 AdamW turns the rounding noise of a gradient near zero into a full step. For the
same reason the reference's routes keep a margin: the seed is one with which, in all steps and layers,
the logits of the second and the third expert of each token are over 1e-3 apart, and that is asserted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import forge_core
from forge_ckpt.hf import to_forge, to_hf
from forge_core.families import LLAMA
from forge_moe import MoE
from forge_moe.families import MIXTRAL
from forge_parallel import ParallelConfig, clip_grad_norm_, parallelize
from forge_testing.decay import groups_by_decay
from forge_testing.runs import assert_trained_alike, random_batches

pytestmark = pytest.mark.lane("test")

BOUND, MARGIN = 1e-5, 1e-3
STEPS, BATCH, SEQ, VOCAB, SEED = 20, 4, 16, 96, 8
LR, BETAS, EPS, DECAY, MAX_NORM = 1e-3, (0.9, 0.95), 1e-4, 0.1, 1.0
SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"num_local_experts": 4, "num_experts_per_tok": 2},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


batches = partial(random_batches, SEED, STEPS, (BATCH, SEQ), VOCAB)


def reference_model() -> Any:
    torch.manual_seed(SEED)
    model = MixtralForCausalLM(MixtralConfig(**SHAPE)).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # norms off one, weights large enough to be clipped, routers that differ between tokens
            scale = 0.5 if ".gate." in name else 0.1
            parameter.add_(torch.randn_like(parameter) * scale)
    return model


def in_file(model: Any, folder: Path) -> dict[str, Tensor]:
    """The weights under the names of a checkpoint file, experts apart."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def train_reference(model: Any, folder: Path) -> Run:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        groups_by_decay(model.named_parameters(), DECAY),
        lr=LR,
        betas=BETAS,
        eps=EPS,
    )
    run = Run()
    for tokens, labels in batches():
        out = model(input_ids=tokens, use_cache=False, output_router_logits=True)
        for logits in out.router_logits:
            best = logits.detach().sort(dim=-1, descending=True).values
            run.margins.append(float((best[:, 1] - best[:, 2]).min()))
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)))
        run.losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    run.weights = in_file(model, folder)
    return run


def train_forge(model: forge_core.Transformer, rows: Any) -> Run:
    parallelize(model, ParallelConfig(device="cpu", precision="fp32"))
    config = forge_core.OptimizerConfig(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    optimizer = forge_core.build_optimizer(model, config)
    run = Run()
    for tokens, labels in batches():
        loss = forge_core.cross_entropy(model(tokens), labels).mean
        loss.backward()
        run.norms.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
        run.losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    ours = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    run.weights = dict(to_hf(rows, ours))
    return run


EXPERT_KEYS = (
    "num_local_experts",
    "num_experts_per_tok",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
)


def forge_model(reference: Any, start: dict[str, Tensor]) -> tuple[forge_core.Transformer, Any]:
    """Attention and norms are Llama's, the feed-forwards are the experts'."""
    hf = reference.config.to_dict()
    moe = MIXTRAL.config_from_hf(hf)
    dense = {key: value for key, value in hf.items() if key not in EXPERT_KEYS}
    config: forge_core.TransformerConfig = LLAMA.config_from_hf({**dense, "model_type": "llama"})
    model = forge_core.Transformer(config, feed_forward=lambda _: MoE(moe))
    rows = LLAMA.rows + MIXTRAL.rows_of(moe)
    model.load_state_dict(dict(to_forge(rows, start.items())))
    return model, rows


def test_twenty_steps_equal_transformers(tmp_path: Path) -> None:
    reference = reference_model()
    start = in_file(reference, tmp_path / "start")
    model, rows = forge_model(reference, start)

    wanted = train_reference(reference, tmp_path / "end")
    assert min(wanted.margins) > MARGIN, min(wanted.margins)
    got = train_forge(model, rows)

    assert max(wanted.norms) > MAX_NORM  # clipping is part of what is compared
    assert_trained_alike(got, wanted, start, BOUND)
