"""Models of Hugging Face folders: maps of installed packages, joined; adapters; logits beside transformers'."""

import contextlib
import importlib.metadata
import importlib.util
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from forge_ckpt import Store
from forge_ckpt._shared.problems import Problem, raise_problems
from forge_ckpt.cli import main
from forge_ckpt.hf import (
    HFModel,
    adapters,
    compare,
    families,
    find_family,
    fitting_family,
    notes_of,
    peft_files,
    read_files,
    read_processor,
    save_hf,
    tensors_beside,
)
from forge_testing.problems import ANY, assert_problem, rejects

pytestmark = pytest.mark.lane("test")


@dataclass(frozen=True)
class Config:
    """A decoder, or a model with images."""

    vocab_size: int = 6
    num_layers: int = 1
    norm: str = "rms"
    tie_embeddings: bool = False
    input_only_ids: int = 0


@dataclass(frozen=True)
class Map:
    """A map of decoders or of experts."""

    norm: str = "rms"
    rows: tuple = (
        ("model.embed.weight", "embedding.weight", ()),
        ("lm_head.weight", "lm_head.weight", ()),
    )
    beside: tuple = field(default=())

    def config_from_hf(self, hf):
        given = {key: hf[key] for key in ("vocab_size", "input_only_ids") if key in hf}
        return Config(tie_embeddings=hf.get("tie_word_embeddings", False), norm=self.norm, **given)

    def config_to_hf(self, config):
        wrong = Problem("norm", "family", config.norm, f"must be {self.norm}", "use it")
        raise_problems("", [wrong] if config.norm != self.norm else [])
        return {"vocab_size": config.vocab_size}

    def rows_of(self, config):
        return self.rows


EXPERTS = Map(rows=(("model.experts", "experts", ()),))
PARTS = {
    "vision": {"images": Map(beside=("vq.*",))},
    "experts": {"mixture": EXPERTS},
    "decoder": {"plain": Map(), "other": Map("layer"), "mixture": Map()},
}


@pytest.fixture
def installed(monkeypatch):
    """Entry points of three packages."""
    points = [SimpleNamespace(name=n, load=lambda m=maps: m) for n, maps in PARTS.items()]
    monkeypatch.setattr(families, "entry_points", lambda group: points)
    families.hf_families.cache_clear()
    yield
    families.hf_families.cache_clear()


def write(folder: Path, hf: dict, **tensors: torch.Tensor) -> Path:
    """A folder of Hugging Face."""
    rows = [(name, name, ()) for name in tensors]
    save_hf(folder, rows, tensors, files={"config.json": json.dumps(hf).encode()})
    return folder


def test_a_family_has_the_maps_of_all_packages(installed) -> None:
    mixture = find_family({"model_type": "mixture"})
    assert [*mixture.parts] == ["decoder", "experts"]
    configs = mixture.configs_from_hf({"vocab_size": 9})
    assert configs["decoder"].vocab_size == 9
    assert [row[1] for row in mixture.rows_of(configs)] == ["embedding.weight", "lm_head.weight", "experts"]  # fmt: skip
    assert mixture.configs_to_hf(configs) == {"vocab_size": 9}
    assert find_family({"model_type": "images"}).beside == ("vq.*",)
    for unknown in ("gpt2", None, ["plain"]):
        with rejects("model_type", unknown, "unknown"):
            find_family({"model_type": unknown})


def test_the_family_that_fits_a_model(installed) -> None:
    plain, layer = {"decoder": Config()}, {"decoder": Config(norm="layer")}
    assert fitting_family(plain).name == "plain"
    assert fitting_family(layer).name == "other"
    assert fitting_family({**plain, "experts": Config()}).name == "mixture"
    assert fitting_family({"vision": Config()}, "images").name == "images"
    with rejects("decoder.norm", "layer", "family", where="plain: ") as caught:
        fitting_family(layer, "plain")
    assert "other" in caught.value.problems[0].fix
    with rejects("experts", ..., "family"):
        fitting_family(plain, "mixture")
    with rejects("family", "images", "unknown"):
        fitting_family(plain, "images")
    with rejects("model", ..., "no_family") as caught:
        fitting_family({"decoder": Config(norm="batch")})
    assert_problem(caught.value, "decoder.norm", "batch")
    assert {p.origin.partition(",")[0] for p in caught.value.problems[1:]} == {"plain"}


def test_without_another_package_there_is_no_family(monkeypatch) -> None:
    monkeypatch.setattr(families, "entry_points", lambda group: [])
    families.hf_families.cache_clear()
    with rejects("model_type", "llama", "unknown") as caught:
        find_family({"model_type": "llama"})
    assert "forge-train-core" in caught.value.problems[0].fix
    with rejects("model", ..., "no_family"):
        fitting_family({"decoder": Config()})
    families.hf_families.cache_clear()


def test_only_imports_and_exports_read_the_group(tmp_path: Path, monkeypatch) -> None:
    def read(*args, **kwargs):
        raise AssertionError("the entry points were read")

    monkeypatch.setattr(families, "entry_points", read)
    monkeypatch.setattr(importlib.metadata, "entry_points", read)
    families.hf_families.cache_clear()
    state = {"model": {"w": torch.arange(6.0)}}
    with Store(tmp_path / "a") as store:
        store.save(1, state)
        store.wait()
        assert store.load(state) == 1
    assert main(["reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--ranks", "2"]) == 0


def test_a_model_of_a_folder(installed, tmp_path: Path) -> None:
    weight, vq = torch.arange(12.0).view(6, 2), torch.ones(3)
    hf = {"model_type": "images", "vocab_size": 6, "tie_word_embeddings": True}
    tensors = {"model.embed.weight": weight, "lm_head.weight": weight, "vq.codes": vq}
    tensors |= {"model.rotary_emb.inv_freq": vq, "model.position_ids": vq}
    model = HFModel(write(tmp_path / "hf", hf, **tensors))
    assert not model.untied
    source = model.tensors()
    assert {name: t.tolist() for name, t in source} == {"embedding.weight": weight.tolist()}
    assert len(source.ignored) == 4
    (note,) = notes_of(model, source.ignored)
    assert "lm_head.weight" in note
    assert model.files().keys() == {"config.json"}
    tuned = torch.nn.Module()
    tuned.embedding = torch.nn.Embedding(6, 2)
    model.load(tuned)
    assert torch.equal(tuned.embedding.weight, weight)

    assert tensors_beside(tmp_path / "kept") is None
    model.keep_beside(tmp_path / "kept")
    extra = tensors_beside(tmp_path / "kept")
    rows = model.family.rows_of(model.configs)
    save_hf(tmp_path / "out", rows, {"embedding.weight": weight}, extra=extra)
    (tmp_path / "out/config.json").write_text(json.dumps(hf))
    found = HFModel(tmp_path / "out")
    found.keep_beside(tmp_path / "again")
    assert torch.equal(tensors_beside(tmp_path / "again").read("vq.codes"), vq)

    model.add_rows(8)
    assert model.config.vocab_size == 8
    assert torch.equal(model.tensors().read("embedding.weight")[6:], weight.mean(0).expand(2, 2))
    with rejects("vocab_size", 7, "range"):
        model.add_rows(7)


def test_a_head_of_its_own_is_not_tied(installed, tmp_path: Path) -> None:
    weight = torch.arange(12.0).view(6, 2)
    hf = {"model_type": "plain", "tie_word_embeddings": True, "input_only_ids": 2}
    tensors = {"embed.weight": weight, "lm_head.weight": weight + 1}  # names of a base model
    model = HFModel(write(tmp_path / "hf", hf, **tensors))
    assert model.untied
    assert not model.config.tie_embeddings
    assert {n for n, _ in model.tensors()} == {"embedding.weight", "lm_head.weight"}
    assert notes_of(model, [])
    with rejects("vocab_size", 8, "unsupported"):
        model.add_rows(8)


def test_files_of_a_folder(tmp_path: Path, monkeypatch) -> None:
    assert read_processor(tmp_path) == {}
    table = {"image_processor": {"size": 8}}
    large = tmp_path / "processor_config.json"
    large.write_text(json.dumps(table))
    assert read_processor(tmp_path) == {"size": 8}
    assert read_files(tmp_path, ["*.json"]) == {large.name: json.dumps(table).encode()}
    monkeypatch.setattr("forge_ckpt.hf.model.MAX_JSON", 1)
    with rejects("", ..., "size", where=large):
        read_files(tmp_path, ["*.json"])


def test_adapters_that_no_folder_can_have(tmp_path: Path, monkeypatch) -> None:
    tensors = SimpleNamespace(layers=["a", "b"])
    with rejects("", ["a", "b"], "fused"):
        peft_files(tensors, [], 2, 4.0, None, str)

    @contextlib.contextmanager
    def saved(path):
        yield SimpleNamespace(read_object=lambda name: {"digest": "one"}, digest="other")

    monkeypatch.setattr(adapters, "SavedTensors", saved)
    with rejects("", "runs/a/base", "base"):
        adapters.MergedTensors(tmp_path, Path("runs/a/base"), 1.0)


def test_F210_an_adapter_names_the_revision_of_its_base() -> None:
    """`adapter_config.json` named a folder of the hub's cache, which another machine does not have."""
    tensors = SimpleNamespace(layers=["q"])
    commit = "0123456789abcdef" * 2 + "01234567"
    cached = f"/home/a/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/{commit}"
    for base, name, revision in (
        (cached, "Qwen/Qwen3-0.6B", commit),
        ("/data/Qwen3-0.6B", "/data/Qwen3-0.6B", None),
        (None, None, None),
    ):
        files, _ = peft_files(tensors, [("q.weight", "q.weight", ())], 2, 4.0, base, str)
        settings = json.loads(files["adapter_config.json"])
        assert (settings["base_model_name_or_path"], settings["revision"]) == (name, revision)


def test_logits_that_cannot_be_compared(tmp_path: Path, monkeypatch) -> None:
    tokens, model = torch.zeros(2, 3, dtype=torch.long), torch.nn.Embedding(8, 8)
    inputs = lambda theirs: [(tokens, {}, {})]  # noqa: E731
    monkeypatch.setitem(sys.modules, "transformers", None)
    with rejects("", ..., "requires"):
        compare.compare_logits(model, tmp_path, inputs)

    class Theirs(torch.nn.Module):
        def forward(self, tokens):
            return SimpleNamespace(logits=torch.full((*tokens.shape, 8), 1e6))

    def load(path, dtype):
        if path != tmp_path:
            raise OSError("no config.json")
        return Theirs()

    fake = ModuleType("transformers")
    fake.utils = SimpleNamespace(logging=SimpleNamespace(disable_progress_bar=lambda: None))
    fake.AutoModelForCausalLM = SimpleNamespace(from_pretrained=load)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with rejects("", "none", "unsupported"):
        compare.compare_logits(model, Path("none"), inputs)
    found = compare.compare_logits(model, tmp_path, inputs)
    assert found.relative == pytest.approx(1.0, rel=1e-3)
    assert "2 x 3 tokens" in found.line
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ANY)
    weights = [torch.empty(1000, device="meta")]
    assert compare.why_not_compared(weights) is None
    monkeypatch.setattr(compare, "_free_memory", lambda: 1e3)
    assert "0.0 GB" in str(compare.why_not_compared(weights))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "transformers" in str(compare.why_not_compared(weights))
