"""Vision-language models: decoders whose tokens may be those of images."""

from forge_vlm.adapters import AdapterConfig
from forge_vlm.config import FusionConfig, VLMConfig
from forge_vlm.fusion import CrossAttentionConfig
from forge_vlm.modalities import ModalityConfig
from forge_vlm.model import VLM
from forge_vlm.processor import Processor
from forge_vlm.sequence.plan import Segment, SequencePlan
from forge_vlm.vision import VisionConfig
from forge_vlm.warm_start import warm_start

__all__ = [
    "VLM",
    "AdapterConfig",
    "CrossAttentionConfig",
    "FusionConfig",
    "ModalityConfig",
    "Processor",
    "Segment",
    "SequencePlan",
    "VLMConfig",
    "VisionConfig",
    "warm_start",
]
