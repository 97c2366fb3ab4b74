"""Files of every release load, bit by bit, and training goes on from them.

`golden/VERSION` holds a job, steps 2 and 4 of its run, token files and digests of the rows read from them, as the
release wrote them (scripts/write_golden.py); it never changes. 0.1.0 had no digests of blocks of tokens, and its
optimizer was no torch optimizer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.write_golden import rows_of

from forge_ckpt import Store
from forge_core import Transformer, TransformerConfig
from forge_core.optim import AdamW, param_groups
from forge_data import SourceConfig, open_source, verify
from forge_testing.runs import fit_alone

pytestmark = pytest.mark.lane("test")

RELEASES = sorted((Path(__file__).parent / "golden").iterdir())
releases = pytest.mark.parametrize("golden", RELEASES, ids=lambda path: path.name)


def loaded(golden: Path, step: str, folder: Path) -> dict[str, Any]:
    """The state of a golden step."""
    shutil.copytree(golden / step, folder / step)
    state = dict.fromkeys(("model", "optimizer", "loader", "progress", "rng"))
    with Store(folder) as store:
        store.load(state)
    return state


def saved(golden: Path, step: str, folder: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a golden step by name."""
    state = loaded(golden, step, folder)
    found = dict(state["model"])
    for name, slots in state["optimizer"].items():
        found.update({f"{name}.{slot}": slots[slot] for slot in ("exp_avg", "exp_avg_sq")})
        assert slots["step"] == float(step[-1])
    return found


@releases
def test_F114_a_checkpoint_of_each_release_goes_on(golden: Path, tmp_path: Path) -> None:
    wanted = saved(golden, "step-00000004", tmp_path / "wanted")
    shutil.copytree(golden / "step-00000002", tmp_path / "run/checkpoints/step-00000002")
    done = fit_alone(golden / "job.toml", **{"run.dir": str(tmp_path / "run")})
    assert (done.code, done.step) == (0, 4)
    assert done.weights.keys() == wanted.keys()
    for name, value in wanted.items():  # other processors round sums in another order
        assert (done.weights[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@releases
def test_an_optimizer_over_parameters_loads_a_checkpoint_of_each_release(
    golden: Path, tmp_path: Path
) -> None:
    state = loaded(golden, "step-00000002", tmp_path)
    vocab_size = len(state["model"]["embedding.weight"])
    model = Transformer(TransformerConfig(vocab_size, 8, 1, 2, hidden_dim=16, tie_embeddings=True))
    model.load_state_dict(state["model"])
    optimizer = AdamW(param_groups(model), lr=1e-2, betas=(0.9, 0.95), eps=1e-4)
    optimizer.load_named_state(state["optimizer"])
    again = AdamW(param_groups(model), lr=1e-2)
    again.load_state_dict(optimizer.state_dict())
    for name, slots in again.named_state().items():
        assert slots["step"] == 2.0
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(slots[slot], state["optimizer"][name][slot]), name


@releases
def test_token_files_of_each_release_give_the_same_rows(golden: Path) -> None:
    """Another order of data would change every run that goes on."""
    tokens = golden / "tokens"
    assert rows_of(tokens) == json.loads((golden / "rows.json").read_text())
    for split in ("train", "validation"):
        source = open_source(SourceConfig(name="tokens", path=str(tokens), split=split))
        assert source.num_documents > 0
        verify(tokens / split)
