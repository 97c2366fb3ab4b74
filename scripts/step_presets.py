"""Step presets once at full size without a GPU: `python scripts/step_presets.py [PRESET.toml ...]`.

Each is built on fake tensors for one rank of a fake process group of its own size, goes through the same
`parallelize` as a run, and does a forward, a backward, the gradient norm and an update. One JSON line each;
non-zero exit if one failed. Not done: compilation, and routes between experts' ranks are taken to be even,
because their numbers are data. Several seconds a preset.

VisibleImages to fail: a norm that returns another shape.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core import build_optimizer, cross_entropy
from forge_moe import recompute_contexts
from forge_moe.dispatch import AllToAllDispatch, Splits
from forge_parallel import clip_grads_, global_grad_norm, make_meshes, parallelize
from forge_parallel.axes import vocab_cross_entropy
from forge_parallel.pipeline import Pipeline, sync_tied_gradients
from forge_train import load_job
from forge_train.build.build import build_model, freeze_groups
from forge_train.loop.assemble import shard_experts
from forge_vlm import model as places

PRESETS = Path(__file__).parents[1] / "configs" / "presets"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="*", type=Path, help="default: all of configs/presets")
    parser.add_argument("--last", action="store_true", help="the last pipeline rank, not the first")
    given = parser.parse_args()
    failed = 0
    for path in given.presets or sorted(PRESETS.glob("*.toml")):
        row = step(path, last=given.last)
        failed += not row["ok"]
        print(json.dumps(row), flush=True)
    return int(failed > 0)


def step(path: Path, *, last: bool = False) -> dict[str, Any]:
    """One step of one rank of a preset whose name ends in `_<N>gpu`; what it held and how long it took."""
    world = gpus_of(path)
    started = time.perf_counter()
    row: dict[str, Any] = {"preset": path.stem, "world_size": world}
    try:
        row |= _step(load_job(path, with_data=False).config, world, world - 1 if last else 0)
        row["ok"] = True
    except Exception as error:
        row |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
        traceback.print_exc(limit=-12)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return {**row, "seconds": round(time.perf_counter() - started, 1)}


def gpus_of(path: Path) -> int:
    """`7b_32gpu.toml` -> 32."""
    found = re.search(r"_(\d+)gpu", path.stem)
    assert found is not None, f"{path}: name it <model>_<N>gpu.toml"
    return int(found[1])


def _step(config: Any, world: int, rank: int) -> dict[str, Any]:
    # private, torch 2.0 to 2.15
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    AllToAllDispatch.start_splits = _even  # type: ignore[assignment, method-assign]
    AllToAllDispatch.splits = lambda _, even: even  # type: ignore[assignment, method-assign]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    parallel = replace(config.parallel, device="cpu", compile=False, memory_budget=None)
    meshes = make_meshes(parallel)  # outside of the fake mode: meshes hold real numbers
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = build_model(config.model, config.run.seed)
    freeze_groups(model, config)
    with fake:
        _without_values(model)
        shard_experts(model, SimpleNamespace(model=config.model, parallel=parallel), meshes)  # type: ignore[arg-type]
    model = parallelize(
        model, parallel, meshes, seq_len=config.data.seq_len, recompute_contexts=recompute_contexts
    )
    with fake:
        loss = _forward_backward(model, config, parallel, meshes)
        optimizer = build_optimizer(model, config.optimizer)
        parameters = list(model.parameters())
        norm, _ = global_grad_norm(parameters)
        clip_grads_(parameters, norm, config.train.max_grad_norm)
        optimizer.step()
        missing = [n for n, p in model.named_parameters()
                   if p.grad is None and p.requires_grad]  # fmt: skip
    assert loss.shape == ()
    assert not missing, f"no gradient: {missing[:3]}"
    held = sum(_local(p).numel() for p in parameters)
    return {"rank": rank, "parameters": held}


def _forward_backward(model: nn.Module, config: Any, parallel: Any, meshes: Any) -> Tensor:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if meshes.tp.size > 1:
            return vocab_cross_entropy(logits, labels, meshes.tp).sum
        return cross_entropy(logits, labels).sum

    rows = config.train.global_batch // meshes.batch_size
    micro = config.train.micro_batch or rows
    count = min(rows // micro, 2 * parallel.pp) if parallel.pp > 1 else 1
    shape = (micro * count, config.data.seq_len // parallel.cp)
    tokens, labels, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    if parallel.pp == 1:
        total = loss(model(tokens, positions=positions, **_images(model, len(tokens))), labels)
        total.backward()
        return total
    pipeline = Pipeline(model, parallel, meshes, num_micro_batches=count, micro_batch=micro,
                        seq_len=config.data.seq_len, dim=config.model.dim)  # fmt: skip
    _skip_vote(pipeline)
    total = pipeline.step(tokens, labels, loss, positions=positions)
    sync_tied_gradients(model, meshes)
    return total


def _images(model: Any, rows: int) -> dict[str, Any]:
    """As many images as the model counts in so many rows; whether tokens have places for them is a value."""
    if getattr(model, "vision", None) is None:
        return {}
    places.check_placeholders = lambda here, num_features: None  # type: ignore[attr-defined]
    config = model.config
    found: dict[str, Any] = model.vision.media_of(
        rows * config.images_per_row, config.pixels_per_image, "cpu"
    )
    return found


def _skip_vote(pipeline: Any) -> None:
    """Torch's stages vote by values whether shapes are static (2.13); here they are."""
    from torch.distributed.pipelining import stage as stages

    def static(held: Any, *_: Any) -> None:
        for stage in held:
            stage._inference_mode = stages.InferenceMode.STATIC

    if hasattr(stages, "InferenceMode"):
        pipeline._schedule._warmup_p2p = static


def _without_values(model: nn.Module) -> None:
    """Fake parameters and buffers on the CPU in place of those on the meta device."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                empty = torch.empty(p.shape, dtype=p.dtype)
                module._parameters[name] = nn.Parameter(empty, p.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _even(dispatch: AllToAllDispatch, ids: Any) -> list[Splits]:
    """As many rows to and from each rank, one slot in each."""
    found = []
    for part in ids:
        rows = part.numel() // dispatch.ranks
        tokens_with_slot = [rows * dispatch.ranks] + [0] * (part.size(1) - 1)
        found.append(Splits([rows] * dispatch.ranks, [rows] * dispatch.ranks, tokens_with_slot))
    return found


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


if __name__ == "__main__":
    sys.exit(main())
