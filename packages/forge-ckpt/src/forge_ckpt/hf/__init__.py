"""Reversible maps between Hugging Face tensor names and Forge's; folders of safetensors in and out."""

from forge_ckpt._shared.hf_save import merged_config
from forge_ckpt._shared.hf_tensors import HFTensors, read_processor
from forge_ckpt._shared.name_maps import to_forge, to_hf
from forge_ckpt._shared.name_rows import Op, Row, check_rows, hf_name
from forge_ckpt._shared.safetensors_folder import HFFolder
from forge_ckpt._shared.safetensors_headers import read_json
from forge_ckpt.hf.adapters import MergedTensors, peft_files
from forge_ckpt.hf.compare import BOUND, compare_logits, why_not_compared
from forge_ckpt.hf.families import HFFamily, find_family, fitting_family, hf_families
from forge_ckpt.hf.load import fill_part, fill_tensor, load_hf, store_hf
from forge_ckpt.hf.model import HFModel, notes_of, read_files, tensors_beside
from forge_ckpt.hf.save import save_hf

__all__ = [
    "BOUND",
    "HFFamily",
    "HFFolder",
    "HFModel",
    "HFTensors",
    "MergedTensors",
    "Op",
    "Row",
    "check_rows",
    "compare_logits",
    "fill_part",
    "fill_tensor",
    "find_family",
    "fitting_family",
    "hf_families",
    "hf_name",
    "load_hf",
    "merged_config",
    "notes_of",
    "peft_files",
    "read_files",
    "read_json",
    "read_processor",
    "save_hf",
    "store_hf",
    "tensors_beside",
    "to_forge",
    "to_hf",
    "why_not_compared",
]
