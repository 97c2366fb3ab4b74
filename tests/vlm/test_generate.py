"""forge-train generate with pictures: of a run and of a folder of LLaVA, batched and uneven, as transformers goes on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vlm.test_exact_match import colours, keys
from tests.vlm.test_hugging_face import IMAGE, LLAVA, SIDE, save

from forge_core import SamplingConfig
from forge_data import SourceConfig
from forge_lab.prompts import folder_prompts
from forge_lab.text import load_with_images, stream_text
from forge_testing.problems import rejects
from forge_testing.runs import fit_alone
from forge_testing.vlm_jobs import write_vlm_job
from forge_train import ConfigError
from forge_train.build.evaluation import prompts_of
from forge_train.config.init import InitConfig
from forge_vlm import answers
from forge_vlm.answers import answer_all

pytestmark = pytest.mark.lane("test")

Image = pytest.importorskip("PIL.Image")
tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    settings = keys(folder) | {"train.steps": 6, "eval.every_steps": 0, "optimizer.lr": 2e-2}
    settings = {k: v for k, v in settings.items() if not k.startswith("eval.exact_match")}
    fit_alone(write_vlm_job(folder), **settings)
    return folder / "run"


def objects(text: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_file_of_conversations_is_answered_in_any_rows(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one and two pictures, with and without an answer; those of one row are those of five."""
    found = []
    for answer, rows in ((True, 1), (False, 5)):
        path = colours(tmp_path / "asks", 7, answer)
        assert stream_text(run, prompts=path, batch_size=rows, max_new_tokens=8, temperature=0) == 0
        found.append(objects(capsys.readouterr().out))
    assert found[0] == found[1]
    assert len(found[0]) == 7
    assert len({row["text"] for row in found[0]}) > 1  # the pictures are looked at


@pytest.mark.lane("quick")
def test_one_question_of_two_images(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = colours(tmp_path / "asks", 7, answer=False)
    stream_text(run, prompts=path, max_new_tokens=8, temperature=0)
    wanted = objects(capsys.readouterr().out)[2]["text"]
    both = (path.parent / "2-0.png", path.parent / "2-1.png")
    stream_text(run, prompt="which", image=both, max_new_tokens=8, temperature=0)
    assert capsys.readouterr().out == wanted + "\n"  # the template plain leaves the question out


def test_the_encoder_runs_once_for_the_images_of_a_batch(run: Path, tmp_path: Path) -> None:
    model, prompts = load_with_images(run)
    asked = prompts.read(colours(tmp_path / "asks", 7))
    seen: list[int] = []
    model.vision.register_forward_hook(lambda m, args, kw, out: seen.append(len(kw["images"])), with_kwargs=True)  # fmt: skip
    texts = [*answer_all(model, prompts, asked, 6, rows=4)]
    assert (len(texts), seen) == (7, [5, 4])


def folder_of(path: Path) -> Path:
    """A LLaVA with a tokenizer of letters and a processor."""
    text = {**LLAVA["text_config"], "max_position_embeddings": 256}
    save(path, {**LLAVA, "text_config": text})
    ids = {"</s>": 0, "<s>": 1, "<image>": IMAGE}
    ids |= {c: 3 + i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz :")}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(["</s>", "<s>", "<image>"])
    made.save(str(path / "tokenizer.json"))
    processor = {
        **{"image_mean": [0.4] * 3, "image_std": [0.3] * 3, "do_center_crop": True, "resample": 2},
        "crop_size": {"height": SIDE, "width": SIDE},
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


@pytest.mark.slow
def test_a_folder_of_llava_answers_as_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path / "hf")
    path = colours(tmp_path / "asks", 5, answer=False)
    stream_text(folder, prompts=path, batch_size=3, max_new_tokens=5, temperature=0)
    found = [row["text"] for row in objects(capsys.readouterr().out)]
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()
    _, prompts = load_with_images(folder)
    wanted = []
    for asked in prompts.read(path):
        pixels = (prompts.media([asked])["images"].float() / 255 - 0.4) / 0.3
        tokens = torch.from_numpy(asked.tokens)[None]
        new = theirs.generate(
            tokens, pixel_values=pixels, max_new_tokens=5, do_sample=False, eos_token_id=0
        )
        wanted.append(prompts.text(new[0, tokens.size(1) :].tolist()))
    assert found == wanted


@pytest.mark.parametrize(
    ("keywords", "key", "code"),
    [
        ({"prompt": "x", "prompts": "talks"}, "--prompt", "excludes"),
        ({"image": (Path("a.png"),), "prefill_chunk": 3}, "--prefill_chunk", "images"),
        ({"image": (Path("missing.png"),)}, "", "unreadable"),
        ({"image": (Path("missing.png"),), "batch_size": 0}, "--batch_size", "range"),
    ],
)
def test_unanswerable_questions_are_rejected(
    run: Path, tmp_path: Path, keywords: dict[str, Any], key: str, code: str
) -> None:
    if "prompts" in keywords:
        keywords = {**keywords, "prompts": colours(tmp_path)}
    with rejects(key, code=code, kind=ConfigError):
        stream_text(run, **keywords)


def test_draws_are_those_of_the_seed(run: Path, tmp_path: Path) -> None:
    model, prompts = load_with_images(run)
    asked = prompts.read(colours(tmp_path / "asks", 5))
    hot = SamplingConfig(temperature=2.0, seed=3)
    found = [[*answer_all(model, prompts, asked, 6, hot, rows)] for rows in (2, 5)]
    assert found[0] == found[1]


def test_F144_each_end_of_a_folder_ends_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked as a folder, and in a run that began from it; ids that ended a text come from generate itself."""
    folder = folder_of(tmp_path / "run/hf")
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    one: Any = SimpleNamespace(cross=True, config=SimpleNamespace(modalities={"image": SimpleNamespace(first_id=IMAGE)}))  # fmt: skip
    options = {"resolution": {"fixed": {"size": SIDE}}, "tokens_per_tile": 4, "template": "vicuna"}
    options |= {"tokenizer": str(folder)}
    source = SourceConfig("vlm", "talks.jsonl", options=options, split="train")
    data, place = SimpleNamespace(sources={"talks": source}), SimpleNamespace(dir=tmp_path / "run")
    config: Any = SimpleNamespace(data=data, run=place, init=InitConfig())
    given: list[Any] = []

    def generated(*values: Any, **_: Any) -> torch.Tensor:
        given.append(values[4])
        return torch.tensor([[4, 6, 7, 4], [3, 0, 4, 4], [5, 4, 4, 4]])

    monkeypatch.setattr(answers, "generate", generated)
    for prompts in folder_prompts(folder, one), prompts_of(config):
        asked = [prompts.of("a", ())] * 3
        model = torch.nn.Linear(1, 1)
        assert answers.answer(model, prompts, asked, {}, 4) == ["bd", "a", ""]
        answers.answer(model, prompts, asked, {}, 4, stops=False)
    assert given == [(0, 5, 7), None] * 2
