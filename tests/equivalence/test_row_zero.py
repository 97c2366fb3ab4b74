"""Row zero: training in Forge equals training outside it.

The reference is `transformers`' model with torch's own optimizer, clipping and cross-entropy; nothing
of Forge is in it. Same weights (through the reversible maps), same batches, 20 steps in fp32. Every
loss, every gradient norm and all final weights agree: max|a - b| / max|b| <= 1e-5.

eps is 1e-4: with 1e-8 AdamW turns the rounding noise of a gradient near zero into a full step, and no
two correct programs agree. For the same reason Muon's iterations are in fp32 here on both sides (rounded
to bf16 they are compared with torch.optim.Muon on equal gradients, in forge_core's tests), and Lion may
differ where a sign is that of rounding: in one weight of ten thousand, by the size of its updates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizers import PlainMuon, Several
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from forge_ckpt.hf import to_forge, to_hf
from forge_core import OptimizerConfig, Transformer, build_optimizer, cross_entropy
from forge_core.families import LLAMA, QWEN3, Family
from forge_core.optim import MuonConfig
from forge_parallel import ParallelConfig, clip_grad_norm_, parallelize
from forge_testing.decay import groups_by_decay
from forge_testing.runs import assert_trained_alike, random_batches, relative_error

pytestmark = pytest.mark.lane("test")

BOUND = 1e-5
STEPS, BATCH, SEQ, VOCAB = 20, 4, 24, 96
LION_LR = 1e-4
LR, BETAS, EPS, DECAY, MAX_NORM = 1e-3, (0.9, 0.95), 1e-4, 0.1, 1.0
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
CASES: dict[str, tuple[Family, type, dict[str, Any]]] = {
    "llama": (LLAMA, LlamaConfig, {}),
    "llama_tied": (LLAMA, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen3": (QWEN3, Qwen3Config, {"head_dim": 16}),
}


@dataclass
class Run:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


batches = partial(random_batches, 7, STEPS, (BATCH, SEQ), VOCAB)


def reference_model(case: str) -> Any:
    _, config_class, options = CASES[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**SHAPE, **options)).train()
    with torch.no_grad():
        for parameter in model.parameters():  # norms off one, weights large enough to be clipped
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def reference_optimizer(name: str, model: Any) -> Any:
    if name == "muon":
        hidden = [p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2]
        taken = set(map(id, hidden))
        rest = adamw((n, p) for n, p in model.named_parameters() if id(p) not in taken)
        return Several(PlainMuon(hidden, lr=LR, weight_decay=DECAY), rest)
    if name == "lion":
        lion = pytest.importorskip("lion_pytorch")
        return lion.Lion(
            groups_by_decay(model.named_parameters(), DECAY), lr=LION_LR, betas=(0.9, 0.99)
        )
    return adamw(model.named_parameters())


def adamw(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_by_decay(named, DECAY), lr=LR, betas=BETAS, eps=EPS)


def train_reference(model: Any, name: str = "adamw") -> Run:
    parameters = list(model.parameters())
    optimizer = reference_optimizer(name, model)
    losses, norms = [], []
    for tokens, labels in batches():
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, norms, dict(named_weights(model)))


CONFIGS = {
    "adamw": OptimizerConfig(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY),
    "muon": OptimizerConfig(
        "muon", lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, muon=MuonConfig(ns_dtype="fp32")
    ),
    "lion": OptimizerConfig("lion", lr=LION_LR, weight_decay=DECAY),
}


def train_forge(model: Transformer, family: Family, name: str = "adamw") -> Run:
    parallelize(model, ParallelConfig(device="cpu", precision="fp32"))
    config = CONFIGS[name]
    optimizer = build_optimizer(model, config)
    losses, norms = [], []
    for tokens, labels in batches():
        loss = cross_entropy(model(tokens), labels).mean
        loss.backward()
        norms.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    ours = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    return Run(losses, norms, dict(to_hf(family.rows, ours)))


def named_weights(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


def both(case: str, name: str) -> tuple[Run, Run, dict[str, Tensor]]:
    """The reference's run and Forge's, from the same weights, and these."""
    family = CASES[case][0]
    reference = reference_model(case)
    model = Transformer(family.config_from_hf(reference.config.to_dict()))
    model.load_state_dict(dict(to_forge(family.rows, named_weights(reference))))
    start = dict(named_weights(reference))
    return train_reference(reference, name), train_forge(model, family, name), start


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("case", "name"), [*((case, "adamw") for case in CASES), ("llama_tied", "muon")]
)
def test_twenty_steps_equal_transformers(case: str, name: str) -> None:
    wanted, got, start = both(case, name)

    assert max(wanted.norms) > MAX_NORM  # clipping is part of what is compared
    assert_trained_alike(got, wanted, start, BOUND)


def test_twenty_steps_of_lion_equal_transformers_but_for_signs_of_rounding() -> None:
    wanted, got, start = both("llama", "lion")
    assert got.losses == pytest.approx(wanted.losses, rel=BOUND)
    assert got.norms == pytest.approx(wanted.norms, rel=BOUND)
    off = {n: (got.weights[n] - w).abs() for n, w in wanted.weights.items()}
    assert max(float(o.max()) for o in off.values()) <= 2 * LION_LR * STEPS * 1.01
    other = sum(int((o > 1e-6).sum()) for o in off.values())
    assert other <= 1e-4 * sum(o.numel() for o in off.values())
    assert min(relative_error(start[n], w) for n, w in wanted.weights.items()) > 100 * BOUND
