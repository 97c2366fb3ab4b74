"""The dense decoder-only transformer and its output heads.

Shapes: B sequences, S tokens, D width of the residual stream, V vocabulary, K modules of multi-token prediction (MTP).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core._renamed import reject_old_head, renamed, renamed_argument
from forge_core._shared.module_arguments import FromConfig, config_arguments
from forge_core._shared.module_protocols import check_names
from forge_core._shared.problems import invalid
from forge_core.flops import forward_flops
from forge_core.kinds import is_matrix, parameter_kinds
from forge_core.model.attention_ops import AttentionSpec
from forge_core.model.block import build_block, build_mixer, check_parts, prepare, roles_of
from forge_core.model.config import TransformerConfig
from forge_core.model.context import TokenContext, TokenMask, default_positions
from forge_core.model.feed_forward import build_feed_forward
from forge_core.model.init import Init, initialize
from forge_core.model.kv_cache import KVCache, require_causal
from forge_core.model.mtp import MTPModule
from forge_core.model.norm import build_norm

Factory = Callable[[int], nn.Module]
#: Takes hidden states (B, S, D) and the head's weight (V, D), and `softcap` if logits have one: `LinearCrossEntropy`.
HeadLoss = Callable[..., Tensor]


class LogitsTransform(NamedTuple):
    """Turn logits z into softcap * tanh(scale z / softcap), or scale z. A soft-cap keeps one more (B, S, V)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def call(self, loss: HeadLoss, x: Tensor, weight: Tensor) -> Tensor:
        """Call a loss that computes the logits itself, with the scale in x and a soft-cap as keyword."""
        given = {} if self.softcap is None else {"softcap": self.softcap}
        return loss(x if self.scale == 1.0 else x * self.scale, weight, **given)


class Head(nn.Linear):
    """The output projection: (B, S, D) -> (B, S, V), or the result of `loss(x, weight (V, D))`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.dim, config.vocab_size, bias=False)
        self.transform = LogitsTransform(config.logits_scale, config.logits_softcap)

    def forward(self, x: Tensor, loss: HeadLoss | None = None) -> Tensor:
        if loss is not None:
            return self.transform.call(loss, x, self.weight)
        return self.transform(super().forward(x))


class TiedHead(nn.Module):
    """The output projection by the embedding's weight (V, D), an argument: a parameter would be untied by `to_empty`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.transform = LogitsTransform(config.logits_scale, config.logits_softcap)

    def forward(self, x: Tensor, weight: Tensor, loss: HeadLoss | None = None) -> Tensor:
        if loss is not None:
            return self.transform.call(loss, x, weight)
        return self.transform(F.linear(x, weight))


class Transformer(FromConfig, nn.Module):
    """Decoder-only transformer of Llama's shape; sublayers and blocks can be replaced.

        model = Transformer(vocab_size=256, dim=128, num_layers=4, num_heads=4)
        logits = model(tokens)                                  # (B, S) int64 -> (B, S, V)

    Keywords are the fields of `TransformerConfig`, `device` and `dtype`; `Transformer(config)` takes a config.

    `mixer`, `feed_forward` and `block` are factories `(layer_index) -> nn.Module` on (B, S, D). A
    mixer is called `forward(x, ctx, cache=None)` with its own LayerCache, a feed-forward
    `forward(x, ctx)`, a block `forward(x, ctx, cache=None)`; ctx is the TokenContext of the call.
    Without a factory the config's `mixer`, `feed_forward` and `block` name the part (see `check_parts`).
    Optional methods of all of them are in `forge_core.protocols`.

    Initial values are those of `initialize(model, seed=0)`; on the meta device parameters stay empty until
    `to_empty` and `initialize`. There are no buffers.
    """

    #: Keywords of forward that the host reads; code that moves the others to an accelerator leaves them.
    host_inputs = ("document_ids",)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        reject_old_head(cls)

    @config_arguments(TransformerConfig)
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
        # parts read the standard parametrization, which has the factors of any other one as scales
        built = config.as_standard()
        mixer = mixer or partial(build_mixer, built)
        feed_forward = feed_forward or partial(build_feed_forward, built)
        block = block or (lambda i: build_block(built, mixer(i), feed_forward(i)))

        # filled by `initialize`; torch's own draw would import its compiler on the meta device (0.4 s)
        empty = torch.empty(config.vocab_size, config.dim)
        self.embedding = nn.Embedding(config.vocab_size, config.dim, _weight=empty)
        self.layers = nn.ModuleDict({str(i): block(i) for i in range(config.num_layers)})
        self.norm = build_norm(config)
        modules = {
            str(k): MTPModule(built, block(config.num_layers + k))
            for k in range(config.mtp.num_modules)
        }
        self.mtp: Any = nn.ModuleDict(modules) if modules else None
        self.lm_head: nn.Module = TiedHead(built) if config.tie_embeddings else Head(built)
        check_names(self)
        if not self.embedding.weight.is_meta:
            initialize(self, seed=0, strict=False)

    def reset_parameters(self) -> None:
        """Fill all parameters as `initialize(self, seed=0)`, also after `to_empty`: call it on the full model.

        Code that calls it of every module in `modules()` overwrites these values by those of torch's layers.
        """
        initialize(self, seed=0, strict=False)

    def extra_repr(self) -> str:
        c = self.config
        return f"vocab_size={c.vocab_size}, dim={c.dim}, num_layers={c.num_layers}, num_heads={c.num_heads}"

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the model of a local Hugging Face folder, in eval mode: dense families, safetensors, one process.

            model = Transformer.from_pretrained("Qwen3-0.6B", device="cuda", dtype=torch.bfloat16)

        device, dtype: of the parameters; by default torch's own (fp32), whatever the dtype of the files.

        Raises ValueError for an unknown architecture, keys of `config.json` that cannot be held, and tensors that are
        missing, unknown or of other shapes, before memory is allocated. Nothing is downloaded.
        """
        from forge_core.families import DENSE_FAMILIES, PretrainedFolder

        return PretrainedFolder(folder, DENSE_FAMILIES).build(cls, device, dtype)

    def save_pretrained(self, folder: str | os.PathLike[str], family: str | None = None) -> None:
        """Write `config.json` and safetensors as a new folder that transformers loads; see `families.save_folder`.

        family: the `model_type`, by default that of the loaded folder, or the first that can hold the model.
        """
        from forge_core.families import DENSE_FAMILIES, save_folder

        save_folder(self, folder, DENSE_FAMILIES, family)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        last_only: bool = False,
        loss: HeadLoss | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Compute logits (B, S, V) of tokens (B, S) int64, in the compute dtype; `hidden`, then `project`.

        positions, document_ids and inputs are those of `hidden`. A stage of a pipeline without the head returns its
        stream (B, S, D).
        last_only: give (B, 1, V).
        loss: computed in place of logits, from hidden states and the head's weight; see `project`. It is an argument of
        forward, as FSDP2 gathers weights only in forward.

        Raises ValueError for a sequence longer than max_seq_len and for shapes and dtypes that do not fit.
        """
        if "then" in inputs:
            loss = renamed_argument(inputs, "then", "loss")
        x = self.hidden(tokens, positions, document_ids, **inputs)
        if self.norm is None:
            return x
        # sliced before the head, whose logits are the largest tensor
        return self.project(x[:, -1:] if last_only else x, loss)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        next_tokens: Tensor | None = None,
        token_ids: Tensor | None = None,
        modality_ids: Tensor | None = None,
        media: Any = None,
        mask: TokenMask | None = None,
        layer_features: Sequence[Tensor] = (),
    ) -> Tensor:
        """Compute hidden states (B, S, D) of tokens (B, S) int64: the stream after all blocks and the final norm.

        positions: (B, S) or (1, S), or (B, 3, S) with `config.mrope`; by default they count from 0 in each document,
        and go on after cached tokens.
        document_ids: (B, S), integers on any device: tokens see their own document only, and a negative id is padding.
        On an accelerator they cost one host sync, on the CPU none. With a cache and no document_ids every sequence
        continues its newest document.
        next_tokens: (B, K, S), in training the tokens 1 to K after each, for `mtp.num_modules` K. The result is then
        ((K + 1) B, S, D), the sequences of the next token first. Entries past the end of a document are ignored, and a
        stage without the head ignores all.
        token_ids: (B, S), for a stage of a pipeline. It takes the stream (B, S, D) of the stage before in place of
        tokens, and returns its own if norm and head are None; its blocks have no other token ids.
        modality_ids: (B, S), and media, for the blocks of models of several modalities.
        mask: replaces the causal mask of unsharded sequences.
        layer_features: layer_features[i] (B, S, D) is added to the stream after block i (DeepStack, Meng et al. 2024).

        Under FSDP2 it runs inside of `forward` only. Raises as `forward`.
        """
        rest = token_ids, modality_ids, media, mask
        ctx = self.context(tokens, positions, document_ids, cache, *rest)
        x = tokens if tokens.is_floating_point() else self.embed(tokens)  # (B, S, D)
        caches = {key: cache.layer(key) if cache is not None else None for key in self.layers}
        # all before the first block, so that compiled blocks only read the context
        for key, block in self.layers.items():
            prepare(block, ctx, x, caches[key])

        for key, block in self.layers.items():
            x = block(x, ctx, caches[key])
            if layer_features and int(key) < len(layer_features):
                x = x + layer_features[int(key)]
        if cache is not None:
            cache.history.advance(document_ids, *tokens.shape[:2])

        if self.norm is None:
            return x
        return self.norm(x) if next_tokens is None else self._mtp_hidden(x, next_tokens, ctx)

    def project(self, hidden: Tensor, loss: HeadLoss | None = None) -> Tensor:
        """Project hidden states (B, S, D) to logits (B, S, V), or return `loss(hidden, weight)`.

        A `loss` such as `LinearCrossEntropy` never holds all logits. It runs inside the head's forward, where FSDP2 has
        gathered the weight; under tensor parallelism weight is this rank's (V / tp, D), and hidden states are not
        sharded. They are multiplied by `logits_scale` already, and a soft-cap is the keyword `softcap`.
        """
        weights = (self.embedding.weight,) if isinstance(self.lm_head, TiedHead) else ()
        # a subclass with a head of its own may not take a loss
        given = {} if loss is None else {"loss": loss}
        return self.lm_head(hidden, *weights, **given)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens (B, S) as the stream (B, S, D)."""
        x: Tensor = self.embedding(tokens)
        scale = self.config.embedding_scale
        # rounded as the embeddings are, which transformers' Gemma does
        return x if scale == 1.0 else x * x.new_full((), scale)

    def _mtp_hidden(self, x: Tensor, next_tokens: Tensor, ctx: TokenContext) -> Tensor:
        """Hidden states of the stream x (B, S, D) and of the MTP modules: ((K + 1) B, S, D)."""
        modules = self.mtp or {}
        if next_tokens.size(1) != len(modules):
            rule = f"must be (B, {len(modules)}, S) for mtp.num_modules {len(modules)}"
            fix = "give the next tokens for each module"
            raise invalid("next_tokens", "shape", tuple(next_tokens.shape), rule, fix)

        streams = [self.norm(x)]
        for module, tokens in zip(modules.values(), next_tokens.unbind(1)):
            module.prepare(ctx, x)
            x = module(x, self.embed(tokens), ctx)
            streams.append(module.norm(x))
        return torch.cat(streams)

    def head(self, stream: Tensor) -> Tensor:
        """Logits (B, S, V) of a stream (B, S, D) of any depth, by the final norm and the projection (logit lens)."""
        return self.project(self.norm(stream))

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
        """Build the context that `hidden` hands to its blocks; check lengths and shapes.

        tokens may be a stream (B, S, D) that is sharded over ranks: S is then the length of document_ids or
        positions, if there are any.
        """
        _check_tokens(tokens, self.config.dim)
        batch, size = tokens.shape[:2]
        if not tokens.is_floating_point():
            token_ids = tokens
        else:
            per_token = positions if document_ids is None else document_ids
            size = size if per_token is None else per_token.size(-1)

        past = 0 if cache is None else cache.length
        if past + size > self.config.max_seq_len:
            cached = f" ({past} of them cached)" if past else ""
            total = f"makes a sequence of {past + size} tokens{cached}"
            rule = f"{total}, longer than max_seq_len {self.config.max_seq_len}"
            fix = "shorten it or raise max_seq_len"
            raise invalid("tokens", "length", tuple(tokens.shape), rule, fix)
        if document_ids is not None and document_ids.shape != (batch, size):
            rule = f"must have the shape of tokens {(batch, size)}"
            shape = tuple(document_ids.shape)
            raise invalid("document_ids", "shape", shape, rule, "give one id per token")

        shapes = [(batch, size), (1, size)] + ([(batch, 3, size)] if self.config.mrope else [])
        if positions is not None and positions.shape not in shapes:
            more = "" if self.config.mrope else ", or one for each axis with mrope"
            rule = f"must be {' or '.join(map(str, shapes))}"
            fix = f"give one position per token{more}"
            raise invalid("positions", "shape", tuple(positions.shape), rule, fix)
        if positions is None:
            first = None
            if cache is not None:
                first = [starts[0] for starts in cache.history.peek(document_ids, batch, size)]
            positions = default_positions(size, document_ids, tokens.device, past, first)
        valid = _not_padding(document_ids, tokens.device)
        return TokenContext(token_ids, valid, document_ids, modality_ids, positions, media, mask)

    def new_cache(self, max_length: int) -> KVCache:
        """Create an empty cache for sequences of up to `max_length` tokens.

        ValueError if a layer has `needs_whole_rows` set, or its attention's spec has a mask of its own.
        """
        for name, module in self.named_modules():
            if isinstance(getattr(module, "spec", None), AttentionSpec):
                require_causal(module.spec)
            if getattr(module, "needs_whole_rows", False):
                rule = (
                    "chooses among all tokens of a sequence and cannot decode one token at a time"
                )
                fix = "score full sequences with it, or train a router that chooses per token"
                raise invalid(name, "needs_whole_rows", ..., rule, fix)
        return KVCache(max_length)

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """Initial values of embedding and head: their std is that of the base's width; see `model.mup`."""
        scales = self.config.scales
        if scales.width == 1.0:
            return {}
        here = {name for name, _ in self.named_parameters()}
        names = here & {"embedding.weight", "lm_head.weight"}
        return dict.fromkeys(names, Init("normal", std / scales.std))

    def lr_scales(self) -> dict[str, float]:
        """Return {parameter: factor of its learning rate} if the parametrization has factors; see `model.mup`."""
        if self.config.parametrization == "standard":
            return {}
        scales = self.config.scales
        found = {}
        for name, kind in parameter_kinds(self).items():
            in_mtp = name.startswith("mtp.")
            if name.startswith("layers.") or (in_mtp and ".block." in name):
                found[name] = scales.lr(matrix=is_matrix(kind))
            elif in_mtp and name.endswith(".join.weight"):
                found[name] = 1.0 / scales.width  # there is one, whatever the depth
        return found

    def blocks(self) -> list[nn.Module]:
        """The blocks in order of depth."""
        return list(self.layers.values())

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding; None in a stage of a pipeline without it."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head; None in a stage without it. Tied, it has no parameters."""
        return self.lm_head

    def pipeline_parts(self) -> dict[str, Any]:
        """Children in order of depth, for a pipeline: before the blocks, the blocks, after them.

        An embedding that is tied or that MTP modules read is at both ends. A stage of the model returns the same.
        """
        mtp = ("mtp",) if self.config.mtp.num_modules else ()
        both = ("embedding",) if self.config.tie_embeddings or mtp else ()
        last = ("norm", *both, *mtp, "lm_head")
        return {"first": ("embedding",), "blocks": "layers", "last": last}

    def parallel_roles(self) -> dict[str, Any]:
        """Role of every parameter under tensor parallelism: {pattern: role}.

        In a pattern `*` stands for any characters (as in fnmatch); each parameter matches exactly one. A tied head has
        no parameter, so its module is named. A role may be {"role": name, "multiple_of": width of a head}.

            colwise, rowwise       a linear layer, sharded by outputs or by inputs
            shared_heads           colwise; several ranks may have the same head
            vocab                  an embedding, sharded by ids
            sharded_logits         colwise; the outputs are logits
            sequence               a norm on a token-sharded stream
            replicate_sum_grad     replicated; gradients are summed over ranks
            enter                  a module without parameters whose output the heads of all ranks read
            expert                 a stack of experts
            opaque                 a module that needs all tokens of a sequence
        """
        roles: dict[str, Any] = {"embedding.*": "vocab", "norm.*": "sequence"}
        roles["lm_head" if self.config.tie_embeddings else "lm_head.*"] = "sharded_logits"
        for key, block in self.layers.items():
            roles.update(roles_of(block, f"layers.{key}"))
        for key, module in (self.mtp or {}).items():
            roles.update(roles_of(module, f"mtp.{key}"))
        return roles

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs of the matmuls for one token in sequences of `seq_len`.

        Blocks and output head; the embedding is a lookup and costs none. Attention is counted
        causally, at half of seq_len. A backward pass costs twice this again. MTP modules and their
        passes of the head are counted, as in training.
        """
        head = 2.0 * self.config.dim * self.config.vocab_size
        modules = list((self.mtp or {}).values())
        inside = sum(forward_flops(module, seq_len) for module in (*self.blocks(), *modules))
        return head * (1 + len(modules)) + inside


def _check_tokens(tokens: Tensor, dim: int) -> None:
    """Check shape and dtype only, which costs no sync and works on meta, fake and compiled tensors."""
    if tokens.is_floating_point():
        if tokens.dim() != 3 or tokens.size(-1) != dim:
            stream = f"a stream (B, S, {dim}) from another stage of a pipeline"
            rule = f"{tokens.dtype} must be integer ids (B, S), or {stream}"
            raise invalid("tokens", "stream", tuple(tokens.shape), rule, "convert ids with .long()")
    elif tokens.dtype not in (torch.int64, torch.int32):
        raise invalid("tokens", "dtype", tokens.dtype, "must be int64 or int32", "use .long()")
    elif tokens.dim() != 2:
        fix = "add a dim for one sequence: tokens[None]"
        raise invalid("tokens", "shape", tuple(tokens.shape), "must be (B, S)", fix)


def _not_padding(document_ids: Tensor | None, device: torch.device) -> Tensor | None:
    """Return True at tokens of documents (ids from 0 up), or None if the host can see that there is no padding."""
    if document_ids is None:
        return None
    valid = document_ids >= 0
    # on an accelerator looking would cost a sync
    if valid.device.type == "cpu" and bool(valid.all()):
        return None
    return valid.to(device, non_blocking=True)


__getattr__ = renamed(__name__)
