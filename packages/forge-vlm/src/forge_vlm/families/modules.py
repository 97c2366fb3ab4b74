"""Names of modules in models of transformers, which files of some families have otherwise."""

from __future__ import annotations

from forge_vlm._shared.problems import invalid

__all__ = ["MODULES", "module_name"]

#: Prefixes in files, and what they are in the model; of other families it was not looked at.
MODULES: dict[str, dict[str, str]] = {
    "llava": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    "qwen3_vl": {},
}


def module_name(family: str, tensor: str) -> str:
    """What the model of a family in `MODULES` calls a tensor that its files call `tensor`.

    Usage: `module_name("llava", "vision_tower.post_layernorm.bias")`, "model.vision_tower.post_layernorm.bias".
    ValueError for another family.
    """
    if family not in MODULES:
        rule = f"must be one of {', '.join(MODULES)}, whose modules peft is known to find"
        raise invalid("", "adapter", family, rule, "export the merged model")
    for prefix, there in MODULES[family].items():
        if tensor.startswith(prefix):
            return there + tensor.removeprefix(prefix)
    return tensor
