"""The recipe of Qwen3-VL: every command of its page runs on a tiny random folder, and prompts of a folder are transformers'."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.vlm.qwen3_vl_folder import IDS, save, write_talks

from forge_lab.text import load_with_images, stream_text
from forge_testing.processes import forge_train
from forge_train import load_job
from forge_vlm.answers import answer_all

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/vision-recipes.md"
JOB = "apps/train/configs/qwen3_vl.toml"
SHORT = ["--data.seq_len", "512"]
FEW = [*SHORT, "--schedule.warmup_steps", "0", "--train.global_batch", "2"]
#: Commands that the text of the page names, next to those of its blocks.
MORE = """\
forge-train generate Qwen3-VL-2B-Instruct --image receipts/0.png --prompt color? --temperature 0 --max_new_tokens 4
forge-train generate runs/qwen3_vl --prompts receipts/questions.jsonl --temperature 0 --max_new_tokens 4
forge-train plan apps/train/configs/qwen3_vl.toml --gpus 8 --data.seq_len 512
forge-vlm prepare apps/train/configs/qwen3_vl.toml --output receipts/prepared
"""
CAPS = (65536, 70000)


def blocks(language: str) -> list[str]:
    section = PAGE.read_text().partition("\n## LLaVA")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all commands of the page have run."""
    folder = tmp_path_factory.mktemp("recipe")
    save(folder / "Qwen3-VL-2B-Instruct", patch=16)
    write_talks(folder / "receipts/questions.jsonl", 3, answer=False, caps=CAPS)
    (folder / JOB).parent.mkdir(parents=True)
    shutil.copy(ROOT / JOB, folder / JOB)
    return folder


@pytest.mark.slow
def test_every_command_of_the_page_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)  # for the lines of Python
    peft = pytest.importorskip("peft")
    (code,) = blocks("python")
    exec(code.replace("mkdir()", "mkdir(exist_ok=True)"), {})
    shown = "".join(blocks("console")).replace("$ ", "")
    make, *commands = ("".join(blocks("bash")) + shown + MORE).splitlines()
    assert make == "python -m examples.tiny_models qwen3_vl Qwen3-VL-2B-Instruct"
    assert len(commands) == 9
    for command in commands:
        program, *words = shlex.split(command)
        if program == "forge-vlm":
            command = [sys.executable, "-m", "forge_vlm", *words]
            subprocess.run(command, cwd=place, check=True, timeout=120)
            continue
        assert program == "forge-train"
        done = forge_train(*words, cwd=place)
        assert done.code == (78 if words[0] == "plan" else 0), done.err
        if words[0] == "plan":
            assert "vision.transformers.model_type 'qwen3_vl_vision'" in done.err
    model, folder = transformers.Qwen3VLForConditionalGeneration, "runs/qwen3_vl_adapter"
    merged = model.from_pretrained("runs/qwen3_vl_merged")
    tuned = peft.PeftModel.from_pretrained(model.from_pretrained("Qwen3-VL-2B-Instruct"), folder)
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        one, other = (m.eval().float()(tokens).logits for m in (merged, tuned))
    assert (one - other).abs().max() < 2e-2 * other.abs().max()  # merged in 16 bits
    settings = json.loads((place / "runs/qwen3_vl_adapter/adapter_config.json").read_text())
    assert settings["r"] == 16
    assert {"model.visual.blocks.0.attn.qkv", "model.language_model.layers.2.mlp.up_proj"} <= set(
        settings["target_modules"]
    )
    again = forge_train("run", JOB, *FEW, "--train.steps", "3", cwd=place)
    assert again.code == 0, again.err
    assert "resume" in (place / "runs/qwen3_vl/events.jsonl").read_text()


@pytest.mark.slow
def test_a_job_without_a_model_has_that_of_the_import_it_begins_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the import is gone; one that says something else of its model has its own."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "Qwen3-VL-2B-Instruct", patch=16)
    write_talks(tmp_path / "receipts/talks.jsonl", caps=CAPS)
    done = forge_train("import", "Qwen3-VL-2B-Instruct", "--run.dir", "runs/qwen3_vl_base")
    assert done.code == 0, done.err
    keys = {"data.seq_len": 512}
    job = load_job(ROOT / JOB, keys)
    assert job.config.model.name == "vlm"
    assert job.origin("model.dim") == "import runs/qwen3_vl_base/model.toml"
    other = load_job(ROOT / JOB, {**keys, "model.dim": 64, "model.vocab_size": 300})
    assert other.config.model.name == "transformer"
    first = forge_train("run", ROOT / JOB, *FEW, "--train.steps", "1")
    assert first.code == 0, first.err
    shutil.rmtree("runs/qwen3_vl_base")
    assert load_job(ROOT / JOB, keys).config.model == job.config.model


@pytest.mark.slow
def test_a_folder_of_qwen3_vl_answers_as_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens of its template, pixels of its processor with the bounds of a part, and its greedy answers."""
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil

    folder, path = tmp_path / "hf", tmp_path / "asks/talks.jsonl"
    save(folder)
    write_talks(path, 6, answer=False)
    table = json.loads((folder / "preprocessor_config.json").read_text())
    table |= {"min_pixels": None, "max_pixels": None}  # as some versions of transformers write it
    (folder / "preprocessor_config.json").write_text(json.dumps(table))
    theirs = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, prompts = load_with_images(folder)
    wanted = []
    for line, asked in zip(path.read_text().splitlines(), prompts.read(path), strict=True):
        messages = json.loads(line)["messages"]
        parts = [p for p in messages[0]["content"] if p["type"] == "image"]
        pixels, grids = [], []
        for part in parts:
            bounds = {
                "shortest_edge": part.get("min_pixels", 64),
                "longest_edge": part.get("max_pixels", 1024),
            }
            processor = pil.Qwen2VLImageProcessorPil(**{**table, "size": bounds})
            found = processor(Image.open(path.parent / part["image"]), return_tensors="pt")
            pixels.append(found["pixel_values"])
            grids.append(found["image_grid_thw"])
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        mark = "<|image_pad|>"
        runs = [mark * (int(grid.prod()) // 4) for grid in grids]
        first, *rest = text.split(mark)
        text = first + "".join(run + part for run, part in zip(runs, rest, strict=True))
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert asked.tokens.tolist() == ids[0].tolist()
        media = prompts.media([asked])
        assert torch.equal(media["grids"], torch.cat(grids))
        assert torch.allclose(media["patches"] / 127.5 - 1, torch.cat(pixels), atol=1e-6)
        new = theirs.generate(
            input_ids=ids,
            pixel_values=torch.cat(pixels),
            image_grid_thw=torch.cat(grids),
            mm_token_type_ids=(ids == IDS["<|image_pad|>"]).int(),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=IDS["<|im_end|>"],
        )
        wanted.append(prompts.text(new[0, ids.size(1) :].tolist()))
    assert [*answer_all(model, prompts, prompts.read(path), 8, rows=4)] == wanted
    stream_text(folder, prompts=path, batch_size=3, max_new_tokens=8, temperature=0)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == wanted
