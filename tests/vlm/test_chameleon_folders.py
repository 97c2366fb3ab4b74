"""A Chameleon comes in, learns from tokens of text and images, and goes out with its tokeniser of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_testing.runs import fit_alone
from forge_train import ConfigError
from forge_train.hf.exporting import export_run
from forge_train.hf.importing import import_folder

transformers = pytest.importorskip("transformers")
FIRST, NUMBER, PLACEHOLDER = 260, 16, 290
JOB = """
run.dir = "{run}"
data = {{seq_len = 16, sources.text.name = "builtin"}}
train = {{steps = {steps}, global_batch = 2}}
parallel = {{device = "cpu", precision = "fp32"}}
eval.every_steps = 0
sample.max_new_tokens = 0
"""


def save(folder: Path, swin_norm: bool) -> Any:
    """A Chameleon of transformers with random parameters, and its files."""
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    config = transformers.ChameleonConfig(
        **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        **{"pad_token_id": 0, "eos_token_id": 256, "swin_norm": swin_norm},
        vq_config={
            **{"embed_dim": 8, "num_embeddings": NUMBER, "latent_channels": 8, "resolution": 16},
            **{"base_channels": 32, "channel_multiplier": [1, 1, 2], "num_res_blocks": 1},
        },
        vocabulary_map={
            "<image>": PLACEHOLDER,
            **{f"IMGIMG{'A' if i < 10 else 'B'}{chr(65 + i % 10)}Z": FIRST + i for i in range(16)},
        },
    )
    model = transformers.ChameleonForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.save_pretrained(folder)
    return model


def logits(model: Any) -> torch.Tensor:
    """Of text behind a picture, by transformers, which cuts the picture into tokens itself."""
    tokens = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(1))
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        images = model.model.get_image_tokens(pixels)
        tokens[:, 2 : 2 + images.size(1)] = PLACEHOLDER
        found: torch.Tensor = model(input_ids=tokens, pixel_values=pixels).logits
    return found


def opened(folder: Path) -> Any:
    """The model that transformers makes of a folder, which lacks nothing and holds nothing else."""
    model, info = transformers.ChameleonForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def job(folder: Path, run: str = "run", steps: int = 2, more: str = "") -> Path:
    path = folder / f"{run}.toml"
    path.write_text(JOB.format(run=folder / run, steps=steps) + more)
    return path


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("swin_norm", [False, True])
def test_it_is_imported_trained_and_exported_with_its_image_tokenizer(
    tmp_path: Path, swin_norm: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = save(tmp_path / "hf", swin_norm)
    assert import_folder(tmp_path / "hf", run_dir=tmp_path / "run", check=True) == 0
    said = capsys.readouterr().out
    assert "model.vqmodel." in said
    export_run(tmp_path / "run", tmp_path / "same", check=True)
    same = opened(tmp_path / "same")
    assert torch.equal(logits(same), logits(theirs))
    assert same.config.vocabulary_map == theirs.config.vocabulary_map

    fit_alone(job(tmp_path))
    export_run(tmp_path / "run", tmp_path / "out", check=True)
    trained = opened(tmp_path / "out")
    kept, wanted = (dict(m.model.vqmodel.state_dict()) for m in (trained, theirs))
    assert all(torch.equal(kept[name], tensor) for name, tensor in wanted.items())
    hidden = torch.arange(300)
    text = (hidden < FIRST) | (hidden >= FIRST + NUMBER)
    moved = (logits(trained) - logits(same))[..., text]
    assert moved.abs().max() > 1e-3


@pytest.mark.slow
def test_a_fork_is_exported_too_and_a_new_run_has_no_tokenizer(tmp_path: Path) -> None:
    theirs = save(tmp_path / "hf", False)
    begun = f'[init]\nfrom = "{tmp_path / "hf"}"'
    fit_alone(job(tmp_path, "first", 1, begun))
    keys = {"run.dir": tmp_path / "second", "init.from": tmp_path / "first"}
    fit_alone(tmp_path / "first/config.toml", **{k: str(v) for k, v in keys.items()})
    export_run(tmp_path / "second", tmp_path / "out")
    kept = dict(opened(tmp_path / "out").model.vqmodel.state_dict())
    assert all(torch.equal(kept[n], t) for n, t in theirs.model.vqmodel.state_dict().items())
    for file in sorted((tmp_path / "second/hf").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    (tmp_path / "second/hf").rmdir()
    with pytest.raises(ConfigError, match="forge-train import"):
        export_run(tmp_path / "second", tmp_path / "other", family="chameleon")
