"""A batch moves to a GPU on a side stream. Needs one, or a stand-in that makes copies."""

from dataclasses import replace

import pytest
import torch

from forge_data import BuiltinCorpus, Loader, PackedStream, Ragged

pytestmark = pytest.mark.lane("test")

NAMES = ("tokens", "labels", "positions", "document_ids", "instance_ids", "source")


@pytest.fixture
def batch():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    batch = next(Loader(PackedStream(BuiltinCorpus("validation"), 64), 8))
    many = Ragged(torch.arange(16.0), torch.arange(0, 17, 2))
    return replace(batch, extras={"image": torch.rand(8, 3), "many": many})


def test_parts_of_a_staged_batch_are_views_of_the_copy(batch):
    staged = batch.staged(torch.cuda.Stream(), stay=("document_ids", "many"))
    assert staged.tokens.device.type == "cpu", "what counts labels reads the host's"
    copy = staged.staging.batch
    for part, plain in zip(staged.split(2), batch.split(2), strict=True):
        here, there = (p.to("cuda", stay=("document_ids", "many")) for p in (part, plain))
        assert here.staging is None
        for name in NAMES:
            a, b = getattr(here, name), getattr(there, name)
            assert a.is_cuda == b.is_cuda == (name != "document_ids")
            assert torch.equal(a.cpu(), b.cpu())
        for name in ("tokens", "labels"):
            parts = (getattr(at, name).untyped_storage().data_ptr() for at in (here, copy))
            assert len({*parts}) == 1, "nothing is copied twice"
        assert here.label_weight == plain.label_weight
        assert torch.equal(here.extras["image"].cpu(), plain.extras["image"])
        assert here.extras["many"].values.device.type == "cpu"
    assert staged.with_filler(2).staging is None


def test_what_stayed_may_still_move_later(batch):
    staged = batch.staged(torch.cuda.Stream(), stay=("document_ids", "many"))
    here = staged.to("cuda")
    assert here.document_ids.is_cuda
    assert torch.equal(here.extras["many"].values.cpu(), batch.extras["many"].values)
    assert staged.to("cpu").tokens is staged.tokens
