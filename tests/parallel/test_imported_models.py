"""Models of somebody else, which say what they can do: saved and gone on with, and refused.

tests/equivalence trains them in layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import Transformer, TransformerConfig
from forge_moe import MoE, MoEConfig
from forge_testing import runs
from forge_testing.problems import rejects
from forge_train import Trainer, load_job, load_trained
from forge_train.errors import ConfigError

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]
S, D, WORLD = 32, 32, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1",
                       "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}  # fmt: skip


def sizes(vocab_size: int, **more: Any) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=vocab_size, dim=D, num_layers=4, num_heads=4, max_seq_len=S, **more
    )


class Stirred(Transformer):
    """Ours, with a module of its own behind the embedding, and a table at the root that names it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.stir: Any = nn.Linear(config.dim, config.dim)

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        x = tokens
        if self.stir is not None:
            x = self.embedding(tokens)
            x = x + self.stir(x).tanh()
        return super().forward(x, *args, **kwargs)

    def init_table(self, std: float, residual_std: float) -> dict[str, Any]:
        rows = {"stir.weight": ("normal", 0.2), "stir.bias": ("constant", 0.1)}
        return rows if hasattr(self, "stir") else {}  # our constructor asks, too

    def pipeline_parts(self) -> dict[str, Any]:
        parts = super().pipeline_parts()
        return {**parts, "first": (*parts["first"], "stir")}


def stirred(vocab_size: int) -> nn.Module:
    return Stirred(sizes(vocab_size))


def tied(vocab_size: int) -> nn.Module:
    return Stirred(sizes(vocab_size, tie_embeddings=True))


@dataclass(frozen=True)
class Context:
    document_ids: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """Causal inside of documents: (B, S, H, D)."""
    ids = ctx.document_ids.to(q.device)
    mask = (ids.unsqueeze(1) == ids.unsqueeze(2)).tril().unsqueeze(1)  # (B, 1, S, S)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


attend.is_causal = True  # type: ignore[attr-defined]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.attend = attend

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, D // 4)).unbind(2)
        return x + self.out(self.attend(q, k, v, ctx).flatten(2))


class Foreign(nn.Module):
    """Nothing of ours is in it; it says its parts and their width."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, D), nn.Embedding(S, D)
        self.tower = nn.ModuleDict({str(i): Layer() for i in range(4)})
        self.head = nn.Linear(D, vocab_size)

    def forward(self, tokens: Tensor, positions: Tensor, document_ids: Tensor) -> Tensor:
        x = tokens if self.words is None else self.words(tokens) + self.places(positions)
        for layer in self.tower.values():
            x = layer(x, Context(document_ids))
        return x if self.head is None else self.head(x)

    def pipeline_parts(self) -> dict[str, Any]:
        return {"first": ("words", "places"), "blocks": "tower", "last": ("head",), "dim": D}


def foreign(vocab_size: int) -> nn.Module:
    return Foreign(vocab_size)


COMMON = {"train.micro_batch": 3, "optimizer.lr": 1e-3, "sample.max_new_tokens": 0,
          "metrics.console": "off"}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2-dp2": (4, {"pp": 2, "recompute": "full"}),
}


def keys(kind: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    flat = {f"parallel.{key}": value for key, value in (layout or {}).items()}
    return {**COMMON, "model.name": f"{__name__}:{kind}", **flat}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list], runs.Fitted]:
    job = runs.make_job(tmp_path_factory.mktemp("stirred"))
    fitted = runs.fit_reference(job, **keys("stirred"))
    return runs.columns(job), fitted


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("pp2-dp2", "cp2"), ("cp2", "pp2")])
def test_saved_in_one_layout_goes_on_in_another(
    tmp_path: Path, alone: Any, first: str, then: str
) -> None:
    job = runs.make_job(tmp_path)
    keep = {"checkpoint.keep_last": 9}
    world, options = LAYOUTS[first]
    runs.together(runs.fit_on_ranks(world, job, **keep, **keys("stirred", options)))
    for step in ("step-00000012", "step-00000009"):  # go back to step 6
        (tmp_path / "run/checkpoints" / step).rename(tmp_path / step)
    world, options = LAYOUTS[then]
    weights = runs.together(runs.fit_on_ranks(world, job, **keys("stirred", options)))
    runs.assert_close(weights, alone[1].weights)
    runs.assert_same_rows(runs.columns(job), alone[0])
    model, _, step = load_trained(tmp_path / "run")
    assert step == 12
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


class Widthless(Foreign):
    def pipeline_parts(self) -> dict[str, Any]:
        return {key: value for key, value in super().pipeline_parts().items() if key != "dim"}


def widthless(vocab_size: int) -> nn.Module:
    return Widthless(vocab_size)


def crowded(vocab_size: int) -> nn.Module:
    moe = MoEConfig(dim=D, hidden_dim=16, num_experts=4, top_k=2, capacity_factor=1.0)
    return Transformer(sizes(vocab_size), feed_forward=lambda _: MoE(moe))


def roomy(vocab_size: int) -> nn.Module:
    """With a bias that the loop moves, and experts that ranks can share."""
    moe = MoEConfig(
        dim=D, hidden_dim=16, num_experts=4, top_k=2, bias_update_rate=1e-3, aux="attach"
    )
    return Transformer(sizes(vocab_size), feed_forward=lambda _: MoE(moe))


def llama(vocab_size: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=vocab_size, intermediate_size=16, **small)
    )


@pytest.mark.parametrize(
    ("name", "layout", "wanted"),
    [
        ("forge_testing.models:bigram", {"pp": 2}, ("pipeline_parts", ..., "missing")),
        ("forge_testing.models:bigram", {"cp": 2}, ("attend", ..., "missing")),
        ("llama", {"pp": 2}, ("pipeline_parts", ..., "missing")),
        ("llama", {"cp": 2}, ("attend", ..., "missing")),
        ("widthless", {"pp": 2}, ("dim", None, "type")),
        ("stirred", {"pp": 2, "pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": 3},
         ("num_layers", 4, "stages")),
        pytest.param("tied", {"pp": 2, "pp_schedule": "zbv_zero_bubble"},
                     ("parallel.pp_schedule", "zbv_zero_bubble", "tied"), id="tied-zbv"),
        ("crowded", {"cp": 2}, ("layers.0.feed_forward.capacity_factor", 1.0, "whole_batch")),
        ("forge_testing.models:bigram", {"tp": 2}, ("roles", ..., "missing")),
        ("forge_testing.models:bigram", {"ep": 2}, ("parallel.ep", 2, "divides")),
    ],
)  # fmt: skip
def test_missing_methods_of_a_model_are_reported_before_a_process_group_exists(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    layout: dict[str, Any],
    wanted: tuple[str, Any, str],
) -> None:
    for key, value in WORLD.items():
        monkeypatch.setenv(key, value)
    path = name if ":" in name else f"{__name__}:{name}"
    flat = {**keys("none", layout), "model.name": path, "train.micro_batch": 1}
    with rejects(*wanted, kind=ConfigError):
        Trainer(load_job(runs.make_job(tmp_path), flat))
