"""One predicate of who sees whom: each backend that runs here against a dense reference in float64."""

import pytest
import torch

from forge_core.model import AttentionSpec
from forge_testing.problems import rejects
from forge_vlm import Segment, SequencePlan
from forge_vlm.sequence.masks import SequenceMask, attend_dense, attend_flex, flex_mask
from forge_vlm.sequence.plan import SCOPES

pytestmark = pytest.mark.lane("test")

GRID = (1, 1, 3)


def plan():
    """A tree of two branches, a document of a clip of two images and a picture, and padding; a row of text and images."""
    tree = [
        Segment(0, 0, 2),
        Segment(1, 2, 3, 0, 0, GRID),
        Segment(0, 5, 3, branch=1),
        Segment(0, 8, 4, branch=2),
    ]
    talk = [
        Segment(1, 12, 3, 1, 1, GRID, clip=0),
        Segment(1, 15, 3, 1, 2, GRID, clip=0),
        Segment(0, 18, 2, 1),
        Segment(1, 20, 3, 1, 3, GRID, clip=1),
        Segment(0, 23, 3, 1),
        Segment(-1, 26, 6, -1),
    ]
    other = [Segment(0, 0, 4), Segment(1, 4, 3, 0, 0, GRID, clip=0), Segment(0, 7, 25)]
    return SequencePlan(((*tree, *talk), tuple(other)), 32)


def labels():
    found = torch.full((2, 32), -100)
    found[0, [6, 9, 23, 24]] = found[1, 12:20] = 5
    return found


def mask_of(scope):
    own = plan()
    spans = None if scope is None else own.spans(scope, labels())
    mask = SequenceMask.of(own.document_ids(), own.branches(), spans)
    assert mask is not None
    return mask


def heads():
    made = torch.Generator().manual_seed(0)
    return [torch.randn(2, 32, n, 8, generator=made, dtype=torch.float64) for n in (4, 2, 2)]


def reference(scope, window=None):
    """From the plan's own predicate, row by row and head by head."""
    q, k, v = heads()
    seen = plan().visible(scope, labels())
    out = torch.zeros_like(q)
    for b in range(2):
        for h in range(4):
            for i in range(32):
                keys = [
                    j for j in range(32) if seen[b, i, j] and (window is None or i - j < window)
                ]
                scores = k[b, keys, h // 2] @ q[b, i, h] / 8**0.5
                out[b, i, h] = scores.softmax(0) @ v[b, keys, h // 2]
    return out


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("scope", [None, *SCOPES])
def test_each_backend_equals_the_reference(scope, window):
    wanted = reference(scope, window)
    mask, spec = mask_of(scope), AttentionSpec(window=window)
    q, k, v = heads()
    mask.prepare(spec, q)
    assert (mask.attend(q, k, v, spec, None) - wanted).abs().max() < 1e-12
    # FlexAttention on the CPU has no backward and no float64
    short = [t.float() for t in (q, k, v)]
    found = attend_flex(*short, flex_mask(mask, window), spec)
    assert (found - wanted).abs().max() < 1e-5


def test_caps_and_sinks_are_computed_where_scores_may_be_held():
    q, k, v = heads()
    spec, sinks = AttentionSpec(softcap=2.0, sinks=True), torch.randn(4, dtype=torch.float64)
    mask = mask_of("image")
    mask.prepare(spec, q)
    seen = plan().visible("image")[:, None]
    keys, values = (t.repeat_interleave(2, 2).transpose(1, 2) for t in (k, v))
    scores = 2.0 * torch.tanh(q.transpose(1, 2) @ keys.mT / 8**0.5 / 2.0)
    scores = scores.masked_fill(~seen, -torch.inf)
    column = sinks[:, None, None].expand(2, 4, 32, 1)
    wanted = torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ values
    found = mask.attend(q, k, v, spec, sinks)
    assert (found - wanted.transpose(1, 2)).abs().max() < 1e-12
    with rejects("attention.softcap", 1.0, "unsupported"):
        mask.prepare(AttentionSpec(softcap=1.0, window=3), torch.empty(1, device="meta"))


def test_without_branches_and_spans_there_is_no_mask():
    """Attention is then that of documents, with its kernels of variable length."""
    own = SequencePlan(((Segment(0, 0, 4), Segment(0, 4, 4, 1)),), 8)
    documents = own.document_ids()
    assert SequenceMask.of(documents, own.branches(), own.spans("image")) is None
    assert SequenceMask.of(documents, None, None) is None


def test_ids_that_come_again_are_other_documents():
    ids = torch.tensor([[3, 3, 5, 5, 3, 3]])
    mask = SequenceMask.of(ids, torch.tensor([[0, 1, 0, 1, 0, 1]]), None)
    mask.prepare(AttentionSpec(), torch.zeros(1))
    index = torch.arange(6)
    seen = mask.sees(torch.zeros(1, 1, dtype=torch.int64), index[:, None], index)
    blocks = torch.block_diag(*[torch.ones(2, 2).tril()] * 3).bool()
    assert torch.equal(seen, blocks)


def test_a_mask_of_the_spec_is_rejected():
    with rejects("attention.mask", "mine:mask", "excludes"):
        mask_of(None).prepare(AttentionSpec(mask="mine:mask"), torch.zeros(1))


def test_the_prefix_ends_at_the_first_target_or_where_branches_begin():
    spans = plan().spans("prefix_lm", labels())
    assert (spans[0, :5] == 0).all()
    assert (spans[0, 5:12] == -1).all()
    assert (spans[0, 12:24] == 0).all()
    assert (spans[0, 24:] == -1).all()
    assert (spans[1, :13] == 0).all()
    assert (spans[1, 13:] == -1).all()


def test_dense_masks_have_gradients():
    q, k, v = (t.requires_grad_() for t in heads())
    mask, spec = mask_of("image"), AttentionSpec()
    mask.prepare(spec, q)
    attend_dense(q, k, v, mask._made[None], spec).sum().backward()
    assert all(t.grad is not None for t in (q, k, v))


@pytest.mark.parametrize("scope", [None, *SCOPES])
def test_equal_ids_apart_are_two_documents_for_the_plan_too(scope):
    """A row of documents 0, 1, 0: the third saw the first, and its prefix ended before it began."""
    ids = torch.tensor([[0] * 4 + [1] * 3 + [0] * 4 + [-1]])
    other = torch.where(ids < 0, -1, torch.tensor([[0] * 4 + [1] * 3 + [2] * 5]))
    tokens = torch.tensor([[1, 9, 9, 1, 9, 1, 1, 1, 9, 9, 1, 0]])
    targets = torch.full((1, 12), -100)
    targets[0, [2, 5, 9]] = 1
    same, apart = (
        SequencePlan.of(tokens, d, {9: 1}, [[(1, 1, 2), (1, 1, 1), (1, 1, 2)]])
        for d in (ids, other)
    )
    if scope is not None:
        assert torch.equal(same.spans(scope, targets), apart.spans(scope, targets))
    assert torch.equal(same.visible(scope, targets), apart.visible(scope, targets))
