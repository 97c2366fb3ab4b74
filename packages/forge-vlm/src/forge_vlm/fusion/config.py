"""Options of the fusions, and rules for mesh axes and decoders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge_core.model import BLOCK_NAMES, GATED, UNGATED
from forge_vlm._config import is_finite, is_size, size_problems
from forge_vlm._renamed import renamed
from forge_vlm._shared.problems import Problem, invalid, raise_problems

__all__ = [
    "PARTING",
    "CrossAttentionConfig",
    "MixtureOfTransformersConfig",
    "MoMaConfig",
    "axes_problems",
    "fusion_problems",
    "groups_of",
    "require_full_sequences",
]

SEES = ("last", "group", "all")


@dataclass(frozen=True)
class CrossAttentionConfig:
    """Where blocks of cross-attention stand, and which images a token sees.

        CrossAttentionConfig()                                            # before every second text layer
        CrossAttentionConfig(every_n_layers=4, qk_norm=True)              # Llama 3.2 Vision
        CrossAttentionConfig(every_n_layers=1, sees="last")               # Flamingo

    Text layers keep their numbers: a decoder of `num_layers` has these blocks besides. The cross layers 3, 8, 13, ...
    of all 40 of Llama 3.2 Vision 11B stand before its text layers 3, 7, 11, ... of 32.
    """

    every_n_layers: int = 2
    """a block stands before the last of every n text layers; layers overrides it"""
    layers: tuple[int, ...] = ()
    """text layers with a block before them, from 0; empty: by every_n_layers"""
    sees: Literal["last", "group", "all"] = "group"
    """images that a token sees: last (the one before it), group (with those side by side with that one), all"""
    qk_norm: bool = False
    """RMSNorm on queries and keys of each head (Llama 3.2 Vision)"""

    def __post_init__(self) -> None:
        raise_problems("cross_attention", _cross_problems(self))

    def before(self, num_layers: int) -> tuple[int, ...]:
        """Text layers of a decoder of `num_layers` with a block before them, in order."""
        if self.layers:
            return tuple(sorted(self.layers))
        return tuple(range(self.every_n_layers - 1, num_layers, self.every_n_layers))

    def problems(self, num_layers: int) -> Iterator[Problem]:
        """Problems of places that a decoder of `num_layers` does not have."""
        where = self.before(num_layers)
        if not where:
            rule = f"must be at most num_layers {num_layers}, or no block sees images"
            fix = f"use {num_layers} or less"
            value = self.every_n_layers
            yield Problem("fusion.cross_attention.every_n_layers", "range", value, rule, fix)
        elif where[-1] >= num_layers:
            rule = f"must be below num_layers {num_layers}, the number of text layers"
            fix = "correct them"
            yield Problem("fusion.cross_attention.layers", "range", self.layers, rule, fix)


def _cross_problems(c: CrossAttentionConfig) -> Iterator[Problem]:
    if not is_size(c.every_n_layers, 2**16):
        rule = "must be a whole number, at least 1"
        yield Problem("every_n_layers", "size", c.every_n_layers, rule, "use 4")
    wrong = [n for n in c.layers if isinstance(n, bool) or not isinstance(n, int) or n < 0]
    if wrong or len(set(c.layers)) != len(c.layers):
        rule = "must be different whole numbers from 0"
        yield Problem("layers", "duplicate", c.layers, rule, "use [3, 7]")
    if c.sees not in SEES:
        rule = f"must be {', '.join(SEES[:-1])} or {SEES[-1]}"
        yield Problem("sees", "unknown", c.sees, rule, "use 'group'")
    if not isinstance(c.qk_norm, bool):
        yield Problem("qk_norm", "type", c.qk_norm, "must be true or false", "use true")


TEXT = "text"
PARTING = ("mixture_of_transformers", "moma")  #: Fusions whose blocks read modality ids.
ROUTERS = ("token_choice", "expert_choice", "auxiliary_router")
SCOPES = ("sequence", "micro_batch")
_SHARE = {"help": "modalities that use what another has, such as video = 'image'"}


@dataclass(frozen=True)
class MixtureOfTransformersConfig:
    """Weights of each modality, of all but attention itself (Liang et al. 2024, arXiv 2411.04996).

    MixtureOfTransformersConfig(share={"video": "image"})   # two towers: text's, and one for both
    """

    share: dict[str, str] = dataclasses.field(default_factory=dict, hash=False, metadata=_SHARE)


@dataclass(frozen=True)
class MoMaConfig:
    """Feed-forwards of experts in groups, one group for each modality (Lin et al. 2024, arXiv 2407.21770).

    "token_choice": each token takes its `top_k` experts by softmax. "expert_choice": each expert takes the tokens of
    its modality with the largest sigmoid gates, for training only. "auxiliary_router": trained like it, with a small
    predictor of its choice next to it, which then chooses for each token by itself.
    """

    router: Literal["token_choice", "expert_choice", "auxiliary_router"] = "token_choice"
    """who chooses in a group: token_choice, expert_choice, auxiliary_router"""
    num_experts: int = 4
    """experts of each group that `experts` does not name"""
    experts: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)
    """experts of a modality's group, by its name; text is that of text"""
    hidden_dim: int | None = None
    """width inside an expert; empty: that of the feed-forward that they replace"""
    top_k: int = 2
    """experts of a token, by token choice"""
    normalize: bool = True
    """gates of a token are divided by their sum, so that copies of one expert are it"""
    capacity_factor: float = 1.0
    """experts of a token on average, where experts choose: each takes this fraction of n / experts"""
    scope: Literal["sequence", "micro_batch"] = "sequence"
    """among which tokens an expert chooses: each document's, or the micro-batch's"""
    gumbel_noise: float = 0.0
    """factor of the noise on the gates' logits while experts choose (upcycling: 1)"""
    balance_loss: float = 0.01
    """coefficient of the load balancing loss of each group, by token choice"""
    auxiliary_dim: int = 64
    """width inside the auxiliary routers"""
    share: dict[str, str] = dataclasses.field(default_factory=dict, hash=False, metadata=_SHARE)

    def __post_init__(self) -> None:
        raise_problems("moma", _moma_problems(self))


#: Fields that a router does not read.
_OF_CHOICE = ("capacity_factor", "scope", "gumbel_noise")
_FOREIGN = {
    "token_choice": (*_OF_CHOICE, "auxiliary_dim"),
    "expert_choice": ("top_k", "balance_loss", "auxiliary_dim"),
    "auxiliary_router": ("top_k", "balance_loss"),
}


def _moma_problems(c: MoMaConfig) -> Iterator[Problem]:
    if c.router not in ROUTERS:
        rule = f"must be one of {', '.join(ROUTERS)}"
        yield Problem("router", "unknown", c.router, rule, "use token_choice")
        return

    sizes = {"num_experts": 2**12, "hidden_dim": 2**24, "top_k": 2**12, "auxiliary_dim": 2**16}
    wrong = list(size_problems(c, sizes))
    yield from wrong
    for name, number in c.experts.items():
        if not is_size(number, 2**12):
            rule = "must be a whole number from 1 to 4096"
            yield Problem(f"experts.{name}", "size", number, rule, "use one")

    for key in _FOREIGN[c.router]:
        if getattr(c, key) != getattr(MoMaConfig, key):
            value = getattr(c, key)
            yield Problem(key, "foreign", value, f"is not read by router {c.router!r}", "remove it")

    if c.scope not in SCOPES:
        rule = f"must be one of {', '.join(SCOPES)}"
        yield Problem("scope", "unknown", c.scope, rule, "use sequence")
    for key in ("gumbel_noise", "balance_loss"):
        if not (is_finite(getattr(c, key)) and getattr(c, key) >= 0.0):
            rule = "must be a finite number, 0 or more"
            yield Problem(key, "range", getattr(c, key), rule, "use 0 for none")

    if not (is_finite(c.capacity_factor) and c.capacity_factor > 0.0):
        rule = "must be a finite number above 0"
        yield Problem("capacity_factor", "range", c.capacity_factor, rule, "use 1")
    if c.router == "token_choice" and not wrong:
        yield from _top_k_problems(c)


def _top_k_problems(c: MoMaConfig) -> Iterator[Problem]:
    counts = {"num_experts": c.num_experts} | {f"experts.{n}": e for n, e in c.experts.items()}
    for name, number in counts.items():
        if is_size(number, 2**12) and 1 < number < c.top_k:
            fix = "lower it, or give more experts"
            value = c.top_k
            yield Problem("top_k", "above_experts", value, f"must be at most {name} {number}", fix)
    if c.top_k == 1 and c.normalize and max(counts.values()) > 1:
        rule = "with normalize makes every gate 1, and a router without a gradient learns nothing"
        yield Problem("top_k", "normalize", c.top_k, rule, "set normalize = false, or top_k = 2")


def groups_of(names: list[str], share: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of the groups, text first, and the group of each modality (text among them)."""
    owner = {name: share.get(name, name) for name in (TEXT, *sorted(names))}
    return tuple(name for name in owner if owner[name] == name), owner


def fusion_problems(c: Any) -> Iterator[Problem]:
    """Problems of the fusion of a VLMConfig, and what it asks of the decoder."""
    name = c.fusion.name
    if name not in PARTING:
        return
    options = getattr(c.fusion, name)
    yield from _name_problems(name, list(c.modalities), options.share)

    if name == "moma":
        known = set(groups_of(list(c.modalities), options.share)[0])
        for group in sorted(set(options.experts) - known):
            rule = f"must be one of {', '.join(sorted(known))}"
            value = options.experts[group]
            yield Problem(f"fusion.moma.experts.{group}", "unknown", value, rule, "correct it")
    else:
        asked = {"mixer": ("attention",), "block": BLOCK_NAMES, "feed_forward": (*GATED, *UNGATED)}
        for key, allowed in asked.items():
            if getattr(c, key) not in allowed:
                rule = f"must be {', '.join(allowed)} with fusion {name!r}, which runs its parts on rows of one modality"
                yield Problem(key, "fusion", getattr(c, key), rule, "use one")

        if c.attention.sinks:
            rule = f"is not computed by fusion {name!r}"
            yield Problem("attention.sinks", "fusion", c.attention.sinks, rule, "use sinks = false")

    if name == "moma" and c.feed_forward not in (*GATED, *UNGATED):
        rule = "must be built in with fusion 'moma', whose experts have its shape"
        yield Problem("feed_forward", "built_in", c.feed_forward, rule, "use swiglu")


def axes_problems(
    c: Any, *, tp: int = 1, cp: int = 1, ep: int = 1, experts: Sequence[str] = ()
) -> Iterator[Problem]:
    """Mesh axes that a VLMConfig cannot be computed on; the key of a problem is the axis.

    experts: feed-forwards whose experts the ranks of ep can divide.
    """
    name, moma = c.fusion.name, c.fusion.moma
    if cp > 1 and c.bidirectional != "none":
        rule = (
            f"splits sequences whose tokens attend both ways by bidirectional {c.bidirectional!r}"
        )
        yield Problem("cp", "bidirectional", cp, rule, "use cp = 1, or 'none'")
    if cp > 1 and name == "moma" and moma.router != "token_choice":
        rule = f"splits the sequences among whose tokens the experts of fusion.moma.router {moma.router!r} choose"
        yield Problem("cp", "router", cp, rule, "use cp = 1, or token_choice")
    if ep == 1 or name not in PARTING:
        return
    if name != "moma":
        rule = f"must be 1 with fusion {name!r}, whose weights of a modality are not experts"
        yield Problem("ep", "fusion", ep, rule, "use data ranks, or the fusion moma")
        return

    if tp > 1:
        rule = f"must go without tp {tp}, whose ranks would send the experts of a modality of 'moma' the same tokens"
        yield Problem("ep", "tp", ep, rule, "use tp = 1, or ep = 1")
    if c.feed_forward not in experts:
        rule = f"must go with feed_forward {' or '.join(experts)}, and it is {c.feed_forward!r}"
        yield Problem("ep", "feed_forward", ep, rule, "use ep = 1")
    for group in groups_of(list(c.modalities), moma.share)[0]:
        if (num := moma.experts.get(group, moma.num_experts)) % ep:
            rule = f"must divide the {num} experts of modality {group!r} of fusion.moma"
            yield Problem("ep", "divides", ep, rule, f"use ep = 1, or {-(-num // ep) * ep} experts")


def _name_problems(table: str, names: list[str], share: Mapping[str, str]) -> Iterator[Problem]:
    for name in names:
        if name == TEXT or not name.isidentifier():
            rule = (
                f"must be a word other than 'text' with fusion {table!r}, which names weights by it"
            )
            yield Problem(f"modalities.{name}", "name", ..., rule, "rename it")
    for name, other in share.items():
        if name not in names or other not in (TEXT, *names) or other in share:
            rule = f"must lead from one of the modalities {', '.join(names)} to 'text' or one that shares with none"
            yield Problem(f"fusion.{table}.share", "unknown", {name: other}, rule, "correct it")


def require_full_sequences(fusion: Any) -> None:
    """ValueError for a FusionConfig whose experts choose among all tokens of a sequence, where ranks hold parts of rows."""
    if fusion.name == "moma" and fusion.moma.router != "token_choice":
        rule = "chooses among all tokens of a sequence, of which each rank of cp has a part"
        fix = "use cp = 1, or token_choice"
        raise invalid("fusion.moma.router", "split_rows", fusion.moma.router, rule, fix)


__getattr__ = renamed(__name__)
