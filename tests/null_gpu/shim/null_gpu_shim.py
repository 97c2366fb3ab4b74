"""What a process on the null GPU changes in torch: five things that depend on numbers, which no kernel computes.

torch calls `start` at the end of its import, as it does for every package with an entry point in the group
`torch.backends`: nothing has to be imported by hand, and no sitecustomize of the environment is in the way.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def start() -> None:
    import torch

    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(variable, "").lower().replace(" ", ""):
            # torch would call a function of NVML that is not there
            raise RuntimeError(f"{variable} has expandable_segments:True, which asks NVML about the device; the null GPU has no NVML: unset it")  # fmt: skip
    # cuDNN plans attention and convolutions with the device at hand; torch's own kernels need no plan.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.distributed.is_available():
        import null_gpu_objects

        null_gpu_objects.install()
        torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p = _refuse_symmetric_memory
        # DDP compares shapes that it gathers on the device.
        torch.distributed._verify_params_across_processes = lambda *given: None
        _AfterImport("torch.distributed.pipelining.schedules", _vote_alone)
    if folder := os.environ.get("NULL_GPU_WAITS"):
        import null_gpu_waits

        null_gpu_waits.record(folder)


def _refuse_symmetric_memory(*_: Any, **__: Any) -> None:
    """In place of a call of functions that are not there, which ends the process."""
    raise RuntimeError("symmetric memory lies on GPUs that read one another; the null GPU has none: leave it out (in Forge: parallel.async_tp = false)")  # fmt: skip


def _vote_alone(schedules: ModuleType) -> None:
    """Pipelines: ranks multiply their votes on whether shapes are known, on the device. Each follows its own vote here.

    Votes agree where all stages were given shapes, or none. torch 2.11 has no vote.
    """
    if not hasattr(schedules, "InferenceMode"):
        return
    mode = schedules.InferenceMode
    for schedule in vars(schedules).values():
        if isinstance(schedule, type) and "_warmup_p2p" in vars(schedule):
            _set_modes_after(schedule, mode)


def _set_modes_after(schedule: Any, mode: Any) -> None:
    warm_up = schedule._warmup_p2p

    def warm_up_and_vote(self: Any, stages: list[Any], has_backward: bool, *rest: Any) -> None:
        warm_up(self, stages, has_backward, *rest)
        for stage in stages:
            if stage._inference_mode is not None:
                dynamic = mode.needs_dynamic(stage._user_meta, has_backward)
                stage._inference_mode = mode.DYNAMIC if dynamic else mode.STATIC

    schedule._warmup_p2p = warm_up_and_vote


class _AfterImport(importlib.abc.MetaPathFinder):
    """Call `then(module)` once the module of that name has been imported, by whomever."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
