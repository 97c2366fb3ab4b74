"""Conversations with pictures as rows of tokens, labels and pixels."""

from forge_vlm.data.drawn import DrawnSquares
from forge_vlm.data.files import InvalidSample
from forge_vlm.data.formats import FORMATS, open_records
from forge_vlm.data.prepared import Prepared, is_prepared
from forge_vlm.data.prompts import Prompt, Prompts
from forge_vlm.data.records import Caps, Message, Picture, Record
from forge_vlm.data.sample import Sample, check_labels, sample_of
from forge_vlm.data.source import Conversations, open_source, options_of
from forge_vlm.data.templates import TEMPLATES, Piece

__all__ = [
    "FORMATS",
    "TEMPLATES",
    "Caps",
    "Conversations",
    "DrawnSquares",
    "InvalidSample",
    "Message",
    "Picture",
    "Piece",
    "Prepared",
    "Prompt",
    "Prompts",
    "Record",
    "Sample",
    "check_labels",
    "is_prepared",
    "open_records",
    "open_source",
    "options_of",
    "sample_of",
]
