"""Directories of another format are refused, with the call that reads them."""

from pathlib import Path

from forge_ckpt._shared.problems import invalid

_FORMATS = (  # (pattern of a file, the format, the call that reads it)
    (
        ".metadata",
        "a checkpoint of torch.distributed.checkpoint",
        "forge-ckpt convert PATH OUT",
    ),
    (
        "*.safetensors",
        "weights as Hugging Face writes them",
        "forge_ckpt.load_hf(path, rows)",
    ),
    ("manifest.json", "one checkpoint", "Store on the directory above it, or ForgeReader"),
)


def refuse_foreign(path: Path) -> None:
    """Raise ValueError if ``path`` is a checkpoint itself instead of a directory of checkpoints."""
    for pattern, content, call in _FORMATS:
        found = next(path.glob(pattern), None)
        if found is not None:
            rule = f"holds {content} ({found.name}), and must be a directory of step-00000100, ..."
            fix = f"read it with {call}, and save into another directory"
            raise invalid("path", "foreign", str(path), rule, fix)
