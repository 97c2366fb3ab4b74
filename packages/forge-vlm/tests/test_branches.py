"""A tree of answers is its separate rows: logits, loss and gradients; and images are encoded once."""

import pytest
import torch
import torch.nn.functional as F

import forge_vlm
from forge_core import initialize
from forge_core.model import MRopeConfig
from forge_testing.problems import rejects
from forge_vlm.fusion import MoMaConfig
from forge_vlm.sequence.masks import SequenceMask
from forge_vlm.vision import ViTConfig

pytestmark = pytest.mark.lane("test")

IMAGE, S = 63, 32
HEADS = {"num_heads": 4, "num_kv_heads": 2}
FUSIONS = {
    "joint_decoder": forge_vlm.FusionConfig(),
    "mixture_of_transformers": forge_vlm.FusionConfig("mixture_of_transformers"),
    "moma": forge_vlm.FusionConfig("moma", moma=MoMaConfig(balance_loss=0.0)),
    "cross_attention": forge_vlm.FusionConfig(
        "cross_attention", cross_attention=forge_vlm.CrossAttentionConfig(every_n_layers=1)
    ),
}


def build(fusion="joint_decoder", **options):
    vit = ViTConfig(image_size=8, patch_size=4, dim=16, num_layers=1, num_heads=2)
    model = forge_vlm.VLM(
        forge_vlm.VLMConfig(
            **{"vocab_size": 64, "dim": 32, "num_layers": 2, **HEADS, **options},
            max_seq_len=S,
            vision=forge_vlm.VisionConfig(vit=vit),
            modalities={"image": forge_vlm.ModalityConfig(IMAGE)},
            fusion=FUSIONS[fusion],
        )
    )
    initialize(model, 0, std=0.2, residual_std=0.2)
    for name, parameter in model.named_parameters():
        if name.endswith("_gate"):
            torch.nn.init.constant_(parameter, 0.5)
    return model


class Tree:
    """A row of a tree of three answers, then a document of text; and the same as four rows."""

    def __init__(self, places):
        self.trunk = [1, 2, *[IMAGE] * places, 3, 4]
        self.branches = [[5, 11, 12, 13], [5, 21, 22], [6, 31, 32, 33, 34]]
        self.other = [40, 41, 42]
        self.images = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        self.paths = [[*self.trunk, *branch] for branch in self.branches]
        shared = len(self.trunk)
        # the token that predicts a branch's second token is the first that is learnt, and one of the trunk is
        self.row = [*self.trunk, *(t for b in self.branches for t in b), *self.other]
        ids = [0] * shared + [n for n, b in enumerate(self.branches, 1) for _ in b] + [0] * 3
        self.row += [0] * (S - len(self.row))
        self.branch_ids = torch.tensor([ids + [0] * (S - len(ids))])
        documents = [0] * (len(ids) - 3) + [1] * 3 + [-1] * (S - len(ids))
        self.documents = torch.tensor([documents])

    def learnt(self, path):
        labels = [-100] * len(path)
        first = len(self.trunk)
        labels[0] = path[1]  # shared: all rows learn it
        for i in range(first, len(path) - 1):
            labels[i] = path[i + 1]
        return labels

    def together(self, model, media=True):
        """Logits (1, S, V), and the loss of the tree."""
        given = {"images": self.images} if media else {}
        tokens = torch.tensor([self.row])
        logits = model(tokens, document_ids=self.documents, branch_ids=self.branch_ids, **given)
        first = len(self.trunk)
        labels, weights = torch.full((S,), -100), torch.ones(S)
        labels[0], weights[0] = self.trunk[1], len(self.branches)
        place = first
        for branch in self.branches:
            for i in range(len(branch) - 1):
                labels[place + i] = branch[i + 1]
            place += len(branch)
        labels[place : place + 2] = torch.tensor(self.other[1:])
        losses = F.cross_entropy(logits[0], labels, reduction="none", ignore_index=-100)
        return logits, (losses * weights).sum()

    def apart(self, model, media=True):
        """Logits (n, V) of each path, and the loss of all, each with its own copy of the trunk and the image."""
        logits, loss = [], torch.zeros(())
        for path in self.paths:
            given = {"images": self.images} if media else {}
            logits.append(model(torch.tensor([path]), **given)[0])
            loss = loss + F.cross_entropy(
                logits[-1], torch.tensor(self.learnt(path)), reduction="sum"
            )
        other = model(torch.tensor([self.other]))[0]
        loss = loss + F.cross_entropy(other[:-1], torch.tensor(self.other[1:]), reduction="sum")
        return logits, loss

    def difference(self, model):
        """The largest of logits."""
        whole, apart, place = self.together(model)[0][0], self.apart(model)[0], len(self.trunk)
        worst = 0.0
        for path in apart:
            first = len(self.trunk)
            mine = torch.cat((whole[:first], whole[place : place + len(path) - first]))
            worst = max(worst, float((mine - path).abs().max().detach()))
            place += len(path) - first
        return worst


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_tree_is_its_separate_rows(fusion):
    model, tree = build(fusion), Tree(1 if fusion == "cross_attention" else 4)
    assert tree.difference(model) < 1e-5
    _, loss = tree.together(model)
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    _, wanted = tree.apart(model)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        bound = 1e-5 * max(1.0, float(parameter.grad.abs().max()))
        assert (found[name] - parameter.grad).abs().max() <= bound, name


def test_branches_that_see_each_other_are_found(monkeypatch):
    """The proof above is one: with a mask that lets branches see each other it is over 100 times its bound off."""
    tree = Tree(4)
    whole = SequenceMask.of

    def open_branches(documents, branches, spans):
        return whole(documents, None if branches is None else branches.clamp(max=1), spans)

    monkeypatch.setattr(SequenceMask, "of", open_branches)
    assert tree.difference(build()) > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"mixer": "mla"},
        {"positions": "text_preserving"},
        {"positions": "mrope", "mrope": MRopeConfig((2, 1, 1))},
        {"block": "post_norm", "num_heads": 2},
    ],
    ids=str,
)
def test_trees_of_other_decoders(options):
    sizes = options | ({} if options.get("mixer") != "mla" else {"num_kv_heads": None})
    assert Tree(4).difference(build(**sizes)) < 1e-5


def test_the_encoder_runs_once_for_all_answers():
    model, tree, seen = build(), Tree(4), []
    model.vision.register_forward_hook(
        lambda m, args, kwargs, out: seen.append(len(kwargs["images"])), with_kwargs=True
    )
    tree.together(model)
    assert seen == [1]
    tree.apart(model)
    assert seen[1:] == [1, 1, 1]


def test_a_tree_of_only_text():
    model, tree = build(), Tree(4)
    tree.trunk = [t if t != IMAGE else 7 for t in tree.trunk]
    tree.row = [t if t != IMAGE else 7 for t in tree.row]
    tree.paths = [[t if t != IMAGE else 7 for t in path] for path in tree.paths]
    whole, apart = tree.together(model, media=False)[1], tree.apart(model, media=False)[1]
    assert whole.item() == pytest.approx(apart.item(), rel=1e-6)


def test_positions_of_branches_go_on_from_what_they_share():
    tree = Tree(4)
    plan = forge_vlm.SequencePlan.of(
        torch.tensor([tree.row]), tree.documents, {IMAGE: 1}, [[(1, 2, 2)]], tree.branch_ids
    )
    assert plan.positions()[0, :20].tolist() == [
        *range(8),
        8,
        9,
        10,
        11,
        8,
        9,
        10,
        8,
        9,
        10,
        11,
        12,
    ]
    assert torch.equal(plan.branches(), tree.branch_ids)


def test_invalid_branches_are_rejected():
    tree = Tree(1)
    cross = build("cross_attention")
    tokens, ids = torch.tensor([[1, 2, 3, IMAGE]]), torch.tensor([[0, 0, 1, 1]])
    with rejects("images", ..., "branch"):
        cross(tokens, branch_ids=ids, images=tree.images)
    model = build()
    with rejects("branch_ids", ..., "cache"):
        model(tokens[:, :3], branch_ids=ids[:, :3], cache=model.new_cache(8))
    with rejects("shapes", [(1, 4), (1, 3)], "shape"):
        model(tokens[:, :3], document_ids=torch.zeros(1, 3).long(), branch_ids=ids)
    with rejects("cp", ..., "split_rows"):
        model(tokens[:, :3], branch_ids=ids[:, :3], after_embedding=lambda x: x[:, :2])


@pytest.mark.slow
def test_a_compiled_block_is_one_graph_for_all_trees():
    """No graph break under a mask, and no new graph for the mask of the next batch; documents alone break as before."""
    from torch._dynamo.testing import CompileCounter

    model, tree, counter = build(), Tree(4), CompileCounter()
    wanted = tree.together(model)[0]
    for block in model.blocks():
        block.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(tree.together(model)[0], wanted, rtol=1e-5, atol=1e-5)
    compiled = counter.frame_count
    tree.branch_ids = tree.branch_ids.clamp(max=2)
    tree.together(model)
    assert counter.frame_count == compiled
    torch._dynamo.reset()
