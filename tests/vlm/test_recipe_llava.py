"""The recipe of LLaVA-1.5: every command of its page runs, on a tiny Vicuna and a tiny CLIP."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_testing.processes import forge_train
from forge_testing.runs import saved_tensors
from forge_train import read_run

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
Image = pytest.importorskip("PIL.Image")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/vision-recipes.md"
RECIPES = ("configs/recipes/llava_7b_stage_1.toml", "configs/recipes/llava_7b.toml")
#: In place of configs/models/llava_7b.toml.
TINY = """
[model]
name = "vlm"
vocab_size = 320
dim = 32
num_layers = 2
num_heads = 2
hidden_dim = 48
max_seq_len = 512
[model.modalities.image]
first_id = IMAGE
[model.vision]
name = "transformers"
select_layer = [-2]
select_feature = "patch"
[model.vision.transformers]
model_type = "clip_vision_model"
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
image_size = 28
patch_size = 14
"""
FEW = ["--train.steps", "3", "--train.global_batch", "4", "--schedule.warmup_steps", "0",
       "--data.seq_len", "384", "--parallel.device", "cpu", "--parallel.precision", "fp32",
       "--checkpoint.every_steps", "2"]  # fmt: skip


def blocks(language: str) -> list[str]:
    section = PAGE.read_text().partition("\n## LLaVA")[2]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def write_vicuna(folder: Path) -> None:
    """A tiny Llama with a tokenizer of bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    plain.add_special_tokens(["<unk>", "<s>", "</s>"])
    own = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **own)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 512},
        **{"bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5},
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def write_clip(folder: Path) -> None:
    keys = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    keys |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**keys))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.save_pretrained(folder)


def write_talks(folder: Path) -> None:
    """Conversations as LLaVA writes them, a third without a picture."""
    talks = []
    for i in range(24):
        Image.new("RGB", (20 + i, 28), (10 * i, 0, 0)).save(folder / f"{i}.png")
        asked = {"from": "human", "value": "<image>\nWhat is this?" if i % 3 else "Hello?"}
        talk: dict[str, Any] = {"id": str(i)} | ({"image": f"{i}.png"} if i % 3 else {})
        talks.append(talk | {"conversations": [asked, {"from": "gpt", "value": "red " * (i % 4)}]})
    for name in ("blip_laion_cc_sbu_558k", "llava_v1_5_mix665k"):
        kept = [t for t in talks if "image" in t or name.startswith("llava")]
        (folder / f"{name}.json").write_text(json.dumps(kept))
    shutil.copy(folder / "1.png", folder / "cat.png")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that a user brings, and configurations of tiny models."""
    folder = tmp_path_factory.mktemp("recipe")
    transformers.utils.logging.disable_progress_bar()
    for part in ("data", "configs/recipes", "configs/models"):
        (folder / part).mkdir(parents=True)
    for recipe in RECIPES:
        text = (ROOT / recipe).read_text()
        text = text.replace("tokens_per_tile = 576", "tokens_per_tile = 4")
        text = text.replace("size = 336", "size = 28").replace("group = 128", "group = 4")
        (folder / recipe).write_text(text)
    write_vicuna(folder / "data/vicuna-7b-v1.5")
    write_clip(folder / "data/clip-vit-large-patch14-336")
    write_talks(folder / "data")
    return folder


@pytest.mark.slow
def test_F130_every_command_of_the_page_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    (code,) = blocks("python")
    exec(code, {})
    image = transformers.AutoTokenizer.from_pretrained("data/vicuna-image")("<image>").input_ids[-1]
    (place / "configs/models/llava_7b.toml").write_text(TINY.replace("IMAGE", str(image)))
    assert image == 3 + 256, "the first id behind those of Vicuna, as the page says"
    shown = re.findall(r"^\$ (.*)$", "".join(blocks("console")), re.MULTILINE)
    commands = [*"".join(blocks("bash")).splitlines(), *shown]
    assert len(commands) == 6
    for command in commands:
        program, *words = shlex.split(command.partition(" | ")[0])
        assert program == "forge-train"
        tiny = {"run": FEW, "plan": ["--data.seq_len", "384"]}
        done = forge_train(*words, *tiny.get(words[0], []), cwd=place)
        assert done.code == 0, (command, done.err)
        if words[0] == "run" and "--init.encoder" in words:
            assert "encoder of data/clip-vit-large-patch14-336: " in done.out
        if words[0] == "export":
            assert re.search("tokens, .*image.*, fp32", done.out)
    stages = [saved_tensors(place / "runs" / name) for name in ("llava_7b_stage_1", "llava_7b")]
    base = saved_tensors(place / "runs/vicuna")
    clip = transformers.CLIPVisionModel.from_pretrained("data/clip-vit-large-patch14-336")
    for state in stages:
        for name, tensor in clip.state_dict().items():
            assert torch.equal(state[f"model.vision.model.{name}"], tensor), name
    text = [name for name in base if name.startswith("model.")]
    assert all(torch.equal(stages[0][name], base[name]) for name in text)
    moved = {name for name in text if not torch.equal(stages[1][name], base[name])}
    assert {"model.layers.0.mixer.q_proj.weight", "model.lm_head.weight"} <= moved
    assert not torch.equal(*(s["model.adapter.linear_1.weight"] for s in stages))
    assert read_run(place / "runs/llava_7b").metrics["loss"][-1] is not None
    _, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        "out/llava_7b", output_loading_info=True
    )
    assert not any(info.values()), info
    assert (place / "out/llava_7b/tokenizer.json").is_file()
