"""What the runner saves in one layout goes on in another, with uneven tables, shared heads and whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from forge_ckpt import ForgeReader, Store
from forge_core import Transformer, TransformerConfig
from forge_parallel import ParallelConfig, parallelize
from forge_testing import device, run_on_ranks, runs
from forge_testing.jobs import MIXTURE
from forge_train import load_trained

pytestmark = pytest.mark.distributed

DENSE = """
[model.rope_scaling]
factor = 2.0
"""
DEEP = {"optimizer__lr": 1e-3, "model__num_layers": 4, "model__num_heads": 4, "model__num_kv_heads": 2,
        "model__qk_norm": True, "model__dim": 32}  # fmt: skip


def overrides(layout: dict[str, Any]) -> dict[str, Any]:
    """Micro-batches of three rows under data parallelism, for every layout and for one process."""
    return {**DEEP, "train__micro_batch": 3, **{f"parallel__{k}": v for k, v in layout.items()}}


def flat(**more: Any) -> dict[str, Any]:
    """The same for one process, with dots."""
    return {key.replace("__", "."): value for key, value in {**overrides({}), **more}.items()}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list], runs.Fitted]:
    """One process, undisturbed."""
    job = runs.make_job(tmp_path_factory.mktemp("mixture"), MIXTURE)
    fitted = runs.fit_reference(job, **flat())
    return runs.columns(job), fitted


OWN = {"optimizer__name": "forge_testing.models:NamedSGD", "optimizer__lr": 0.1}


@pytest.mark.slow
def test_an_optimizer_from_outside_whose_state_has_names_goes_on_with_other_stages(
    tmp_path: Path,
) -> None:
    """Saved by two stages, gone on with by one process, and the other way round."""
    whole, piped = runs.make_job(tmp_path / "whole", DENSE), {**overrides({"pp": 2}), **OWN}
    wanted = runs.fit_reference(whole, **flat(**OWN))
    assert any(name.endswith(".momentum") for name in wanted.weights)
    for order in ("stages first", "stages last"):
        job = runs.make_job(tmp_path / order, DENSE)
        first = order == "stages first"
        if first:
            runs.together(runs.fit_on_ranks(2, job, **piped))
        else:
            runs.fit_alone(job, **flat(**OWN))
        newest = max((job.parent / "run/checkpoints").glob("step-*"))
        newest.rename(job.parent / newest.name)  # go back to the one before
        if first:
            found = runs.fit_alone(job, **flat(**OWN)).weights
        else:
            found = runs.together(runs.fit_on_ranks(2, job, **piped))
        runs.assert_close(found, wanted.weights)
        runs.assert_same_rows(runs.columns(job), runs.columns(whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((4, {"pp": 2, "tp": 2}), (2, {"cp": 2})),
        ((2, {"cp": 2}), (4, {"pp": 2, "pp_schedule": "interleaved_1f1b"})),
        ((4, {"tp": 2, "ep": 4}), (1, {})),
    ],
    ids=["pp2 tp2 to cp2", "cp2 to pp2 dp2", "tp2 ep4 to one"],
)
def test_saved_in_one_layout_goes_on_in_another(
    tmp_path: Path, mixture: Any, first: Any, then: Any
) -> None:
    job = runs.make_job(tmp_path, MIXTURE)
    keep = {"train__steps": 12, "checkpoint__keep_last": 9}
    stopped = runs.fit_on_ranks(first[0], job, **keep, **overrides(first[1]))
    assert all(f.code == 0 and f.problems == () for f in stopped)
    for step in ("step-00000012", "step-00000009"):  # go back to step 6
        (tmp_path / "run/checkpoints" / step).rename(tmp_path / step)
    if then[0] == 1:
        weights = runs.fit_alone(job, **flat()).weights
    else:
        weights = runs.together(runs.fit_on_ranks(then[0], job, **overrides(then[1])))
    runs.assert_close(weights, mixture[1].weights)
    runs.assert_same_rows(runs.columns(job), mixture[0])
    model, _, step = load_trained(tmp_path / "run")
    assert step == 12
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def loaded(checkpoints: Path, odd: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint, as FSDP2 over all ranks holds them, put together."""
    sizes = {key.removeprefix("model__"): value for key, value in odd.items()}
    with torch.device("meta"):
        model = Transformer(TransformerConfig(num_heads=4, num_kv_heads=2, qk_norm=True, **sizes))
    parallelize(model, ParallelConfig(device=device().type, precision="fp32"))
    with Store(checkpoints, read_only=True) as store:
        assert store.load({"model": model}) == 12
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "then"), [(False, (3, {})), (True, (6, {"tp": 2}))])
def test_an_odd_vocabulary_over_tp_and_three_shards_is_saved_without_padding(
    tmp_path: Path, tied: bool, then: Any
) -> None:
    """259 ids over tp 2 are 130 and 129 rows, which three shards cut by width. One process and three shards
    without tp load the same bits; these, or the layout itself, go on to where one process ends."""
    odd = {
        "model__vocab_size": 259,
        "model__dim": 48,
        "model__num_layers": 2,
        "model__tie_embeddings": tied,
    }
    keep = {**overrides({}), **odd, "checkpoint__keep_last": 9}
    one, six = runs.make_job(tmp_path / "one", DENSE), runs.make_job(tmp_path / "six", DENSE)
    wanted = runs.fit_reference(one, **flat(**keep)).weights
    found = runs.together(runs.fit_on_ranks(6, six, **keep, parallel__tp=2))
    runs.assert_close(found, wanted)
    runs.assert_same_rows(runs.columns(six), runs.columns(one))
    model, _, _ = load_trained(six.parent / "run")
    assert all(torch.equal(p, found[n]) for n, p in model.named_parameters())
    saved = ForgeReader(six.parent / "run/checkpoints/step-00000012").read_metadata()
    kinds = saved.state_dict_metadata.items()
    tables = [t for n, t in kinds if "embedding" in n and isinstance(t, TensorStorageMetadata)]
    assert [tuple(table.size) for table in tables] == [(259, 48)] * 3  # with its moments
    assert [sum(c.sizes.numel() for c in t.chunks) for t in tables] == [259 * 48] * 3
    for here in run_on_ranks(3, loaded, six.parent / "run/checkpoints", odd):
        assert all(torch.equal(here[n], found[n]) for n in here)
    for step in ("step-00000012", "step-00000009"):  # go back to step 6
        (six.parent / "run/checkpoints" / step).rename(six.parent / step)
    moved = runs.fit_on_ranks(then[0], six, **{**overrides(then[1]), **keep})
    runs.assert_close(runs.together(moved), wanted)


@pytest.mark.slow
def test_ranks_share_a_head_and_checkpoints_hold_it_once(tmp_path: Path) -> None:
    """One key/value head over two ranks: trained, saved, gone on with by one process, bit by bit the same."""
    alike = flat(model__num_kv_heads=1)
    one, two = runs.make_job(tmp_path / "one", DENSE), runs.make_job(tmp_path / "two", DENSE)
    wanted = runs.fit_reference(one, **alike).weights
    layout = {**overrides({"tp": 2}), "model__num_kv_heads": 1, "checkpoint__keep_last": 9}
    found = runs.together(runs.fit_on_ranks(2, two, **layout))  # the copies have the same bits
    runs.assert_close(found, wanted)
    runs.assert_same_rows(runs.columns(two), runs.columns(one))
    model, _, _ = load_trained(two.parent / "run")
    assert all(torch.equal(p, found[n]) for n, p in model.named_parameters())
    assert model.get_parameter("layers.0.mixer.k_proj.weight").shape == (8, 32)
    for step in ("step-00000012", "step-00000009"):  # go back to step 6
        (two.parent / "run/checkpoints" / step).rename(two.parent / step)
    runs.assert_close(runs.fit_alone(two, **alike).weights, wanted)


class Wide(torch.nn.Module):
    """A model of somebody else: it drops in the stream, in a way that no module tells (a module of
    dropout is refused under tp), and every rank has its head whole."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 8)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, vocab_size)

    def forward(self, tokens: torch.Tensor, positions: Any, document_ids: Any) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + torch.nn.functional.dropout(self.down(self.up(x).relu()), 0.5, self.training)
        return self.head(self.norm(x))

    def parallel_roles(self) -> dict[str, str]:
        roles = {"embedding.*": "vocab", "up.*": "colwise", "down.*": "rowwise"}
        return {**roles, "norm.*": "sequence", "head.*": "opaque"}


def wide(vocab_size: int) -> Wide:
    return Wide(vocab_size)


@pytest.mark.slow
def test_an_unsharded_head_has_its_loss_once_and_replicas_drop_alike(tmp_path: Path) -> None:
    losses = []
    for world, layout in ((1, {}), (2, {"tp": 2, "sequence_parallel": False})):
        job = runs.make_job(tmp_path / str(world))
        options = {f"parallel__{key}": value for key, value in layout.items()}
        name = {"model__name": f"{__name__}:wide", "sample__max_new_tokens": 0, "train__steps": 4}
        fitted = runs.fit_on_ranks(world, job, None, **name, **options)
        runs.together(fitted)  # all ranks end with the same norm
        losses.append(runs.columns(job)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("before", [1, pytest.param(2, marks=pytest.mark.lane("ci"))])
def test_replicas_drop_alike_after_another_layout(tmp_path: Path, before: int) -> None:
    job = runs.make_job(tmp_path)
    name = {"model__name": f"{__name__}:wide", "sample__max_new_tokens": 0}
    runs.fit_on_ranks(before, job, None, **name, train__steps=2)
    layout = {"parallel__tp": 2, "parallel__sequence_parallel": False}
    runs.together(runs.fit_on_ranks(2, job, None, **name, **layout, train__steps=4))


def test_a_layout_that_the_model_rejects_is_a_configuration_error(tmp_path: Path) -> None:
    job = runs.make_job(tmp_path)
    options = {"model__name": "forge_testing.models:bigram", "sample__max_new_tokens": 0}
    for rank in runs.fit_on_ranks(2, job, None, **options, parallel__tp=2):
        assert rank.code == 78
        assert rank.problems[0].startswith("roles ")


@pytest.mark.slow
def test_counts_over_the_global_batch_with_one_rank_a_stage(tmp_path: Path) -> None:
    job = runs.make_job(tmp_path, MIXTURE + 'aux_scope = "global_batch"\naux_loss_weight = 1e-2\n')
    assert runs.together(runs.fit_on_ranks(2, job, train__steps=2, **overrides({"pp": 2})))
