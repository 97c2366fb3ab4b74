"""A decoder with eyes: features of images enter the stream of a transformer.

Shapes: B sequences, S tokens of a sequence, D width of the stream, M tokens of all media.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from forge_core import KVCache, SamplingConfig, Transformer, generate, initialize
from forge_core.flops import spared_flops
from forge_core.protocols import check_names
from forge_vlm._renamed import renamed
from forge_vlm._shared.problems import invalid
from forge_vlm.adapters import build_adapter
from forge_vlm.config import VLMConfig
from forge_vlm.flops import ImageWork, work_of_media
from forge_vlm.fusion.build import ExpertFactory, fusion_parts
from forge_vlm.fusion.config import PARTING, require_full_sequences
from forge_vlm.fusion.cross_attention import (
    CrossAttentionBlock,
    VisibleImages,
    check_images,
    images_by_sequence,
    visible_images,
    with_cross_blocks,
)
from forge_vlm.modalities import modality_ids
from forge_vlm.sequence.masks import (
    SequenceMask,
    build_mask,
    check_branches,
    planned_spans,
    require_no_mask,
)
from forge_vlm.sequence.plan import SequencePlan
from forge_vlm.sequence.positions import (
    VLMCache,
    check_placeholders,
    grids_of,
    place_features,
    plan_of,
)
from forge_vlm.vision.build import build_encoder, processor_pixels
from forge_vlm.vision.features import Features, values_of

__all__ = ["VLM", "VLMCache"]

Factory = Callable[[int], nn.Module]
_GREEDY = SamplingConfig(temperature=0.0)


class VLM(Transformer):
    """A `Transformer` whose tokens may be those of images.

        model = VLM(VLMConfig(vocab_size=256, modalities={"image": ModalityConfig(first_id=255)}))
        logits = model(tokens, images=images)           # (B, S) int64, (N, 3, H, W) -> (B, S, V)

    Everything that a Transformer has is here under the same name (parameters, generation, roles, stages), so weights
    of a text model are this model's, and `vision` and `adapter` are further children. Where tokens hold
    placeholders, the features of the images of all sequences, in order, take the place of their embeddings. With the fusion
    cross_attention a placeholder stands for a full image and keeps its embedding, and further layers "cross_i" before
    the text's layers "i" read the features.
    """

    config: VLMConfig
    #: This rank's part of a tensor (B, S, ...), set where embeddings are made for a part of the tokens only
    #: (sequence parallelism).
    token_part: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self,
        config: VLMConfig,
        mixer: Factory | None = None,
        feed_forward: Factory | None = None,
        block: Factory | None = None,
        experts: ExpertFactory | None = None,
    ) -> None:
        given = {"mixer": mixer, "feed_forward": feed_forward, "block": block}
        super().__init__(config, **fusion_parts(config, given, experts))
        self.vision: Any = build_encoder(config.vision)
        if config.input_only_ids:
            self.embedding = nn.Embedding(config.vocab_size + config.input_only_ids, config.dim)
        self.cross = config.fusion.name == "cross_attention"
        if self.cross:
            self.layers = with_cross_blocks(self.layers, config, config.fusion.cross_attention)
        self.adapter: Any = None
        if self.vision is not None:
            self.adapter = build_adapter(config.adapter, self.vision.width, config.dim)
        check_names(self)
        self._count_image_tokens()
        if not self.embedding.weight.is_meta:
            initialize(self, seed=0, strict=False)  # again, with the parts that came after it

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the model of a local Hugging Face folder (LLaVA, Qwen3-VL, ...), as `Transformer.from_pretrained`.

        Its encoder normalizes 8-bit images as the folder's image processor does. Needs `forge-vlm[transformers]`.
        """
        from forge_core.families import PretrainedFolder
        from forge_vlm.families import FAMILIES

        found = PretrainedFolder(folder, FAMILIES)
        pixels: Any = processor_pixels(found.processor())
        found.config = replace(found.config, vision=replace(found.config.vision, **pixels))
        return found.build(cls, device, dtype)

    def save_pretrained(self, folder: str | os.PathLike[str], family: str | None = None) -> None:
        """Write `config.json` and safetensors as a new folder that transformers loads, as `Transformer.save_pretrained`.

        Files of the processor and of the tokenizer are not written: copy them from the folder that was loaded.
        """
        from forge_core.families import save_folder
        from forge_vlm.families import FAMILIES

        save_folder(self, folder, FAMILIES, family)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        row_document_ids: Tensor | None = None,
        loss: Callable[..., Tensor] | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Compute logits (B, S, V), or `loss` in place of them, as `Transformer.forward`; inputs are those of `hidden`."""
        if row_document_ids is not None:
            inputs["row_document_ids"] = row_document_ids
        return super().forward(tokens, positions, document_ids, loss=loss, **inputs)

    def generate(
        self,
        tokens: Tensor,
        document_ids: Tensor | None = None,
        *,
        max_new_tokens: int = 20,
        sampling: SamplingConfig = _GREEDY,
        eos_id: int | Sequence[int] | None = None,
        **media: Tensor,
    ) -> Tensor:
        """Return new tokens (B, N) int64 after prompts (B, S); greedy unless `sampling` says otherwise.

            model.generate(**processor(texts, images), max_new_tokens=20, eos_id=processor.eos_id)

        document_ids: (B, S), -1 where a prompt is padded, on any side. media: what forward takes, such as `images`, of
        all prompts in order. Otherwise as `forge_core.generate`; each image is encoded once.
        """
        rows = list(tokens)
        if document_ids is not None:
            rows = [row[ids >= 0] for row, ids in zip(tokens, document_ids)]
        device, ends = self.embedding.weight.device, eos_id if eos_id != () else None
        extras = {n: m if n in self.host_inputs else m.to(device) for n, m in media.items()}
        return generate(self, rows, max_new_tokens, sampling, ends, extras=extras or None)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        after_embedding: Callable[[Tensor], Tensor] | None = None,
        row_document_ids: Tensor | None = None,
        branch_ids: Tensor | None = None,
        **rest: Any,
    ) -> Tensor:
        """Compute hidden states (B, S, D), as `Transformer.hidden`, which takes the other keywords.

        The media of the encoder (`images`: (N, 3, H, W), uint8 or normalized floats, or an object with such `values`
        for all rows) may be missing or have no entries: then tokens are text alone, and hidden states are the text
        model's, bit by bit. With no entries the encoder runs once all the same, on zeros, so that ranks of one job
        call it equally often. `after_embedding` takes the full stream (B, S, D), and what goes along with it; then
        document_ids are of this rank's tokens, and row_document_ids (B, S) those of full sequences.

        positions are taken as they are. Without them they are those of `config.positions`; where there are images and
        it is not "sequential", a plan of tokens and images gives them, for one host sync where tokens lie on an
        accelerator: give those of a `SequencePlan` made with the batch to save it. Behind cached tokens they go on at
        the largest of the sequence + 1.

        branch_ids (B, S), on the host, are 0 where the branches of a document share and a branch's number elsewhere: its
        tokens see what is shared and their own branch, and positions go on from what is shared. Which tokens attend to later ones
        (`config.bidirectional`) is told by (B, S) ids of the name `config.span_input`; without it a plan of tokens and
        images tells, but for a clip, and the first tokens of a cache are a prefix.

        Raises ValueError where placeholders and tokens of images differ in number, seen where tokens are on the CPU or
        a plan is made.
        """
        media = {name: rest.pop(name) for name in self._media_names if name in rest}
        documents = document_ids if row_document_ids is None else row_document_ids
        span_ids = rest.pop(self.config.span_input, None) if self.config.span_input else None
        rest["mask"] = mask = self._mask(tokens, documents, branch_ids, span_ids, media, cache)

        if tokens.is_floating_point():  # a pipeline stage after the first
            self._require_positions(positions, cache, branch_ids)
            ids = self._modality_ids_of_stream(rest.get("token_ids"), document_ids)
            rest.setdefault("modality_ids", ids)
            return super().hidden(tokens, positions, document_ids, cache=cache, **rest)

        rest.pop("token_ids", None)  # read by later pipeline stages only
        if positions is None:
            positions = self._positions(tokens, document_ids, cache, media, branch_ids)
        if positions is None and document_ids is None and cache is None:
            # counted here, because under sequence parallelism the stream is shorter than the tokens
            positions = torch.arange(tokens.size(1), device=tokens.device)[None]

        stream, visible = self.embed(tokens), None
        layers: tuple[Tensor, ...] = ()
        if self.cross:
            visible = self._visible_images(tokens, documents, media, cache)
            if visible is not None and self.token_part is not None:
                visible = visible.shard(self.token_part)
        elif media:
            stream, layers = self._add_features(stream, tokens, media)

        if after_embedding is not None:  # positions and document ids are those of this rank already
            full = tokens.size(1)
            stream, tokens = after_embedding(stream), after_embedding(tokens)
            if tokens.size(1) < full:
                require_full_sequences(self.config.fusion)
                require_no_mask(mask)
            layers = tuple(after_embedding(layer) for layer in layers)
            visible = None if visible is None else visible.shard(after_embedding)

        out = super().hidden(
            stream,
            positions,
            document_ids,
            cache=cache,
            token_ids=tokens,
            modality_ids=self._modality_ids(tokens, document_ids, placed=bool(media)),
            layer_features=layers,
            media=visible,
            **rest,
        )
        if isinstance(cache, VLMCache):
            cache.advance(positions, document_ids)
        return out

    def _mask(
        self,
        tokens: Tensor,
        document_ids: Tensor | None,
        branch_ids: Tensor | None,
        span_ids: Tensor | None,
        media: dict[str, Any],
        cache: KVCache | None,
    ) -> SequenceMask | None:
        """Attention mask of branches and spans; spans that the caller does not give follow from tokens and images."""
        if branch_ids is not None:
            check_branches(branch_ids, self._placeholders(tokens) if self.cross else None, cache)
        if span_ids is None and self.config.span_input is not None:
            plan = partial(self._plan, tokens, document_ids, media) if self._has(media) else None
            span_ids = planned_spans(self.config.bidirectional, tokens, plan, cache)
        return build_mask(self.layers, document_ids, branch_ids, span_ids)

    def _require_positions(
        self, positions: Tensor | None, cache: KVCache | None, branch_ids: Tensor | None
    ) -> None:
        """ValueError for a stream of floats without positions that only its tokens and images could give."""
        planned = self.config.positions != "sequential" or branch_ids is not None
        if positions is None and cache is None and planned:
            rule = (
                f"of a stream of floats must be given with positions {self.config.positions!r} or branches, which follow "
                "from its tokens and images"
            )
            fix = "give those of a SequencePlan with the batch"
            raise invalid("positions", "missing", ..., rule, fix)

    def _modality_ids(self, tokens: Tensor, document_ids: Tensor | None, *, placed: bool) -> Tensor:
        """Modalities (B, S); a placeholder is a token of text where media were not `placed`."""
        only = self.config.modalities if placed else self.config.discrete
        return modality_ids(tokens, document_ids, self.config.modalities, only)

    def _modality_ids_of_stream(
        self, token_ids: Tensor | None, document_ids: Tensor | None
    ) -> Tensor | None:
        """Modalities of a stream's tokens (B, S); ValueError where a fusion parts tokens by them and they are unknown."""
        if token_ids is not None:
            return self._modality_ids(token_ids, document_ids, placed=True)
        if self.reads_token_ids:
            rule = f"must be given with a stream of floats, as fusion {self.config.fusion.name!r} splits tokens by modality"
            raise invalid("token_ids", "missing", ..., rule, "give token_ids")
        return None

    def _positions(
        self,
        tokens: Tensor,
        document_ids: Tensor | None,
        cache: KVCache | None,
        media: dict[str, Any],
        branch_ids: Tensor | None = None,
    ) -> Tensor | None:
        """Positions of `config.positions`; None for one position a token, which the model counts itself."""
        name, found = self.config.positions, None
        if branch_ids is not None or (name != "sequential" and self._has(media)):
            plan = self._plan(tokens, document_ids, media, branch_ids)
            found = plan.positions(name).to(tokens.device, non_blocking=True)
        if isinstance(cache, VLMCache):
            found = cache.continued(found, tokens, document_ids)
        return found

    def _has(self, media: dict[str, Any]) -> bool:
        return bool(media) and len(values_of(media[self._media_names[0]])) > 0

    def _plan(
        self,
        tokens: Tensor,
        document_ids: Tensor | None,
        media: dict[str, Any],
        branch_ids: Tensor | None = None,
    ) -> SequencePlan:
        """Of tokens and the images that are given with them."""
        places: list[int] = []
        grids: list[tuple[int, int, int]] = []
        if not self.cross and self._has(media):
            places = [m.first_id for m in self.config.placeholders.values()]
            grids = grids_of(self.vision, media, self.config.positions, tokens, places)
        return plan_of(tokens, document_ids, places, grids, branch_ids)

    def _add_features(
        self, stream: Tensor, tokens: Tensor, media: dict[str, Any]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The stream with features at the placeholders, and what is added after the first blocks, (B, S, D) each."""
        features, given = self._features(media, stream.device)
        flat = self.adapter(features).flatten(0, 1)  # (M, D)
        here = self._placeholders(tokens)
        if tokens.device.type == "cpu":
            check_placeholders(here, len(flat) if given else 0)

        other = [f.size(-1) for f in features.layers if f.size(-1) != stream.size(-1)]
        if other:
            rule = f"must be the stream's width dim {stream.size(-1)}, as these features are added to the first blocks"
            fix = "change it, or dim"
            raise invalid("vision.transformers.out_hidden_size", "width", other[0], rule, fix)

        nothing = torch.zeros_like(stream)
        layers = tuple(place_features(nothing, f, here, self.token_part) for f in features.layers)
        if len(layers) > len(self.layers):
            rule = f"must be at most the blocks of this pipeline stage, {len(self.layers)}, which they are added after"
            raise invalid("features.layers", "stage", len(layers), rule, "use fewer stages")

        return place_features(stream, flat, here, self.token_part), layers

    def _visible_images(
        self,
        tokens: Tensor,
        document_ids: Tensor | None,
        media: dict[str, Any],
        cache: KVCache | None,
    ) -> VisibleImages | None:
        """What each token sees for the blocks of cross-attention; None where there is no image at all."""
        if not media:
            if not isinstance(cache, VLMCache) or cache.seen is None:
                return None
            seen = cache.seen.still(tokens, document_ids, cache.history.last_id)
            cache.seen = seen.newest()
            return seen

        if cache is not None and (cache.length or not isinstance(cache, VLMCache)):
            rule = "must be 0 tokens long where images come, which must come with its first tokens"
            fix = "give those of all turns in the first call, with model.new_cache()"
            raise invalid("cache", "images", cache.length, rule, fix)

        features, given = self._features(media, tokens.device)
        here, sees = self._placeholders(tokens), self.config.fusion.cross_attention.sees
        images = media[self._media_names[0]]
        check_images(here, features, given, document_ids, images)
        first, stop = visible_images(here, document_ids, sees)
        rows, ids = images_by_sequence(self.adapter(features), here, features.valid, images)
        seen = VisibleImages(rows, ids, first, stop)
        if isinstance(cache, VLMCache):
            cache.seen = seen.newest()

        return seen

    def _features(self, media: dict[str, Any], device: torch.device) -> tuple[Features, int]:
        """Features of the images, and how many images are given; without images those of a dummy image."""
        given = len(values_of(media[self._media_names[0]]))
        return self._encode(media if given else self.vision.dummy(device)), given

    def _placeholders(self, tokens: Tensor) -> Tensor:
        """(B, S) bool: True where a token stands for features."""
        here = torch.zeros_like(tokens, dtype=torch.bool)
        for modality in self.config.placeholders.values():
            here = here | (tokens == modality.first_id)
        return here

    @property
    def reads_token_ids(self) -> bool:
        """Whether blocks read the modality of each token, for which stages of a pipeline need token ids."""
        return self.config.fusion.name in PARTING

    @property
    def _media_names(self) -> tuple[str, ...]:
        """What the encoder takes, with what it may do without after."""
        if self.vision is None:
            return ()
        return (*self.vision.extra_inputs, *self.optional_inputs)

    @property
    def extra_inputs(self) -> tuple[str, ...]:
        """Names of the media that forward takes, and of the function that splits the stream over ranks, but in a stage
        without the encoder; and of the ids of what attends to later ones."""
        media = () if self.vision is None else (*self.vision.extra_inputs, "after_embedding")
        return (*media, *self.mask_inputs[1:])

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """Names of media that the encoder takes and does without."""
        return () if self.vision is None else tuple(getattr(self.vision, "optional_inputs", ()))

    @property
    def mask_inputs(self) -> tuple[str, ...]:
        """Names of ids of full sequences by which tokens see each other, for all stages of a pipeline; those that are no
        `extra_inputs` may be missing."""
        spans = self.config.span_input
        return ("branch_ids",) if spans is None else ("branch_ids", spans)

    @property
    def host_inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of what forward reads on the host."""
        media = getattr(self.vision, "host_inputs", ())
        return (*Transformer.host_inputs, *self.mask_inputs, *media)

    def pipeline_parts(self) -> dict[str, Any]:
        """The encoder and the adapter are in the first stage; cross-attention would need their features in all."""
        parts = super().pipeline_parts()
        if self.cross:
            words = "has images in every block, and stages send the stream alone"
            parts["refused"] = f"fusion.name {self.config.fusion.name!r} {words}"
        if self.config.vision.name == "none":
            return parts
        parts["first_blocks"] = max(1, getattr(self.vision, "num_layer_features", 0))
        return {**parts, "first": ("vision", "adapter", *parts["first"])}

    def sharding_units(self) -> list[nn.Module]:
        """Blocks of the encoder, if it names them (`blocks()`): the root need not hold them while the decoder runs."""
        blocks = getattr(self._modules.get("vision"), "blocks", None)
        return [] if blocks is None else list(blocks())

    def parallel_roles(self) -> dict[str, Any]:
        """The encoder and the adapter are full on each rank; their gradients are sums where ranks place features at
        their own tokens only."""
        own = {} if self.adapter is None else {"vision.*": "sequence", "adapter.*": "sequence"}
        return {**super().parallel_roles(), **own}

    def image_work(self) -> ImageWork | None:
        """What one image costs, as `images_per_row` of them do in each sequence; None without an encoder, or where that does
        not say it."""
        if self.vision is None:
            return None
        return work_of_media(self.vision, self.adapter, self.config.pixels_per_image)

    def _count_image_tokens(self) -> None:
        """Tell blocks of cross-attention how many tokens of images a row has, as FLOPs count them."""
        work = self.image_work() if self.cross else None
        for block in self.layers.values():
            if work is not None and isinstance(block, CrossAttentionBlock):
                mixer: Any = block.mixer
                mixer.image_tokens = self.config.images_per_row * work.tokens

    def first_flops_per_token(self, seq_len: int) -> tuple[float, float]:
        """FLOPs of a token's part of the images in a sequence of `seq_len`: forward, and backward that is not computed."""
        work = self.image_work()
        if work is None:
            return 0.0, 0.0
        share = self.config.images_per_row / seq_len
        return share * work.flops, share * work.spared

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs for one token, as those of the transformer, with its part of `images_per_row` images."""
        return super().flops_per_token(seq_len) + self.first_flops_per_token(seq_len)[0]

    def spared_flops_per_token(self, seq_len: int) -> float:
        """FLOPs of the backward that frozen matrices spare one token."""
        text = [m for name, m in self.named_children() if name not in ("vision", "adapter")]
        own = sum(spared_flops(part, seq_len) for part in text)
        return own + self.first_flops_per_token(seq_len)[1]

    def plan_forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, S, V) of tokens (B, S) with the activations and shapes of a forward with `images_per_row` images each.

        For a planner, which traces fake tensors: no value is read. Values decide where placeholders stand, which tokens are
        of which modality, and which image a token sees, so all are taken as those of text. Encoder and adapter run on all
        images. ValueError where the encoder reads values itself, or does not define the images of a size (`media_of`).
        """
        images, rows = self.config.images_per_row, len(tokens)
        self._require_plannable()
        positions = torch.arange(tokens.size(1), device=tokens.device)[None]
        if self.vision is None or not images:
            return self.project(Transformer.hidden(self, self.embed(tokens), positions))

        features = self._planned_features(rows * images, tokens.device)
        adapted = self.adapter(features).flatten(0, 1)  # (B n T, D)
        stream, visible = self.embed(tokens), None
        # under sequence parallelism the stream is shorter than the tokens
        here = torch.zeros(stream.shape[:2], dtype=torch.bool, device=tokens.device)
        layers: tuple[Tensor, ...] = ()
        if self.cross:
            first = here.long()
            of_rows = adapted.unflatten(0, (rows, -1))  # (B, n T, D)
            ids = of_rows.new_zeros(of_rows.shape[:2], dtype=torch.int64)
            visible = VisibleImages(of_rows, ids, first, first + 1)
        else:
            nothing = torch.zeros_like(stream)
            layers = tuple(place_features(nothing, layer, here) for layer in features.layers)
            stream = place_features(stream, adapted, here)

        x = Transformer.hidden(self, stream, positions, layer_features=layers, media=visible)
        return self.project(x)

    def _require_plannable(self) -> None:
        """ValueError for a model whose forward depends on values of its tokens or images."""
        fusion = self.config.fusion
        if fusion.name == "moma" and fusion.moma.router != "token_choice":
            rule = "takes tokens by the documents of each row, and cannot be planned"
            fix = "plan 'token_choice', or use parallel.layout = 'manual'"
            raise invalid("fusion.moma.router", "planned", fusion.moma.router, rule, fix)
        if self.vision is None or not self.config.images_per_row:
            return
        if not hasattr(self.vision, "media_of"):
            rule = "cannot be planned: its encoder does not define media_of(images, pixels, device)"
            fix = "add it, or use parallel.layout = 'manual'"
            raise invalid("vision.name", "planned", self.config.vision.name, rule, fix)

    def _planned_features(self, images: int, device: torch.device) -> Features:
        """Features of `images` images of the size that FLOPs count; ValueError where the encoder reads their values."""
        media = self.vision.media_of(images, self.config.pixels_per_image, device)
        try:
            return self._encode(media)
        except RuntimeError as error:
            # torch has no public class for it
            text = f"{type(error).__name__} {error}"
            if not re.search("data-?dependent", text, re.IGNORECASE):
                raise
            kind = self.config.vision.transformers.get("model_type")
            rule = "reads values of images in its forward, and cannot be planned"
            fix = "use parallel.layout = 'manual'"
            raise invalid("vision.transformers.model_type", "planned", kind, rule, fix) from error

    def _encode(self, media: dict[str, Any]) -> Features:
        """Features of the encoder; one that nothing trains keeps no activations."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._vision_is_frozen()):
            features: Features = self.vision(**media)
        return features

    def _vision_is_frozen(self) -> bool:
        return not any(p.requires_grad for p in self.vision.parameters())

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all parts; an encoder that nothing trains stays in eval mode."""
        super().train(mode)
        if self._modules.get("vision") is not None and self._vision_is_frozen():
            self.vision.eval()
        return self

    def new_cache(self, max_length: int) -> KVCache:
        """An empty cache for rows of up to `max_length` tokens; raises as the transformer's."""
        super().new_cache(max_length)
        return VLMCache(max_length)


__getattr__ = renamed(__name__)
