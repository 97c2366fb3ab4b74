"""Verified, atomic checkpoints behind torch.distributed.checkpoint."""

from forge_ckpt.errors import CheckpointMismatch, CorruptCheckpoint, StepExists, StoreInUse
from forge_ckpt.hf.load import load_hf
from forge_ckpt.read.load import load_step
from forge_ckpt.read.planner import ForgeLoadPlanner
from forge_ckpt.read.reader import ForgeReader
from forge_ckpt.read.tensors import SavedTensors, read_tensors
from forge_ckpt.retention import Keep
from forge_ckpt.rng import RNGState
from forge_ckpt.store import Store
from forge_ckpt.weights import WeightsReport, load_weights, match_weights
from forge_ckpt.write.background import SaveEvent
from forge_ckpt.write.planner import ForgeSavePlanner
from forge_ckpt.write.writer import ForgeWriter

__all__ = [
    "CheckpointMismatch",
    "CorruptCheckpoint",
    "ForgeLoadPlanner",
    "ForgeReader",
    "ForgeSavePlanner",
    "ForgeWriter",
    "Keep",
    "RNGState",
    "SaveEvent",
    "SavedTensors",
    "StepExists",
    "Store",
    "StoreInUse",
    "WeightsReport",
    "load_hf",
    "load_step",
    "load_weights",
    "match_weights",
    "read_tensors",
]
