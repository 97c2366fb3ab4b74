"""Records with several answers: one sample whose loss is that of a record for each."""

import json

import pytest
import torch
import torch.nn.functional as F

from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from forge_vlm import VLM, ModalityConfig, VisionConfig, VLMConfig  # noqa: E402
from forge_vlm.data import InvalidSample, VisionChatSource  # noqa: E402
from forge_vlm.vision import ViTConfig  # noqa: E402

OPTIONS = dict(resolution={"fixed": {"size": 8}}, tokens_per_tile=4)
IMAGE = 257
CAPTIONS = ["a cat", "a dog", "two cats on a mat", "a cat", "red"]


def pictures(folder):
    for i in range(2):
        Image.new("RGB", (8, 8), (90 * i, 7, 200)).save(folder / f"{i}.png")


def chat(folder):
    """A tree of two questions behind a shared answer, and a plain conversation; and the same as three records."""
    see = {
        "role": "user",
        "content": [{"type": "image", "image": "0.png"}, {"type": "text", "text": "hi"}],
    }
    shared = [see, {"role": "assistant", "content": "hello"}]
    branches = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a, "weight": w}]
        for q, a, w in (("what?", "a cat", 1.0), ("who?", "mine", 0.5))
    ]
    alone = {"messages": [{**see, "content": "x"}, {"role": "assistant", "content": "y"}]}
    apart = [{"messages": [*shared, *branch]} for branch in branches]
    return "chat", "chat", [{"messages": shared, "branches": branches}, alone], [*apart, alone]


def llava(folder):
    shared = [{"from": "human", "value": "<image>\nlook"}]
    branches = [
        [{"from": "human", "value": "colour?"}, {"from": "gpt", "value": "red"}],
        [{"from": "gpt", "value": "a square"}],
    ]
    tree = {"image": "0.png", "conversations": shared, "branches": branches}
    apart = [{"image": "0.png", "conversations": [*shared, *b]} for b in branches]
    return "llava", "llava", [tree], apart


def coco(folder):
    images = [{"id": i, "file_name": f"{i}.png"} for i in range(2)]
    notes = [{"image_id": i % 2, "caption": c} for i, c in enumerate([*CAPTIONS, *CAPTIONS])]
    content = {"images": images, "annotations": notes}
    return "coco_trees", "coco", content, content


def open_(folder, name, format, content, seq_len, **options):
    path = folder / f"{name}.json{'l' if format == 'chat' else ''}"
    lines = "\n".join(map(json.dumps, content)) if format == "chat" else json.dumps(content)
    path.write_text(lines)
    return VisionChatSource(path, format=format, **{**OPTIONS, **options}).stream(seq_len)


def build(seq_len, **options):
    vit = ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    torch.manual_seed(0)
    return VLM(
        VLMConfig(
            **{"vocab_size": 258, "dim": 16, "num_layers": 2, "num_heads": 2, "init_std": 0.2},
            max_seq_len=seq_len,
            vision=VisionConfig(vit=vit),
            modalities={"image": ModalityConfig(IMAGE)},
            **options,
        )
    )


def loss_of(model, rows):
    """Of all rows of a stream, with the number of pictures that the encoder has seen."""
    arrays = rows.arrays(np.arange(len(rows)))
    given = {
        n: arrays[n] for n in ("tokens", "positions", "document_ids", "branch_ids") if n in arrays
    }
    given = {n: torch.from_numpy(a) for n, a in given.items()}
    logits = model(given.pop("tokens"), images=arrays["images"], **given)
    labels = torch.from_numpy(arrays["labels"])
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    weights = torch.from_numpy(arrays["weights"]).flatten() if "weights" in arrays else 1.0
    return (losses * weights).sum(), len(arrays["images"].values)


@pytest.mark.parametrize("weigh", ["token", "sample", "sqrt", "message"])
@pytest.mark.parametrize("make", [chat, llava, coco])
def test_a_tree_has_the_loss_and_gradients_of_a_record_for_each_answer(tmp_path, make, weigh):
    pictures(tmp_path)
    together, apart, tree, records = make(tmp_path)
    options = {"weigh": weigh, "template": "vicuna" if make is llava else "chatml"}
    grads, losses, counts, places = [], [], [], []
    for name, format, content in (("tree", together, tree), ("apart", apart, records)):
        rows = open_(tmp_path, name, format, content, 400, **options)
        assert ("branch_ids" in rows.arrays(np.arange(1))) == (name == "tree")
        model = build(400)
        loss, count = loss_of(model, rows)
        loss.backward()
        losses.append(loss.item())
        counts.append(count)
        places.append(int((rows.arrays(np.arange(len(rows)))["document_ids"] >= 0).sum()))
        grads.append({n: p.grad for n, p in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, wanted in grads[1].items():
        assert (grads[0][name] - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))
    # each picture is encoded once; without trees once for each answer
    assert counts == {chat: [1, 2], llava: [1, 2], coco: [2, 10]}[make]
    assert places[0] < places[1]


def test_five_captions_of_an_image_are_one_sample(tmp_path):
    pictures(tmp_path)
    *_, content = coco(tmp_path)
    rows = open_(tmp_path, "tree", "coco_trees", content, 400)
    arrays = rows.arrays(np.arange(1))  # two trees are packed, and neither is cut
    assert len(rows) == 1
    ids, documents = arrays["branch_ids"][0], arrays["document_ids"][0]
    for document in (0, 1):
        assert sorted(set(ids[documents == document].tolist())) == [0, 1, 2, 3, 4, 5]
    assert (arrays["tokens"][0][ids > 0] != IMAGE).all()


@pytest.mark.parametrize("scope", ["image", "clip", "document", "prefix_lm"])
def test_sequences_have_the_ids_of_bidirectional_spans(tmp_path, scope):
    pictures(tmp_path)
    parts = [{"type": "image", "image": f"{i}.png"} for i in range(2)]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]
    rows = open_(tmp_path, "a", "chat", [{"messages": talk}], 64, bidirectional=scope)
    arrays = rows.arrays(np.arange(1))
    model = build(64, bidirectional=scope)
    spans, places = arrays[model.config.span_input][0], arrays["tokens"][0] == IMAGE
    if scope == "prefix_lm":
        first = int((arrays["labels"][0] >= 0).argmax())
        assert (spans[: first + 1] == 0).all()
        assert (spans[first + 1 :] == -1).all()
    else:
        assert spans[places].tolist() == ([0] * 8 if scope == "document" else [0] * 4 + [1] * 4)
        assert (spans[~places] == -1).all()
    given = {n: torch.from_numpy(arrays[n]) for n in ("document_ids", model.config.span_input)}
    model(torch.from_numpy(arrays["tokens"]), images=arrays["images"], **given)


def test_trees_that_cannot_be_are_rejected(tmp_path):
    pictures(tmp_path)
    *_, content = coco(tmp_path)
    with rejects("branches", ..., "picture", InvalidSample, where="record 0"):
        open_(tmp_path, "a", "coco_trees", content, 400, template="plain")
    with rejects("branches", ..., "prefix", InvalidSample):
        open_(tmp_path, "a", "coco_trees", content, 400, bidirectional="prefix_lm")
    see = [{"type": "image", "image": "0.png"}]
    said = {"role": "assistant", "content": "yes"}
    talk = [{"role": "user", "content": see}, said]
    with rejects("branches", ..., "picture", InvalidSample, where="record 0"):
        open_(tmp_path, "b", "chat", [{"messages": talk, "branches": [talk]}], 400)
    with rejects("bidirectional", "document", "between", InvalidSample):
        open_(tmp_path, "c", "chat", [{"messages": [*talk, *talk]}], 400, bidirectional="document")
    open_(tmp_path, "c", "chat", [{"messages": [*talk, *talk]}], 400, bidirectional="clip")
