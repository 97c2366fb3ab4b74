"""Directories that hold weights of another format: named with the call that reads them."""

from pathlib import Path

_HOLDS = (
    (
        ".metadata",
        "a checkpoint of torch.distributed.checkpoint",
        "torch.distributed.checkpoint.load(state, checkpoint_id=path)",
    ),
    (
        "*.safetensors",
        "weights as Hugging Face writes them",
        "forge_ckpt.hf.to_forge(rows, safetensors.torch.load_file(file).items())",
    ),
    ("manifest.json", "one checkpoint", "Store on the directory above it, or ForgeReader"),
)


def refuse_foreign(path: Path) -> None:
    """Raise ValueError where ``path`` holds a checkpoint, and no checkpoints in directories of their own."""
    for pattern, what, call in _HOLDS:
        found = next(path.glob(pattern), None)
        if found is not None:
            raise ValueError(
                f"{path} holds {what} ({found.name}), and must be a directory of step-00000100, ...; "
                f"read it with {call}, and save into another directory"
            )
