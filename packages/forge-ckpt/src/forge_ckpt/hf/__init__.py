"""Reversible maps between Hugging Face tensor names and Forge's; folders of safetensors in and out."""

from forge_ckpt.hf.folder import HFFolder
from forge_ckpt.hf.headers import read_json
from forge_ckpt.hf.load import HFTensors, fill_tensor, load_hf
from forge_ckpt.hf.rows import Op, Row, check_rows, hf_name
from forge_ckpt.hf.save import save_hf
from forge_ckpt.hf.store import store_hf
from forge_ckpt.hf.stream import to_forge, to_hf

__all__ = [
    "HFFolder",
    "HFTensors",
    "Op",
    "Row",
    "check_rows",
    "fill_tensor",
    "hf_name",
    "load_hf",
    "read_json",
    "save_hf",
    "store_hf",
    "to_forge",
    "to_hf",
]
