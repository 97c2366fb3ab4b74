"""Pipeline parallelism: the depth of a model in stages, on `torch.distributed.pipelining`."""

from forge_parallel.config import keeps_gathered, num_stages, rank_of, splits_backward, stages_on
from forge_parallel.pipeline.pipeline import Pipeline
from forge_parallel.pipeline.split import (
    block_costs,
    split,
    stage_ranges,
    sync_tied_gradients,
    tied_copies,
)
from forge_parallel.rules import schedule_problems
from forge_parallel.structure import parts_of, stages_of, stream_dim

__all__ = [
    "Pipeline",
    "block_costs",
    "keeps_gathered",
    "num_stages",
    "parts_of",
    "rank_of",
    "schedule_problems",
    "split",
    "splits_backward",
    "stage_ranges",
    "stages_of",
    "stages_on",
    "stream_dim",
    "sync_tied_gradients",
    "tied_copies",
]
