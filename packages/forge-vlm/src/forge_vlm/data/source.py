"""Conversations with images as a source of data: files of any format, a template, rows.

As an entry point of `forge.sources` it is named `vlm` in a configuration, with the arguments of `VisionChatSource` as options.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_vlm._renamed import renamed
from forge_vlm._shared.problems import invalid, raise_problems
from forge_vlm._shared.record_keys import RecordKeys
from forge_vlm.data.files import InvalidSample, folder_of
from forge_vlm.data.formats import open_records
from forge_vlm.data.index import cached, lengths_entry
from forge_vlm.data.options import problems
from forge_vlm.data.packing import IndexedSource
from forge_vlm.data.prepared import Prepared, is_prepared
from forge_vlm.data.records import MOST_BYTES, MOST_PIXELS
from forge_vlm.data.sample import Sample, SampleEncoder
from forge_vlm.data.streaming import StreamedSource

__all__ = ["VisionChatSource", "open_source", "options_of"]

Source = IndexedSource | StreamedSource


class VisionChatSource(IndexedSource):
    """Conversations with images of a path, as rows.

        talks = VisionChatSource("talks.jsonl", resolution={"fixed": {"size": 224}}, tokens_per_tile=256)
        loader = Loader(talks.stream(seq_len=2048, seed=0), global_batch=16)

    format: chat, llava, coco, folder, videos, parquet, dataset, webdataset. tokenizer: "byte" or a tokenizer.json; its tokens `eos`
    (by default that of the template, or of the tokenizer) and `image` end an answer and stand for an image, and `bos` begins
    each sample (by default as the tokenizer begins a text; "" for no token). template: plain, vicuna, chatml, or
    "tokenizer" for that of the tokenizer's folder, by transformers.

    resolution: the keys of a `ResolutionConfig`, and `mean` that of the encoder. tokens_per_tile is what its adapter gives;
    under "budget" patches are of patch_size, merge and patch_time of an encoder of patches.

    video: the keys of a `VideoConfig`: a video is its frames, each an image of its own after the text of its time. PyAV
    reads them (`forge-vlm[video]`); opening reads each video once.

    weigh: token, sample, sqrt, message. positions: sequential, text_preserving, mrope. bidirectional: that of the model, whose
    ids of what attends to later ones are then in the rows. Branches of a record are one sample, with `branch_ids` in all sequences. pack: several samples share a
    row;
    none is split. group, with pack = false: rows of a global batch, which then all have images or none, the longest first; an
    epoch of a integer of batches keeps them together. too_long: a sample longer than a row ends the run or is left out. corrupt: an image that cannot be decoded
    ends the run ("raise"), or is a blank one and its sample not trained ("mask"); "skip" leaves out samples whose image is
    missing or has no header when it opens, and masks those whose pixels are damaged. image_masks: rows have masks of
    pixels, 0 in images that are blank because of damage, for encoders that take them. max_image_pixels and max_image_bytes:
    of one image's file; a larger one counts as damaged.

    images: the folder below which paths in records are (default: that of the file of records, for COCO also those next to
    it). Links are followed, and a path that climbs out of it is an error. Nothing is downloaded.

    ignore_keys: keys of records that are left out although they hold content that is not read, as `tools` or
    `messages.loss`; without it they are an error. Other keys that are not read are counted; strict: they are an error, too.

    Opening reads the files, tokenizes every record and reads the header of every image (of a resolution fixed only with
    "skip"); it holds 32 bytes a sample. Lengths of more than a thousand records and digests of large files are kept
    in `cache`, a folder (default: $FORGE_CACHE, or ~/.cache/forge). Raises ValueError for options, InvalidSample for files.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        format: str = "chat",
        tokenizer: str = "byte",
        eos: str | None = None,
        bos: str | None = None,
        image: str = "<image>",
        template: str = "chatml",
        resolution: Mapping[str, Any] | None = None,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        tokens_per_tile: int | None = None,
        patch_size: int = 16,
        merge: int = 2,
        patch_time: int = 2,
        weigh: str = "token",
        positions: str = "sequential",
        bidirectional: str = "none",
        pack: bool = True,
        group: int | None = None,
        video: Mapping[str, Any] | None = None,
        corrupt: str = "raise",
        too_long: str = "raise",
        image_masks: bool = False,
        max_image_pixels: int = MOST_PIXELS,
        max_image_bytes: int = MOST_BYTES,
        cache: str | None = None,
        ignore_keys: Sequence[str] = (),
        strict: bool = False,
        images: str | None = None,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "path", "cache")}
        options.pop("__class__", None)
        raise_problems("source", problems(options))
        self.path = str(path)
        keys = RecordKeys(ignore_keys, strict, InvalidSample)
        self.records = open_records(format, path, keys=keys, images=images)
        self.reader = SampleEncoder(options)
        self.vocab_size = self.reader.tokens.vocab_size
        self.tokenizer = self.reader.tokens.spec
        self.image_id = self.reader.image_id
        content = self.records.fingerprint(cache)
        key = {**self.reader.identity, "ignore_keys": sorted(ignore_keys), "strict": strict}

        if images is not None:  # other images of the same names have other sizes
            key["images"] = str(folder_of(images))
        self._entry = lengths_entry(cache, content, key)
        counted = cached(self._entry, self.records, self.reader, self.path, keys)
        super().__init__(self.reader, self.reader.identity, counted, content)

    def sample(self, number: int) -> Sample:
        """A sample that rows name, from its record."""
        return self.reader.sample(self.records[int(self.kept[number])])[0]

    def name_of(self, number: int) -> str:
        """The name of its record."""
        return self.records[int(self.kept[number])].name

    def forget(self) -> None:
        """Remove what the cache has of this source."""
        self._entry.unlink(missing_ok=True)


def options_of(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of `VisionChatSource`, with defaults for those that are not given; ValueError for others."""
    signature = inspect.signature(VisionChatSource)
    _, *known = signature.parameters
    for key, value in options.items():
        if key not in known:
            rule = "is not an option of the source vlm"
            raise invalid(key, "unknown_key", value, rule, f"use one of {', '.join(known)}")
    bound = signature.bind(path, **options)
    bound.apply_defaults()
    found = dict(bound.arguments)
    del found["path"]
    return found


def open_source(config: Any, **options: Any) -> Source:
    """The source of a configuration, whose `path` names files or a folder that `prepare` wrote; see `VisionChatSource` for the
    options. `streaming` reads large files front to back while a run goes on (`StreamedSource`)."""
    if not getattr(config, "path", None):
        rule = "must be given for a source of conversations with pictures"
        raise invalid("path", "missing", ..., rule, "give that of its files")
    if getattr(config, "split", "train") != "train":
        rule = "of conversations with pictures is not known, as their files have one part"
        fix = "give the path of held-out files, without split"
        raise invalid("split", "unsupported", config.split, rule, fix)

    path = str(config.path)
    streamed = {n: options.pop(n) for n in ("virtual_shards", "shuffle_window") if n in options}
    streaming = options.pop("streaming", False)
    if streamed and not streaming:
        name, value = next(iter(streamed.items()))
        rule, fix = "is read only by streaming", "set streaming = true or remove it"
        raise invalid(name, "streaming", value, rule, fix)

    if is_prepared(path):
        if streaming:
            rule = f"is not needed for {path}, which is prepared and mapped into memory"
            raise invalid("streaming", "prepared", True, rule, "remove streaming")
        return Prepared(path, **options)

    complete = options_of(path, options)
    if streaming:
        if complete["group"] is not None:
            rule = "needs the lengths of all samples, which streaming does not find"
            raise invalid("group", "streaming", complete["group"], rule, "remove one")
        if complete.pop("cache") is not None:
            rule = "keeps nothing of a streaming source"
            raise invalid("cache", "streaming", options["cache"], rule, "remove it")
        return StreamedSource(path, complete, **streamed)

    return VisionChatSource(path, **options)


__getattr__ = renamed(__name__)
