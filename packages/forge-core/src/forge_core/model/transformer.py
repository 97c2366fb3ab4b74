"""The dense decoder-only transformer.

Shapes: B rows, S tokens, D width of the residual stream, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_core._shared.problems import invalid
from forge_core.flops import forward_flops
from forge_core.kinds import is_matrix, parameter_kinds
from forge_core.model.block import prepare, roles_of
from forge_core.model.config import TransformerConfig
from forge_core.model.context import TokenContext, TokenMask, default_positions
from forge_core.model.feed_forward import build_feed_forward
from forge_core.model.head import Head, Then, TiedHead
from forge_core.model.init import Init, initialise
from forge_core.model.kv_cache import KVCache, refuse_mask
from forge_core.model.mtp import NextTokenModule
from forge_core.model.norm import build_norm
from forge_core.model.parts import build_block, build_mixer, check_parts
from forge_core.model.spec import AttentionSpec

Factory = Callable[[int], nn.Module]


class Transformer(nn.Module):
    """Decoder-only transformer of Llama's shape, with places for other sublayers.

        model = Transformer(TransformerConfig(vocab_size=256, dim=128, num_layers=4, num_heads=4))
        logits = model(tokens)                                  # (B, S) int64 -> (B, S, V)

    `mixer`, `feed_forward` and `block` are factories `(layer_index) -> nn.Module` on (B, S, D). A
    mixer is called `forward(x, ctx, cache=None)` with its own LayerCache, a feed-forward
    `forward(x, ctx)`, a block `forward(x, ctx, cache=None)`; ctx is the TokenContext of the call.
    Without one the config's `mixer`, `feed_forward` and `block` name what is built (see `check_parts`).
    A mixer or a feed-forward may offer `prepare(ctx, x, cache)`, any of them `init_table(std, residual_std)`,
    `parallel_roles()` and `flops_per_token(seq_len)`.

    Parameters begin from `initialise(model, seed=0)`; on the meta device they stay empty until
    `to_empty` and `initialise`. There are no buffers.
    """

    #: Keywords of forward that the host reads; who moves the others to an accelerator leaves them.
    host_inputs = ("document_ids",)

    def __init__(
        self,
        config: TransformerConfig,
        mixer: Factory | None = None,
        feed_forward: Factory | None = None,
        block: Factory | None = None,
    ) -> None:
        super().__init__()
        if block is not None and (mixer is not None or feed_forward is not None):
            rule, fix = "replaces mixer and feed_forward", "give either block or the other two"
            raise invalid("block", "excludes", ..., rule, fix)
        self.config = config
        check_parts(config)
        # the parts need not know of parametrizations: scales are keys of the standard one
        built = config.as_standard()
        mixer = mixer or partial(build_mixer, built)
        feed_forward = feed_forward or partial(build_feed_forward, built)
        block = block or (lambda i: build_block(built, mixer(i), feed_forward(i)))
        # filled by `initialise`; torch's own draw would import its compiler on the meta device (0.4 s)
        empty = torch.empty(config.vocab_size, config.dim)
        self.embedding = nn.Embedding(config.vocab_size, config.dim, _weight=empty)
        self.layers = nn.ModuleDict({str(i): block(i) for i in range(config.num_layers)})
        self.norm = build_norm(config)
        ahead = range(config.mtp.num_modules)
        modules = {str(k): _next_token_module(built, block(config.num_layers + k)) for k in ahead}
        self.mtp: Any = nn.ModuleDict(modules) if modules else None
        tied = config.tie_embeddings
        self.lm_head: nn.Module = TiedHead(built) if tied else Head(built)
        if not self.embedding.weight.is_meta:
            initialise(self, seed=0, strict=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        last_only: bool = False,
        token_ids: Tensor | None = None,
        then: Then | None = None,
        next_tokens: Tensor | None = None,
        modality_ids: Tensor | None = None,
        layer_features: Sequence[Tensor] = (),
        media: Any = None,
        mask: TokenMask | None = None,
    ) -> Tensor:
        """Logits (B, S, V) of tokens (B, S) int64, in the compute dtype.

        positions (B, S) or (1, S); by default they count from 0 in each document, and go on after
        cached tokens. document_ids (B, S), integers on any device: tokens see their own document
        only, and a negative id is padding; on an accelerator they cost one host sync, on the CPU none. With a cache and no
        document_ids every row continues its newest document. `last_only` gives (B, 1, V).

        A stage of a pipeline takes the stream (B, S, D) of the stage before in place of tokens, and gives its
        own where norm and head are None; blocks there know `token_ids` (B, S) only if they are passed.

        `then(x, weight)` takes the stream behind the final norm (B, S, D) and the head's weight (V, D), and its
        tensor is returned in place of logits: a loss that never holds all of them (`fused_cross_entropy`). It
        runs inside the head's forward, the one place where that weight is gathered (FSDP2); under tensor
        parallelism weight is this rank's rows (V / tp, D), and x whole tokens.

        next_tokens (B, K, S) are the tokens 1 to K ahead of each, for `mtp.num_modules` K in training: then the
        logits (or the stream that `then` takes) have (K + 1) B rows, those of the next token first. What stands where
        a document has no such token is read by no row that has one, and a stage without the head ignores it.

        For models of several modalities: modality_ids (B, S) and media reach the blocks in their context, and
        layer_features[i] (B, S, D) is added to the stream behind block i (DeepStack, Meng et al. 2024). positions may
        be (B, 3, S) with `config.mrope`. mask says who sees whom in whole rows, where that is not causal.

        Raises ValueError for a row longer than max_seq_len and for shapes and dtypes that do not fit.
        """
        about = token_ids, modality_ids, media, mask
        ctx = self.context(tokens, positions, document_ids, cache, *about)
        x = tokens if tokens.is_floating_point() else self.embed(tokens)  # (B, S, D)
        parts = {key: cache.layer(key) if cache is not None else None for key in self.layers}
        for key, block in self.layers.items():
            prepare(block, ctx, x, parts[key])
        for key, block in self.layers.items():
            x = block(x, ctx, parts[key])
            if layer_features and int(key) < len(layer_features):
                x = x + layer_features[int(key)]
        if cache is not None:
            cache.history.advance(document_ids, *tokens.shape[:2])
        if next_tokens is not None and self.norm is not None:
            return self._ahead(x, next_tokens, ctx, then)
        x = x[:, -1:] if last_only else x
        # a subclass with its own head may not take a loss
        return self.head(x) if then is None else self.head(x, then)

    def embed(self, tokens: Tensor) -> Tensor:
        """The stream (B, S, D) of tokens (B, S)."""
        x: Tensor = self.embedding(tokens)
        scale = self.config.embedding_scale
        # rounded as the embeddings are, which transformers' Gemma does
        return x if scale == 1.0 else x * x.new_full((), scale)

    def head(self, x: Tensor, then: Then | None = None) -> Tensor:
        """Final norm and output projection: (B, S, D) -> (B, S, V); x itself where another stage has them.

        `then` as in `forward`: its x has `logits_scale` in it already, and a soft-cap comes as keyword `softcap`.
        """
        return x if self.norm is None else self._project(self.norm(x), then)

    def _project(self, x: Tensor, then: Then | None) -> Tensor:
        weights = (self.embedding.weight,) if isinstance(self.lm_head, TiedHead) else ()
        given = {} if then is None else {"then": then}
        out: Tensor = self.lm_head(x, *weights, **given)
        return out

    def _ahead(
        self, x: Tensor, next_tokens: Tensor, ctx: TokenContext, then: Then | None
    ) -> Tensor:
        """What the head makes of the stream x (B, S, D) and of those of the modules, as rows of one batch."""
        if self.mtp is None or next_tokens.size(1) != len(self.mtp):
            have = 0 if self.mtp is None else len(self.mtp)
            rule = f"must be (B, {have}, S) for mtp.num_modules {have}"
            fix = "give the next tokens for each module"
            raise invalid("next_tokens", "shape", tuple(next_tokens.shape), rule, fix)
        streams = [self.norm(x)]
        for module, tokens in zip(self.mtp.values(), next_tokens.unbind(1)):
            module.prepare(ctx, x)
            x = module(x, self.embed(tokens), ctx)
            streams.append(module.norm(x))
        return self._project(torch.cat(streams), then)

    def context(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
        token_ids: Tensor | None = None,
        modality_ids: Tensor | None = None,
        media: Any = None,
        mask: TokenMask | None = None,
    ) -> TokenContext:
        """The context that `forward` hands to its blocks; checks lengths and shapes.

        tokens may be a stream (B, S, D), of which a rank may hold a part: S is then that of document_ids or
        positions, where there are any.
        """
        _check_tokens(tokens, self.config.dim)
        rows, size = tokens.shape[:2]
        if not tokens.is_floating_point():
            token_ids = tokens
        else:
            per_token = positions if document_ids is None else document_ids
            size = size if per_token is None else per_token.size(-1)

        past = 0 if cache is None else cache.length
        if past + size > self.config.max_seq_len:
            cached = f" ({past} of them cached)" if past else ""
            total = f"makes a row of {past + size} tokens{cached}"
            rule = f"{total}, longer than max_seq_len {self.config.max_seq_len}"
            fix = "shorten it or raise max_seq_len"
            raise invalid("tokens", "length", tuple(tokens.shape), rule, fix)
        if document_ids is not None and document_ids.shape != (rows, size):
            rule = f"must have the shape of tokens {(rows, size)}"
            shape = tuple(document_ids.shape)
            raise invalid("document_ids", "shape", shape, rule, "give one id per token")

        shapes = [(rows, size), (1, size)] + ([(rows, 3, size)] if self.config.mrope else [])
        if positions is not None and positions.shape not in shapes:
            more = "" if self.config.mrope else ", or one for each axis with mrope"
            rule, fix = (
                f"must be {' or '.join(map(str, shapes))}",
                f"give one position per token{more}",
            )
            raise invalid("positions", "shape", tuple(positions.shape), rule, fix)

        if positions is None:
            first = None
            if cache is not None:
                first = [starts[0] for starts in cache.history.peek(document_ids, rows, size)]
            positions = default_positions(size, document_ids, tokens.device, past, first)
        return TokenContext(
            token_ids=token_ids,
            valid=_not_padding(document_ids, tokens.device),
            document_ids=document_ids,
            modality_ids=modality_ids,
            positions=positions,
            media=media,
            mask=mask,
        )

    def new_cache(self, max_length: int) -> KVCache:
        """An empty cache for rows of up to `max_length` tokens.

        ValueError if a layer has `needs_whole_rows` set, or its attention's spec has a mask of its own.
        """
        for name, module in self.named_modules():
            if isinstance(getattr(module, "spec", None), AttentionSpec):
                refuse_mask(module.spec)
            if getattr(module, "needs_whole_rows", False):
                rule = "chooses among all tokens of a row and cannot decode one token at a time"
                fix = "score whole rows with it, or train a router that chooses per token"
                raise invalid(name, "needs_whole_rows", ..., rule, fix)
        return KVCache(max_length)

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """Embedding and head keep the standard deviation of a model of the base's width; see `model.mup`."""
        scales = self.config.scales
        if scales.width == 1.0:
            return {}
        outside = ("embedding.weight", "lm_head.weight")
        here = {name for name, _ in self.named_parameters()}
        return {name: Init("normal", std / scales.std) for name in outside if name in here}

    def lr_scales(self) -> dict[str, float]:
        """{parameter: factor of its learning rate} where the parametrization has one; see `model.mup`."""
        if self.config.parametrization == "standard":
            return {}
        scales = self.config.scales
        found = {}
        for name, kind in parameter_kinds(self).items():
            ahead = name.startswith("mtp.")
            if name.startswith("layers.") or (ahead and ".block." in name):
                found[name] = scales.lr(matrix=is_matrix(kind))
            elif ahead and name.endswith(".join.weight"):
                found[name] = 1.0 / scales.width  # stands once, whatever the depth
        return found

    def blocks(self) -> list[nn.Module]:
        """The blocks in order of depth."""
        return list(self.layers.values())

    def pipeline_parts(self) -> dict[str, Any]:
        """Children in order of depth, for a pipeline: before the blocks, the blocks, behind them.

        A tied embedding stands at both ends, and so does one that modules for tokens ahead read. The answer is the
        same in a part of the model.
        """
        ahead = ("mtp",) if self.config.mtp.num_modules else ()
        both = ("embedding",) if self.config.tie_embeddings or ahead else ()
        last = ("norm", *both, *ahead, "lm_head")
        return {"first": ("embedding",), "blocks": "layers", "last": last}

    def parallel_roles(self) -> dict[str, Any]:
        """Role of every parameter under tensor parallelism: {pattern: role}.

        In a pattern `*` stands for any characters (as in fnmatch); each parameter matches exactly
        one, and a tied head, which has none, is named itself. Roles: "colwise" and "rowwise" cut a
        linear layer by outputs and inputs, "shared_heads" by outputs, of which ranks may share one head, "vocab" an embedding by ids, "sharded_logits" a colwise
        layer whose outputs are logits, "sequence" a norm on a token-sharded stream,
        "replicate_sum_grad" a copy whose gradients are summed, "enter" a module without parameters whose output
        the heads of all ranks read, "expert" a stack of experts, "opaque" a module that sees whole tokens. A role
        may be {"role": name, "multiple_of": width of a head}.
        """
        roles: dict[str, Any] = {"embedding.*": "vocab", "norm.*": "sequence"}
        # a tied head has no parameter of its own: the row names the module
        roles["lm_head" if self.config.tie_embeddings else "lm_head.*"] = "sharded_logits"
        for key, block in self.layers.items():
            roles.update(roles_of(block, f"layers.{key}"))
        for key, module in (self.mtp or {}).items():
            roles.update(roles_of(module, f"mtp.{key}"))
        return roles

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs of the matrix products for one token in rows of `seq_len`.

        Blocks and output head; the embedding is a lookup and costs none. Attention is counted
        causally, at half of seq_len. A backward pass costs twice this again. Modules for tokens ahead and their
        passes of the head are counted, as in training.
        """
        head = 2.0 * self.config.dim * self.config.vocab_size
        ahead = list((self.mtp or {}).values())
        parts = sum(forward_flops(part, seq_len) for part in (*self.blocks(), *ahead))
        return head * (1 + len(ahead)) + parts


def _next_token_module(config: TransformerConfig, block: nn.Module) -> NextTokenModule:
    norms = (build_norm(config), build_norm(config), build_norm(config))
    return NextTokenModule(norms, block, config.dim)


def _check_tokens(tokens: Tensor, dim: int) -> None:
    """Shape and dtype alone, so it costs no sync and holds on meta, fake and compiled tensors."""
    if tokens.is_floating_point():
        if tokens.dim() != 3 or tokens.size(-1) != dim:
            stream = f"a stream (B, S, {dim}) from another stage of a pipeline"
            rule = f"{tokens.dtype} must be integer ids (B, S), or {stream}"
            raise invalid("tokens", "stream", tuple(tokens.shape), rule, "convert ids with .long()")
    elif tokens.dtype not in (torch.int64, torch.int32):
        raise invalid("tokens", "dtype", tokens.dtype, "must be int64 or int32", "use .long()")
    elif tokens.dim() != 2:
        fix = "add a dim for one row: tokens[None]"
        raise invalid("tokens", "shape", tuple(tokens.shape), "must be (B, S)", fix)


def _not_padding(document_ids: Tensor | None, device: torch.device) -> Tensor | None:
    """True where a document is (ids from 0 up); None where the host can see that it is everywhere."""
    if document_ids is None:
        return None
    valid = document_ids >= 0
    if valid.device.type == "cpu" and bool(valid.all()):
        return None
    return valid.to(device, non_blocking=True)
