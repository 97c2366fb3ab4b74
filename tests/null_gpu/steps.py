"""Steps of models at their real sizes: of Forge, of transformers and of torchtitan, each a rank of torch's fake group.

Nothing here is drawn or saved: weights keep what their memory held.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.null_gpu.routes import find_routes, force

ROOT = Path(__file__).parents[2]


class Absent(RuntimeError):
    """A framework that is not here; the message says what is missing."""


class Case(NamedTuple):
    """A step of rank `rank` of `ranks`, in sequences of `seq_len` tokens with so many documents each.

    config: a recipe of Forge. routes: of MoE layers, by name (tests/null_gpu/routes.py). images: in each sequence. make:
    the step of this case; `peer` names the framework of another one.
    """

    config: str = ""
    ranks: int = 8
    rank: int = 0
    seq_len: int = 4096
    documents: int = 1
    images: int = 0
    routes: str = ""
    flags: Mapping[str, Any] = {}
    make: Callable[[Any], Any] = lambda case: forge_step(case)
    peer: str = ""


class Step(NamedTuple):
    """A sharded model, one step of it, and the FLOPs of its matmuls by its parameters."""

    model: Any
    run: Callable[[], None]
    flops: int


def forge_step(case: Case) -> Step:
    """The step of the runner: `Compute`, norm, clipping, the optimizer and the hooks of experts."""
    import torch

    from forge_core import build_optimizer
    from forge_moe import MoEHooks
    from forge_parallel import clip_grads_, global_grad_norm, make_meshes
    from forge_resilience import Agreement
    from forge_train import load_job
    from forge_train.build.build import build_trained
    from forge_train.loop.assemble import job_compute, shard

    flags = {
        "train.steps": 2, "train.tokens": None, "schedule.warmup_steps": 1, "train.global_batch": case.ranks,
        "data.seq_len": case.seq_len, "parallel.device": "cuda", "parallel.precision": "bf16", "parallel.dp_shard": case.ranks,
        "parallel.gpus_per_node": case.ranks, **case.flags,
    }  # fmt: skip
    config = load_job(str(ROOT / case.config), flags, with_data=False).config
    routes, moe = None, getattr(config.model, "moe", None)
    if moe is not None and moe.num_experts:
        routes = find_routes(case.routes, case.ranks, case.seq_len, moe.top_k, moe.num_experts)
        force(routes, case.rank)
    meshes = make_meshes(config.parallel)
    model = shard(build_trained(config), config, meshes, Agreement())
    optimizer = build_optimizer(model, config.optimizer)
    compute = job_compute(model, config, meshes)
    hooks = MoEHooks(model, stage_group=meshes.stage.group, device=meshes.device)
    kept = torch.zeros((), device=meshes.device)  # no step is skipped
    batch = batch_of(case, config)

    def run() -> None:
        if hooks.routes:
            hooks.set_tokens(case.ranks * case.seq_len)
        sums = compute.gradients(batch, lambda: 1.0)
        norm, _ = global_grad_norm(compute.counted, sums=sums)
        clip_grads_(compute.counted, norm, 1.0)
        optimizer.step()
        hooks.end_step(0, 2, kept)
        optimizer.zero_grad()

    tokens, rows = case.seq_len // config.parallel.cp, 0
    if routes is not None:
        local = config.parallel.ep == 1
        rows = case.seq_len * moe.top_k if local else routes.rows(case.rank)
    return Step(model, run, flops_of_matrices(model, tokens, rows, case.images))


def batch_of(case: Case, config: Any) -> Any:
    """One sequence of documents of equal length, with images spread over it."""
    import torch

    from forge_data import Batch, Ragged

    positions = torch.arange(case.seq_len).expand(1, -1)
    length = case.seq_len // case.documents
    tokens, extras = torch.zeros_like(positions), {}
    if case.images:
        side = config.model.vision.transformers["image_size"]
        number = (side // config.model.vision.transformers["patch_size"]) ** 2 // 4  # pixel shuffle
        each = case.seq_len // case.images
        inside = positions % each
        tokens = torch.where(
            (inside > 0) & (inside <= number), config.model.modalities["image"].first_id, tokens
        )
        pixels = torch.zeros(case.images, 3, side, side, dtype=torch.uint8)
        extras = {"images": Ragged(pixels, torch.tensor([0, case.images]))}
    return Batch(
        tokens,
        tokens,
        (positions % length).contiguous(),
        (positions // length).contiguous(),
        torch.zeros(1, dtype=torch.int64),
        "0" * 16,
        extras=extras,
    )


def flops_of_matrices(model: Any, tokens: int, rows: int = 0, images: int = 0) -> int:
    """6 FLOPs for each weight of a matrix and each of the rank's tokens that it meets: forward, and both gradients.

    rows: those that the experts of a MoE layer compute. The embedding is looked up; tied, it is the head, too. Of an
    encoder the blocks count, with the tokens of its images, and the adapter with a quarter of them.
    """
    total = 0
    vision, adapter = (getattr(model, name, None) for name in ("vision", "adapter"))
    for name, parameter in model.named_parameters():
        if name.startswith(("vision.", "adapter.")) or parameter.ndim < 2:
            continue
        if parameter.ndim == 3:  # experts, of which a row meets one
            total += parameter.numel() // parameter.shape[0] * rows
        elif "embed" not in name or is_tied(model):
            total += parameter.numel() * tokens
    if vision is not None:
        patches = images * (vision.image_size // vision.patch_size) ** 2
        blocks = [p for block in vision.blocks() for p in block.parameters() if p.ndim > 1]
        total += sum(p.numel() for p in blocks) * patches
        total += sum(p.numel() for p in adapter.parameters() if p.ndim > 1) * patches // 4
    return 6 * total


def is_tied(model: Any) -> bool:
    """Whether the embedding is the head: no other parameter has as many rows."""
    sizes = [p.shape[0] for p in model.parameters() if p.ndim == 2]
    return sizes.count(max(sizes)) == 1


def transformers_step(case: Case, kind: str, **sizes: int) -> Step:
    """A causal language model of transformers with its own loss; FSDP2 by hand: embedding, blocks, norm and head.

    Its experts run on one process, and no size is read from the device: routes change no count.
    """
    import torch
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {"experts_implementation": "grouped_mm"} if kind == "Mixtral" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=128256, max_position_embeddings=8192, use_cache=False, tie_word_embeddings=False, **sizes
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", **options
        ).train()
    wrapped: Any = {
        "mesh": init_device_mesh("cuda", (case.ranks,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for module in (model.model.embed_tokens, *model.model.layers):
        fully_shard(module, **wrapped)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **wrapped)
    fully_shard(model, **wrapped)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, case.seq_len, dtype=torch.int64, device="cuda")

    def run() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    rows = case.seq_len * sizes.get("num_experts_per_tok", 0)
    return Step(model, run, flops_of_matrices(model, case.seq_len, rows))


def torchtitan_step(case: Case) -> Step:
    """Llama 3 8B of torchtitan in its own layout, with varlen attention and the loss over all logits.

    Raises Absent where its sources are not given, or a package that they import is not installed.
    """
    import torch
    import torch.nn.functional as F

    try:
        from torchtitan.config import ParallelismConfig, TrainingConfig
        from torchtitan.distributed import ParallelDims, fsdp
        from torchtitan.models.common.attention import VarlenMetadata
        from torchtitan.models.llama3 import model_registry
        from torchtitan.tools import utils
    except ImportError as error:
        missing = (
            f"its sources import {error.name}, which is not installed"
            if "torchtitan" in sys.modules
            else str(error)
        )
        raise Absent(missing) from error

    utils.get_cuda_flash_attention_impl = lambda: None  # FlashAttention 3 is not part of torch
    with torch.device("meta"):
        model = model_registry("8B", attn_backend="varlen").model.build().train()
    dims = ParallelDims.from_config(
        ParallelismConfig(data_parallel_shard_degree=case.ranks), case.ranks
    )
    training = TrainingConfig()
    fsdp.apply_fsdp_to_decoder(
        model,
        dims.get_mesh("fsdp"),
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        pp_enabled=False,
    )
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(case.seq_len, dtype=torch.int64, device="cuda")
    positions = torch.arange(case.seq_len, device="cuda")
    ends = torch.tensor([0, case.seq_len], dtype=torch.int32, device="cuda")

    def run() -> None:
        masks = VarlenMetadata(ends, ends, case.seq_len, case.seq_len)
        logits = model(tokens, positions=positions, attention_masks=masks)
        F.cross_entropy(logits.float(), tokens, reduction="sum").backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Step(model, run, flops_of_matrices(model, case.seq_len))
