"""Conversations with images as rows of tokens, labels and pixels. Needs the extra `data`."""

try:
    import numpy as _numpy  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("numpy: pip install 'forge-vlm[data]'", name="numpy") from error

from forge_vlm._renamed import renamed
from forge_vlm.data.drawn import DrawnSquares
from forge_vlm.data.files import InvalidSample
from forge_vlm.data.formats import FORMATS, open_records
from forge_vlm.data.prepared import Prepared, is_prepared
from forge_vlm.data.prompts import Prompt, Prompts
from forge_vlm.data.records import Caps, EncodedImage, Message, Record
from forge_vlm.data.sample import Sample, check_labels, sample_of
from forge_vlm.data.source import VisionChatSource, open_source, options_of
from forge_vlm.data.templates import TEMPLATES, ChatSegment

__all__ = [
    "FORMATS",
    "TEMPLATES",
    "Caps",
    "ChatSegment",
    "DrawnSquares",
    "EncodedImage",
    "InvalidSample",
    "Message",
    "Prepared",
    "Prompt",
    "Prompts",
    "Record",
    "Sample",
    "VisionChatSource",
    "check_labels",
    "is_prepared",
    "open_records",
    "open_source",
    "options_of",
    "sample_of",
]

__getattr__ = renamed(__name__)
