"""What a user of data may get wrong: the problem names the key, the value and the rule."""

import io
import sys
from types import SimpleNamespace

import pytest

from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from forge_vlm import VLM, ModalityConfig, VisionConfig, VLMConfig  # noqa: E402
from forge_vlm._shared.problems import ProblemError  # noqa: E402
from forge_vlm.data import InvalidSample, Prompts  # noqa: E402
from forge_vlm.data.drawn import DrawnSquares  # noqa: E402
from forge_vlm.data.formats import open_records  # noqa: E402
from forge_vlm.data.options import fit_problems  # noqa: E402
from forge_vlm.data.records import DOCUMENT, Message, Record  # noqa: E402
from forge_vlm.data.source import options_of  # noqa: E402
from forge_vlm.data.templates import TokenizerTemplate  # noqa: E402
from forge_vlm.data.tokenizer import open_tokenizer  # noqa: E402
from forge_vlm.data.video import Clip  # noqa: E402
from forge_vlm.vision import ViTConfig  # noqa: E402

OPTIONS = dict(resolution={"fixed": {"size": 8}}, tokens_per_tile=4)
ASKED, ANSWERED = Message("user", ("what?",)), Message("assistant", ("this",))


def png(side):
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(("key", "value"), [("size", 3), ("tokens", 0)])
def test_drawn_squares(key, value):
    config = SimpleNamespace(split="train")
    with rejects(key, value, "range"):
        DrawnSquares(config, **{key: value})
    with rejects("seq_len", 17, "range"):
        DrawnSquares(config).stream(17, 0)


@pytest.mark.parametrize(
    ("options", "image_id", "key", "value", "code"),
    [
        ({"positions": "mrope"}, 257, "positions", "mrope", "mismatch"),
        ({"bidirectional": "image"}, 257, "bidirectional", "image", "mismatch"),
        ({}, 256, "image", "<image>", "placeholder"),
        (
            {"resolution": {"fixed": {"size": 16}}},
            *(257, "resolution.fixed.size", 16, "image_size"),
        ),
        ({"tokens_per_tile": 3}, 257, "tokens_per_tile", 3, "tokens"),
        *(
            (
                {"resolution": {"name": name, name: {"tile_size": 4}}},
                *(257, f"resolution.{name}.tile_size", 4, "image_size"),
            )
            for name in ("tiles", "aspect_tiles")
        ),
    ],
)
def test_F208_options_of_another_model(options, image_id, key, value, code):
    sizes = dict(vocab_size=258, dim=8, num_layers=1, num_heads=2)
    vit = ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    modalities = {"image": ModalityConfig(257)}
    model = VLM(VLMConfig(**sizes, vision=VisionConfig(vit=vit), modalities=modalities))
    assert fit_problems(options_of("", OPTIONS), 257, model, "here") == []
    found = fit_problems(options_of("", {**OPTIONS, **options}), image_id, model, "here")
    assert len(found) == 1
    assert_problem(ProblemError(found), f"here.{key}", value, code)


@pytest.mark.parametrize(
    ("library", "key", "value", "call"),
    [
        ("datasets", "format", "parquet", lambda path: open_records("parquet", path)),
        ("datasets", "format", "dataset", lambda path: open_records("dataset", path)),
        ("tokenizers", "tokenizer", "a.json", lambda path: open_tokenizer("a.json", "", "")),
        ("transformers", "template", "tokenizer", lambda path: TokenizerTemplate("a", None, "")),
        ("av", "", ..., lambda path: Clip(SimpleNamespace(name="a", content=b""))),
        ("PIL", "", ..., lambda path: Prompts(**OPTIONS).pictures.layout(b"", "a")),
    ],
)
def test_libraries_that_are_not_installed(library, key, value, call, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, library, None)
    with rejects(key, value, "requires"):
        call(tmp_path)


def test_sets_of_other_columns(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"picture": [1]})
    rows.to_parquet(tmp_path / "a.parquet")
    with rejects("columns", ["picture"], "missing", InvalidSample, where="a.parquet"):
        open_records("parquet", tmp_path / "a.parquet")
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "set")
    with rejects("", ..., "splits", InvalidSample, where=tmp_path / "set"):
        open_records("dataset", tmp_path / "set")


def test_an_image_of_another_size():
    pictures = Prompts(resolution={"name": "tiles"}, tokens_per_tile=4).pictures
    layout = pictures.layout(png(9), "a.png")
    pictures.media(png(9), layout, "a.png")
    wide = io.BytesIO()
    Image.new("RGB", (64, 8)).save(wide, "PNG")
    with rejects("", ..., "changed", InvalidSample, where="a.png"):
        pictures.media(wide.getvalue(), layout, "a.png")


@pytest.mark.parametrize(
    ("messages", "branches", "key", "value", "code"),
    [
        ((ASKED,), ((ANSWERED,), (ANSWERED,)), "branches", 2, "question"),
        ((Message(DOCUMENT, ("a",)),), (), "messages", ..., "document"),
        ((ANSWERED,), (), "messages", ..., "no_question"),
        ((ASKED,), (), "messages", ..., "empty"),
    ],
)
def test_records_without_a_question(messages, branches, key, value, code):
    prompts = Prompts(template="plain", **OPTIONS)
    with rejects(key, value, code, InvalidSample, where="here"):
        prompts(Record("here", messages, branches=branches))
