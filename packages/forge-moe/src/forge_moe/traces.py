"""Traces of routing: the experts of every token, written to disk record by record.

A trace is one file (a rank writes its own); integers and floats are little-endian:

    8 bytes   b"FMOETRC1"
    uint32    length of the header
    header    JSON: {"weights": bool, "token_ids": bool,
                     "layers": [{"name": str, "num_experts": int}, ...]}
    records   until the end of the file, each
        uint64 step, uint32 layer (index in "layers"), uint32 T, uint32 K, uint32 CRC-32 of what follows
        ids        T * K int16, token by token; num_experts marks a pad
        weights    T * K fp32, if "weights"
        token ids  T int32, if "token_ids"

Records are in the order of the calls, so the micro-batches of a step follow one another. A file truncated by a crash is
readable up to the last complete record.

Shapes: T tokens, K slots per token.
"""

import ctypes
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

from forge_moe._shared.problems import invalid
from forge_moe._torch_compat import inside_backward
from forge_moe.replay import replaying

__all__ = ["TraceRecord", "TraceWriter", "read_trace", "trace_routes", "traced_layers"]

MAGIC = b"FMOETRC1"
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<QIIII")


class TraceRecord(NamedTuple):
    """A call of a layer: ids (T, K) int64, weights (T, K) fp32 or None, token_ids (T,) or None."""

    step: int
    layer: str
    ids: Tensor
    weights: Tensor | None
    token_ids: Tensor | None


class TraceWriter(AbstractContextManager["TraceWriter"]):
    """Write one trace; a context manager.

        with TraceWriter("routes.rank0", {"layers.0": 8}) as trace:    # layer -> number of experts
            trace.write(step, "layers.0", ids)

    Raises ValueError for more than 32,766 experts or a tensor of another shape, FileExistsError if the file exists. A
    record of T tokens takes 24 + 2 T K bytes, 4 T K more with weights and 4 T more with token ids; writing one from an
    accelerator waits for it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layers: dict[str, int],
        *,
        weights: bool = False,
        token_ids: bool = False,
    ) -> None:
        for name, num_experts in layers.items():
            if not 1 <= num_experts < 2**15 - 1:
                rule = "must be 1 to 32766, as ids are stored as int16"
                raise invalid("num_experts", "range", num_experts, rule, where=name)
        self.layers, self.weights, self.token_ids = dict(layers), weights, token_ids
        self._layer_indices = {name: index for index, name in enumerate(layers)}
        rows = [{"name": name, "num_experts": number} for name, number in layers.items()]
        text = json.dumps({"weights": weights, "token_ids": token_ids, "layers": rows}).encode()
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115  (closed by `close`)
        self._file.write(MAGIC + _LENGTH.pack(len(text)) + text)

    def write(
        self,
        step: int,
        layer: str,
        ids: Tensor,
        weights: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        """Append a record: ids (T, K), weights (T, K) and T token_ids, as declared in the header."""
        given = (weights is not None, token_ids is not None)
        if given != (self.weights, self.token_ids):
            rule = f"must be {self.weights, self.token_ids}, as the trace was opened"
            fix = "give those and no others"
            raise invalid("weights, token_ids", "header", given, rule, fix, where=layer)

        if weights is not None and weights.shape != ids.shape:
            rule = f"must be {tuple(ids.shape)}, as ids"
            raise invalid("weights", "shape", tuple(weights.shape), rule, where=layer)
        if token_ids is not None and token_ids.numel() != ids.size(0):
            rule = f"must be one for each of {ids.size(0)} tokens"
            raise invalid("token_ids", "length", token_ids.numel(), rule, where=layer)
        on_host, num_experts = ids.detach().cpu(), self.layers[layer]
        if on_host.numel() and not 0 <= int(on_host.min()) <= int(on_host.max()) <= num_experts:
            found = (int(on_host.min()), int(on_host.max()))
            raise invalid("ids", "range", found, f"must be in 0..{num_experts}", where=layer)

        columns = ((on_host, torch.int16), (weights, torch.float32), (token_ids, torch.int32))
        payload = b"".join(_bytes(each, dtype) for each, dtype in columns if each is not None)
        head = _HEAD.pack(step, self._layer_indices[layer], *ids.shape, zlib.crc32(payload))
        self._file.write(head + payload)

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def read_trace(path: str | os.PathLike[str]) -> Iterator[TraceRecord]:
    """The records of a trace in order, one in memory at a time.

    for record in read_trace("routes.rank0"): print(record.step, record.layer, record.ids)

    Raises ValueError for a file that is no trace, for a damaged record, and, after the last complete record, for a
    truncated file.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        header = _read_header(file, path)
        number = 0
        while head := file.read(_HEAD.size):
            # A damaged head may claim any length: compare it with the file size before reading.
            complete = len(head) == _HEAD.size
            step, layer, tokens, slots, checksum = _HEAD.unpack(head) if complete else (0,) * 5
            length = tokens * (slots * (2 + 4 * header["weights"]) + 4 * header["token_ids"])
            if not complete or file.tell() + length > size:
                rule = "are intact, and the file is truncated after them"
                raise invalid("records", "truncated", number, rule, where=path)
            payload = file.read(length)
            if zlib.crc32(payload) != checksum or layer >= len(header["layers"]):
                fix = "write the trace again"
                raise invalid("record", "damaged", number, "is damaged", fix, where=path)
            yield _record(step, header["layers"][layer]["name"], (tokens, slots), payload, header)
            number += 1


def _read_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    start = file.read(len(MAGIC) + _LENGTH.size)
    if len(start) < len(MAGIC) + _LENGTH.size or start[: len(MAGIC)] != MAGIC:
        fix = "give a file that TraceWriter wrote"
        raise invalid("", "format", ..., "is not a routing trace", fix, where=path)
    (length,) = _LENGTH.unpack(start[len(MAGIC) :])
    try:
        header: dict[str, Any] = json.loads(file.read(min(length, 2**24)))
    except ValueError as error:
        rule, fix = f"is damaged ({error})", "write the trace again"
        raise invalid("header", "damaged", ..., rule, fix, where=path) from error
    return header


def _record(
    step: int, layer: str, shape: tuple[int, int], payload: bytes, header: dict[str, Any]
) -> TraceRecord:
    start = 0

    def take(dtype: torch.dtype, *shape: int) -> Tensor:
        nonlocal start
        data = payload[start : start + torch.Size(shape).numel() * dtype.itemsize]
        start += len(data)
        found = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0).to(dtype)
        return found.view(shape)

    ids = take(torch.int16, *shape).long()
    weights = take(torch.float32, *shape) if header["weights"] else None
    token_ids = take(torch.int32, shape[0]).long() if header["token_ids"] else None
    return TraceRecord(step, layer, ids, weights, token_ids)


def _bytes(tensor: Tensor, dtype: torch.dtype) -> bytes:
    """The values as `dtype`; without numpy, which may not be installed."""
    host = tensor.detach().to("cpu", dtype).contiguous()
    return ctypes.string_at(host.data_ptr(), host.numel() * dtype.itemsize) if host.numel() else b""


def traced_layers(model: nn.Module) -> dict[str, int]:
    """{name: number of experts} of every module of `model` with a router, for the header of a trace."""
    return {name: layer.router.config.num_experts for name, layer in _layers(model)}


@contextmanager
def trace_routes(model: nn.Module, writer: TraceWriter, step: Callable[[], int]) -> Iterator[None]:
    """Write every routing decision of the MoE layers of `model` while the context lasts.

        with TraceWriter(path, traced_layers(model), weights=True) as trace:
            with trace_routes(model, trace, step=lambda: current_step):
                model(tokens)

    Records the choice of the router, before a capacity drops slots; token ids come from the context `ctx` of the layer's
    call. Recomputation does not write again. Each call syncs with the device, so trace some steps rather than all.
    """
    with ExitStack() as stack:
        for name, layer in _layers(model):
            stack.enter_context(_trace_layer(name, layer, writer, step))
        yield


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(getattr(module, "router", None), "route")
    ]


@contextmanager
def _trace_layer(
    name: str, layer: Any, writer: TraceWriter, step: Callable[[], int]
) -> Iterator[None]:
    """Hook one layer: its call for the token ids, its router's `route` for the decision."""
    route, last_call = layer.router.route, {"ctx": None}

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        last_call["ctx"] = args[1] if len(args) > 1 else kwargs.get("ctx")

    def traced(x: Tensor, valid: Tensor | None = None, rows: int | None = None) -> Any:
        routed = route(x, valid, rows)
        if not (replaying() or inside_backward()):
            token_ids = getattr(last_call["ctx"], "token_ids", None) if writer.token_ids else None
            weights = routed.weights if writer.weights else None
            writer.write(step(), name, routed.ids, weights, token_ids)
        return routed

    before = vars(layer.router).get("route")  # FSDP sets one on the instance too
    layer.router.route = traced  # the class serves routers that are not traced
    try:
        with layer.register_forward_pre_hook(remember, with_kwargs=True):
            yield
    finally:
        del layer.router.route
        if before is not None:
            layer.router.route = before
