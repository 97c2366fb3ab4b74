"""Training steps of whole models: Forge's runner next to transformers and plain torch written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.rows import Row
from benchmarks.rows.runner import MAX_NORM, Job, adamw, forge, job, train_by_hand
from torch import Tensor, nn


def hidden_dim(case: Job) -> int:
    """Width inside the feed-forward of Forge's model."""
    return case.model.get("hidden_dim") or -(-8 * case.model["dim"] // (3 * 64)) * 64


def train_transformers(
    case: Job, kind: str, liger: bool = False, **options: Any
) -> Callable[[], object]:
    """A step as a user of transformers writes it: labels in, its own loss, autocast, fused AdamW.

    It sees no document boundaries, which is less work than Forge's side has.
    """
    import transformers
    from benchmarks.rows.data import with_documents

    transformers.logging.set_verbosity_error()
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=case.model["vocab_size"],
        hidden_size=case.model["dim"],
        num_hidden_layers=case.model["num_layers"],
        num_attention_heads=case.model["num_heads"],
        num_key_value_heads=case.model["num_heads"],
        head_dim=case.model["dim"] // case.model["num_heads"],
        max_position_embeddings=case.seq_len,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
        **options,
    )
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(config)
    model = model.to(case.setting.device).train()
    if kind == "Qwen3Moe":
        model.set_experts_implementation("grouped_mm")
    parameters, optimizer, forward = list(model.parameters()), adamw(model), case.compiled(model)
    batches = with_documents(case.tokens, case.seq_len, case.batch)

    def step() -> None:
        tokens, labels = (t.to(case.setting.device, non_blocking=True) for t in next(batches)[:2])
        with case.autocast():
            loss = forward(input_ids=tokens, labels=labels, shift_labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def llama(case: Job) -> Callable[[], object]:
    return train_transformers(case, "Llama", intermediate_size=hidden_dim(case))


def liger(case: Job) -> Callable[[], object]:
    """transformers with Liger's Triton kernels, which need a GPU."""
    if case.setting.device.type != "cuda":
        raise ImportError("liger-kernel needs a GPU")
    return train_transformers(case, "Llama", liger=True, intermediate_size=hidden_dim(case))


def qwen3_moe(case: Job) -> Callable[[], object]:
    experts = case.model["moe"]
    return train_transformers(
        case,
        "Qwen3Moe",
        intermediate_size=hidden_dim(case),
        moe_intermediate_size=hidden_dim(case),
        num_experts=experts["num_experts"],
        num_experts_per_tok=experts["top_k"],
        norm_topk_prob=True,
        decoder_sparse_step=1,
    )


class Block(nn.Module):
    """One layer of a Llama in plain torch: (B, S, D) -> the same."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | list[list[int]]
    ) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = qkv.unbind(2)  # (B, H, S, d)
        q, k = (t * cos + torch.cat([-t[..., t.size(-1) // 2 :], t[..., : t.size(-1) // 2]], -1) * sin for t in (q, k))  # fmt: skip
        q, k = q.to(v.dtype), k.to(v.dtype)
        x = x + self.out(attend(q, k, v, mask).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | list[list[int]]) -> Tensor:
    """Attention inside documents: by a mask (B, 1, S, S), or one call for each document of known length."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    rows = []
    for i, lengths in enumerate(mask):
        parts = zip(*(t[i : i + 1].split(lengths, 2) for t in (q, k, v)))
        rows.append(
            torch.cat([F.scaled_dot_product_attention(*p, is_causal=True) for p in parts], 2)
        )
    return torch.cat(rows)


class Llama(nn.Module):
    """Tokens, positions and document ids (B, S) -> logits (B, S, V)."""

    def __init__(self, case: Job) -> None:
        super().__init__()
        dim, vocab = case.model["dim"], case.model["vocab_size"]
        self.embedding, self.norm = nn.Embedding(vocab, dim), nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab, bias=False)
        heads, layers = case.model["num_heads"], case.model["num_layers"]
        self.blocks = nn.ModuleList(Block(dim, heads, hidden_dim(case)) for _ in range(layers))
        rates = 10_000.0 ** -(torch.arange(0, dim // heads, 2) / (dim // heads))
        angles = torch.arange(case.seq_len)[:, None] * rates.repeat(2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.masks = case.compile or case.setting.device.type == "cuda"  # a graph has fixed lengths

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        mask: Any
        if self.masks:
            same = documents[:, :, None] == documents[:, None, :]
            mask = same.tril()[:, None].to(tokens.device)
        else:
            mask = [row.bincount().tolist() for row in documents]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # (B, 1, S, d)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return self.head(self.norm(x))


def plain_torch(case: Job) -> Callable[[], object]:
    torch.manual_seed(0)
    model = Llama(case).to(case.setting.device)
    if case.compile:
        for block in model.blocks:
            block.compile()
    return train_by_hand(case, model, model)


_DENSE = (
    "dim 256, 8 layers, V 32,000, 4 rows of 512 (h100: dim 2,048, 16 layers, 8 rows of 2,048); Forge: the runner's whole "
    "step; transformers: LlamaForCausalLM, SDPA, autocast, fused AdamW, no documents; torch: documents, one normalizer, "
    "autocast, clip_grad_norm_, fused AdamW; compiled: blocks (Forge, torch), the model (transformers)"
)
ROWS = [
    *(
        Row(
            f"dense-{precision}-{'compiled' if compiled else 'eager'}", job,
            {"forge": forge, "transformers": llama, "torch": plain_torch, "liger": liger}, _DENSE,
            {"model": "22.8M", "precision": precision, "compile": compiled}, warmup=3,
        )
        for precision in ("fp32", "bf16") for compiled in (False, True)
    ),
    Row("moe-model-e64-bf16", job, {"forge": forge, "transformers": qwen3_moe},
        "dim 256, 4 layers, 64 experts of 128, top 4, V 8,192, 4 rows of 512; Forge: the runner's whole step; transformers: "
        "Qwen3MoeForCausalLM, grouped_mm experts, autocast, fused AdamW, no documents",
        {"model": "moe", "precision": "bf16"}, warmup=3),
]  # fmt: skip
