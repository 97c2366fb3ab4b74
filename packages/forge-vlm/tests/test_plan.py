"""Masks, positions and labels are functions of one plan."""

import pytest
import torch

from forge_testing.problems import rejects
from forge_vlm import Segment, SequencePlan

pytestmark = pytest.mark.lane("test")

IMAGE = 126


def row(*parts):
    """A row of (document, text length or grid) parts: tokens, documents, grids."""
    tokens, documents, grids = [], [], []
    for document, part in parts:
        if isinstance(part, int):
            tokens += range(1, part + 1)
            documents += [document] * part
        else:
            size = part[0] * part[1] * part[2]
            tokens += [IMAGE] * size
            documents += [document] * size
            grids.append(part)
    return tokens, documents, grids


def plan_of(*rows):
    made = [row(*parts) for parts in rows]
    tokens, documents = (torch.tensor([r[i] for r in made]) for i in range(2))
    return SequencePlan.of(tokens, documents, {IMAGE: 1}, [r[2] for r in made]), tokens


def test_mrope_of_an_image_between_text_is_that_of_the_paper():
    plan, _ = plan_of([(0, 4), (0, (1, 2, 3)), (0, 2)])
    t, h, w = plan.positions("mrope")[0].tolist()
    assert t == [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8]
    assert h == [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8]
    assert w == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8]


def test_F197_mrope_of_a_clip_counts_time_then_rows_then_columns():
    """The indices of Qwen2-VL (Wang et al. 2024, section 2.1), written as loops."""
    plan, _ = plan_of([(0, 3), (0, (2, 2, 3)), (0, 1)])
    inside = [(t, h, w) for t in range(2) for h in range(2) for w in range(3)]
    wanted = [(i, i, i) for i in range(3)] + [(3 + t, 3 + h, 3 + w) for t, h, w in inside]
    wanted.append((6, 6, 6))  # after the largest index of the clip
    assert plan.positions("mrope")[0].T.tolist() == [list(axes) for axes in wanted]


def test_adjacent_images_and_documents_of_a_packed_row():
    plan, tokens = plan_of([(0, 2), (0, (1, 1, 2)), (0, (1, 2, 1)), (1, (1, 1, 1)), (1, 3)])
    assert plan.modality_ids().tolist() == [[0, 0, 1, 1, 1, 1, 1, 0, 0, 0]]
    assert plan.image_ids().tolist() == [[-1, -1, 0, 0, 1, 1, 2, -1, -1, -1]]
    assert plan.positions("text_preserving").tolist() == [[0, 1, 2, 2, 3, 3, 0, 1, 2, 3]]
    assert plan.positions().tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]
    assert plan.document_ids().tolist() == [[0] * 6 + [1] * 4]
    labels = plan.labels(tokens)[0].tolist()
    # an image is no target; its last token predicts the text behind it; a document's last token nothing
    assert labels == [2, -100, -100, -100, -100, -100, 1, 2, 3, -100]


def test_padding_sees_itself_and_learns_nothing():
    plan, tokens = plan_of([(0, 3), (-1, 2)])
    assert plan.modality_ids().tolist() == [[0, 0, 0, -1, -1]]
    assert plan.labels(tokens).tolist() == [[2, 3, -100, -100, -100]]
    seen = plan.visible()[0]
    assert seen[3:].tolist() == torch.eye(5, dtype=torch.bool)[3:].tolist()


def test_images_attend_to_all_of_themselves_and_documents_to_no_other():
    plan, _ = plan_of([(0, 1), (0, (1, 1, 2)), (0, (1, 1, 2)), (1, (1, 1, 2))])
    causal, image, document = (plan.visible(s)[0] for s in (None, "image", "document"))
    for q in range(7):
        for k in range(7):
            same = (q < 5) == (k < 5)
            assert causal[q, k] == (same and k <= q)
            blocks = [{1, 2}, {3, 4}, {5, 6}]
            assert image[q, k] == (same and (k <= q or any({q, k} <= b for b in blocks)))
            assert document[q, k] == (same and (k <= q or (q > 0 and k > 0)))


def test_branches_share_an_image_and_do_not_see_each_other():
    """Two answers of one image: each equals the row that has it alone."""
    shared = [Segment(0, 0, 2), Segment(1, 2, 2, image=0, grid=(1, 1, 2))]
    tree = SequencePlan(((*shared, Segment(0, 4, 3, branch=1), Segment(0, 7, 2, branch=2)),), 9)
    tokens = torch.tensor([[1, 2, IMAGE, IMAGE, 11, 12, 13, 21, 22]])
    assert tree.positions().tolist() == [[0, 1, 2, 3, 4, 5, 6, 4, 5]]
    assert tree.positions("mrope")[0, 2].tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5]
    labels = tree.labels(tokens)[0].tolist()
    assert labels == [2, -100, -100, 11, 12, 13, -100, 22, -100]
    seen = tree.visible()[0]
    for branch in ([4, 5, 6], [7, 8]):
        alone = [0, 1, 2, 3, *branch]
        assert torch.equal(seen[alone][:, alone], torch.ones(len(alone), len(alone)).tril().bool())
    assert not seen[7:, 4:7].any()


@pytest.mark.parametrize(
    ("grids", "value", "code"),
    [
        ([[(1, 1, 2)]], None, "tokens"),
        ([[(1, 1, 2), (1, 2, 2)]], (1, 2, 2), "tokens"),
        ([[(1, 1, 5), (1, 1, 1)]], 2, "number"),
    ],
)
def test_placeholders_that_are_not_those_of_the_images_are_rejected(grids, value, code):
    tokens = torch.tensor([[1, *[IMAGE] * 5, 2]])
    with rejects("grids", value, code, where="row 0"):
        SequencePlan.of(tokens, None, {IMAGE: 1}, grids)


def test_segments_must_cover_a_row():
    with rejects("segments", [(0, 2), (3, 4)], "order", where="row 0"):
        SequencePlan(((Segment(0, 0, 2), Segment(0, 3, 1)),), 4)


def test_positions_and_spans_have_names():
    plan = SequencePlan.of(torch.tensor([[IMAGE]]), None, {IMAGE: 1})
    with rejects("grids", ..., "missing"):
        plan.positions("mrope")
    with rejects("positions", "random", "unknown"):
        plan.positions("random")
    with rejects("scope", "row", "unknown"):
        plan.spans("row")
