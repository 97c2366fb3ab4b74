"""Built-in parts are what the protocols ask for: nothing runs here, mypy checks the assignments.

An attribute of a module that may be absent is looked up by name at run time; here mypy compares its signature.
"""

# ruff: noqa: F841
from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from forge_ckpt import RNGState
from forge_ckpt import protocols as ckpt
from forge_ckpt.stage_state import NamedState, StageState
from forge_core import Attention, FeedForward, Transformer
from forge_core import protocols as core
from forge_core.model import Block, TokenContext
from forge_core.optim import AdamW, ScheduleFreeAdamW
from forge_data import (
    Batch,
    BuiltinCorpus,
    ByteTokenizer,
    JsonTokenizer,
    Loader,
    PackedStream,
    TokenFiles,
)
from forge_data import protocols as data
from forge_moe import LocalDispatch, MoE, RoutingRule
from forge_moe import protocols as moe
from forge_moe.dispatch import AllToAllDispatch, HierarchicalDispatch
from forge_parallel import protocols as parallel
from forge_resilience import NumericsPolicy
from forge_resilience.console import ConsoleSink
from forge_resilience.progress import Progress
from forge_resilience.sinks import JsonlSink, MlflowSink, TensorBoardSink, WandbSink
from forge_train import JobConfig
from forge_train import protocols as train
from forge_train.build.objective import find_loss
from forge_vlm import VLM


def of_core(
    attention: Attention,
    feed_forward: FeedForward,
    block: Block,
    model: Transformer,
    adamw: AdamW,
    schedule_free: ScheduleFreeAdamW,
) -> None:
    optimizers: list[core.NamedStateOptimizer] = [adamw, schedule_free]
    averaging: core.AveragingOptimizer = schedule_free


def of_moe(
    local: LocalDispatch,
    remote: tuple[AllToAllDispatch, HierarchicalDispatch],
    rule: RoutingRule,
    context: TokenContext,
    layer: MoE,
) -> None:
    dispatcher: moe.Dispatcher = local
    overlapping: tuple[moe.OverlappingDispatcher, moe.OverlappingDispatcher] = remote
    score: moe.Score = rule.score
    tokens: moe.TokenContext = context
    cache: moe.CachingContext = context


def of_modules(
    init: core.ModuleInit,
    cost: core.ModuleCost,
    sharding: core.ModuleSharding,
    inputs: core.ModuleInputs,
    forward: core.ModuleForward,
    parts: tuple[Attention, FeedForward, Block, MoE],
    model: VLM,
) -> None:
    """All members are optional, so each is compared by itself: a variable has the type of its first value."""
    attention, feed_forward, block, layer = parts
    table = init.init_table
    table, table, table = attention.init_table, feed_forward.init_table, model.init_table
    kinds: Callable[[], Mapping[str, str]] = layer.router.parameter_kinds
    scales = init.lr_scales
    scales = model.lr_scales
    flops = cost.flops_per_token
    flops, flops, flops = attention.flops_per_token, block.flops_per_token, layer.flops_per_token
    flops, flops = model.flops_per_token, model.spared_flops_per_token
    before, traced = cost.first_flops_per_token, cost.plan_forward
    before, traced = model.first_flops_per_token, model.plan_forward

    roles = sharding.parallel_roles
    roles, roles, roles = attention.parallel_roles, block.parallel_roles, layer.parallel_roles
    blocks, units, pipeline = sharding.blocks, sharding.sharding_units, sharding.pipeline_parts
    blocks, units, pipeline = model.blocks, model.sharding_units, model.pipeline_parts
    names = inputs.host_inputs
    names, names, names = model.host_inputs, model.extra_inputs, model.mask_inputs
    prepare, cache, point = forward.prepare, forward.new_cache, forward.point
    prepare, cache, point = attention.prepare, model.new_cache, block.point
    prepare = block.prepare
    counters = forward.statistics
    counters = layer.statistics


def of_batches(batch: Batch) -> None:
    rows: parallel.BatchLike = batch


def of_data(
    sources: tuple[BuiltinCorpus, TokenFiles],
    stream: PackedStream,
    tokenizers: tuple[ByteTokenizer, JsonTokenizer],
) -> None:
    tokens: tuple[data.Source, data.Source] = sources
    rows: data.Stream = stream
    texts: tuple[data.Tokenizer, data.Tokenizer] = tokenizers


def of_states(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    adamw: AdamW,
    rng: RNGState,
) -> None:
    states: list[ckpt.Stateful] = [module, optimizer, loader, adamw]
    stages: list[ckpt.SelectsState] = [StageState(module, set()), NamedState(adamw, set(), set())]
    checked: list[ckpt.ChecksState] = [
        NamedState(adamw, set(), set()),
        Progress(NumericsPolicy()),
        loader,
        rng,
    ]
    filled: list[ckpt.FillsState] = [StageState(module, set()), NamedState(adamw, set(), set())]
    replaced: ckpt.ReplacesState = rng
    selected: ckpt.SelectsState = rng


def of_schedules(schedule: Callable[[int], float]) -> None:
    factor: core.ScheduleLike = schedule


def of_the_runner(
    sinks: tuple[JsonlSink, TensorBoardSink, ConsoleSink, WandbSink, MlflowSink],
    model: Transformer,
    config: JobConfig,
) -> None:
    rows: list[train.Sink] = [*sinks]
    makes_rows: train.SinkBuilder = TensorBoardSink
    loss: train.TokenLoss = find_loss(config)
    generating: train.Generates = model
