"""Built-in parts are what the protocols ask for: nothing runs here, mypy checks the assignments.

An attribute of a module that may be absent is looked up by name at run time; here mypy compares its signature.
"""

# ruff: noqa: F841
from __future__ import annotations

from collections.abc import Callable

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
from forge_data import (
    protocols as data,
)
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


def of_core(
    attention: Attention,
    feed_forward: FeedForward,
    block: Block,
    model: Transformer,
    adamw: AdamW,
    schedule_free: ScheduleFreeAdamW,
) -> None:
    inits: list[core.DeclaresInit] = [attention, feed_forward]
    roles: list[core.DeclaresRoles] = [attention, feed_forward, block, model]
    flops: list[core.CountsFlops] = [attention, feed_forward, block, model]
    prepared: list[core.PreparesContext] = [attention, block]
    optimizers: list[core.NamedStateOptimizer] = [adamw, schedule_free]
    averaging: core.AveragingOptimizer = schedule_free
    scaled: core.ScalesRates = model


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
    flops: core.CountsFlops = layer
    roles: core.DeclaresRoles = layer


def of_models_for_parallel(model: Transformer, attention: Attention) -> None:
    blocks: parallel.DeclaresBlocks = model
    parts: parallel.DeclaresPipelineParts = model
    roles: parallel.DeclaresRoles = model
    host: parallel.ReadsOnHost = model
    flops: parallel.CountsFlops = model


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
