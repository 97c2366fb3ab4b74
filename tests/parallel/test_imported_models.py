"""Models of somebody else, which say what they can do, end in each layout where one process does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import Transformer, TransformerConfig
from forge_data import Ragged, SourceConfig
from forge_moe import MoE, MoEConfig
from forge_testing.parts import Pictured
from forge_testing.runs import (
    Fitted,
    assert_close,
    assert_same_rows,
    columns,
    fit_alone,
    fit_on_ranks,
    make_job,
)
from forge_train import Trainer, load_job, load_trained
from forge_train.errors import ConfigError

pytestmark = pytest.mark.distributed
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
    "pp2-cp2-interleaved": (4, {"pp": 2, "cp": 2, "pp_schedule": "interleaved_1f1b"}),
}
KINDS = ("stirred", "foreign", "tied")


def keys(kind: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    flat = {f"parallel.{key}": value for key, value in (layout or {}).items()}
    return {**COMMON, "model.name": f"{__name__}:{kind}", **flat}


def together(fitted: list[Fitted]) -> dict[str, Tensor]:
    """Tensors of all ranks by name; where several have one, the same bits."""
    found: dict[str, Tensor] = {}
    for rank in fitted:
        assert rank.problems == ()
        for name, value in rank.weights.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, list], Fitted]]:
    found = {}
    for kind in KINDS:
        job = make_job(tmp_path_factory.mktemp(kind))
        fitted = fit_alone(job, **keys(kind))
        found[kind] = columns(job), fitted
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [*(("stirred", layout) for layout in LAYOUTS), ("foreign", "cp2"), ("foreign", "pp2"), ("tied", "pp2")],
)  # fmt: skip
def test_a_layout_ends_where_one_process_does(
    tmp_path: Path, alone: dict[str, Any], kind: str, layout: str
) -> None:
    world, options = LAYOUTS[layout]
    job = make_job(tmp_path)
    assert_close(together(fit_on_ranks(world, job, **keys(kind, options))), alone[kind][1].weights)
    assert_same_rows(columns(job), alone[kind][0])


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("pp2-dp2", "cp2"), ("cp2", "pp2")])
def test_saved_in_one_layout_goes_on_in_another(
    tmp_path: Path, alone: dict[str, Any], first: str, then: str
) -> None:
    job = make_job(tmp_path)
    keep = {"checkpoint.keep_last": 9}
    world, options = LAYOUTS[first]
    together(fit_on_ranks(world, job, **keep, **keys("stirred", options)))
    for step in ("step-00000012", "step-00000009"):  # go back to step 6
        (tmp_path / "run/checkpoints" / step).rename(tmp_path / step)
    world, options = LAYOUTS[then]
    weights = together(fit_on_ranks(world, job, **keys("stirred", options)))
    assert_close(weights, alone["stirred"][1].weights)
    assert_same_rows(columns(job), alone["stirred"][0])
    model, _, step = load_trained(tmp_path / "run")
    assert step == 12
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def pictured(vocab_size: int) -> nn.Module:
    return Pictured(sizes(vocab_size))


class Pictures:
    """Rows of two documents and of i % 4 patches each."""

    vocab_size, max_token_id, tokenizer = 64, 63, None

    def __init__(self, config: SourceConfig) -> None:
        self.offset = 0 if config.split == "train" else 1000

    def fingerprint(self) -> dict[str, str | int]:
        return {"pictures": self.offset}

    def stream(self, seq_len: int, seed: int) -> Pictures:
        return self

    def __len__(self) -> int:
        return 100

    def arrays(self, ids: np.ndarray) -> dict[str, Any]:
        random = [np.random.default_rng(self.offset + int(i)) for i in ids]
        line = np.array([r.integers(0, 64, S + 1) for r in random]).reshape(len(ids), S + 1)
        second = np.arange(S) >= np.array([5 + i % 7 for i in ids]).reshape(-1, 1)
        counts = np.array([i % 4 for i in ids], np.int64)
        patches = [r.standard_normal((n, 4)).astype(np.float32) for r, n in zip(random, counts)]
        values = np.concatenate([np.zeros((0, 4), np.float32), *patches])
        offsets = torch.from_numpy(np.cumsum([0, *counts]))
        return {
            "tokens": line[:, :-1].copy(),
            "labels": line[:, 1:].copy(),
            "positions": np.broadcast_to(np.arange(S), (len(ids), S)).copy(),
            "document_ids": second.astype(np.int64),
            "patches": Ragged(torch.from_numpy(values), offsets),
        }


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", "pp2", "pp2-cp2-interleaved"])
def test_what_a_source_gives_besides_tokens_reaches_the_model(tmp_path: Path, layout: str) -> None:
    source = {"data.sources.text.name": f"{__name__}:Pictures", "model.vocab_size": 64,
              "train.steps": 4, "eval.sequences": 12}  # fmt: skip
    one, many = make_job(tmp_path / "one"), make_job(tmp_path / "many")
    wanted = fit_alone(one, **keys("pictured"), **source).weights
    assert wanted["patch.weight.exp_avg"].abs().max() > 0
    world, options = LAYOUTS[layout]
    assert_close(together(fit_on_ranks(world, many, **keys("pictured", options), **source)), wanted)
    assert_same_rows(columns(many), columns(one))


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


@pytest.mark.slow
def test_experts_of_an_imported_model_are_shared_over_ep(tmp_path: Path) -> None:
    job, many = make_job(tmp_path / "one"), make_job(tmp_path / "many")
    wanted = fit_alone(job, **keys("roomy")).weights
    fitted = fit_on_ranks(2, many, **keys("roomy", {"ep": 2}))
    assert_close(together(fitted), wanted)
    assert_same_rows(columns(many), columns(job))


def llama(vocab_size: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=vocab_size, intermediate_size=16, **small)
    )


@pytest.mark.parametrize(
    ("name", "layout", "wanted"),
    [
        ("forge_testing.models:bigram", {"pp": 2}, "Bigram must offer pipeline_parts()"),
        ("forge_testing.models:bigram", {"cp": 2}, "Bigram has no module with an attribute attend"),
        ("llama", {"pp": 2}, "LlamaForCausalLM must offer pipeline_parts()"),
        ("llama", {"cp": 2}, "LlamaForCausalLM has no module with an attribute attend"),
        ("widthless", {"pp": 2}, "Widthless must say the width of its stream"),
        ("stirred", {"pp": 2, "pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": 3},
         "num_layers 4 must be at least one for each of the 6 stages"),
        pytest.param("tied", {"pp": 2, "pp_schedule": "zbv_zero_bubble"}, "embedding is tied", id="tied-zbv"),
        ("crowded", {"cp": 2}, "layers.0.feed_forward.capacity_factor 1.0 decides over the tokens"),
        ("forge_testing.models:bigram", {"tp": 2}, "parallel_roles"),
        ("forge_testing.models:bigram", {"ep": 2}, "ep 2 must divide num_experts 0"),
    ],
)  # fmt: skip
def test_what_a_model_lacks_is_told_before_a_process_group_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layout: dict[str, Any], wanted: str
) -> None:
    for key, value in WORLD.items():
        monkeypatch.setenv(key, value)
    path = name if ":" in name else f"{__name__}:{name}"
    flat = {**keys("none", layout), "model.name": path, "train.micro_batch": 1}
    with pytest.raises(ConfigError) as told:
        Trainer(load_job(make_job(tmp_path), flat))
    assert any(wanted in problem for problem in told.value.problems), told.value.problems
