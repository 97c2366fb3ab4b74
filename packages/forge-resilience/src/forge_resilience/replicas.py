"""Silent corruption: replicas of a tensor that must be equal, and memory that must not change, compared by checksums."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from forge_resilience._shared.fields import Checked, field
from forge_resilience.agreement import Agreement

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Mismatch", "ReplicaCheck", "ReplicasConfig", "checksums", "mismatch_fields", "mismatch_lines", "training_tensors",
]  # fmt: skip

# words of 8 bytes that are hashed at once: 16 MiB, and about eight times as much on the way
_CHUNK = 2**21
# Constants of splitmix64 (Steele, Lea, Flood 2014) as signed integers, and its shifts with their masks.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31
_MOST_NAMES = 8  # of tensors in an event, whose line must stay readable
# id for a tensor that no other rank holds, so that it is not compared with copies
_NO_REPLICAS = ""


@dataclass(frozen=True)
class ReplicasConfig(Checked):
    """Silent corruption: tensors that must be equal on several ranks, or unchanged between steps, are compared."""

    every_steps: int = field(0, between=(0, 10**9))
    """steps between comparisons of all copies of weights, buffers and moments, of which one precedes each save,
    too; 0: never"""
    action: Literal["stop", "warn"] = "stop"
    """stop: bits that differ end the run with code 71 before they are saved; warn: they are an event"""


@dataclass(frozen=True)
class Mismatch:
    """A tensor with wrong bits. Equal on all ranks, apart from the order of names."""

    tensor: str
    kind: str
    """`replicas`: copies differ. `memory`: the tensor of one rank changed since it was sealed."""
    ranks: tuple[int, ...]
    """Ranks whose bits are not those of the majority; without a majority all that hold a copy."""
    copies: tuple[int, ...]
    """Ranks that hold a copy."""

    @property
    def is_known(self) -> bool:
        """Whether `ranks` are the wrong ones; False if they only differ, as two copies do."""
        return self.kind == "memory" or len(self.ranks) < len(self.copies)

    def __str__(self) -> str:
        who = _name_ranks(self.ranks)
        if self.kind == "memory":
            return f"{self.tensor} of {who} changed in memory while nothing wrote to it"
        if self.is_known:
            return f"{self.tensor} of {who} differs from the other copies on {_name_ranks(self.copies)}"
        return f"{self.tensor} differs between {who}, and no majority says which is wrong"


class _Key(NamedTuple):
    """A tensor of this rank: its name, the id of the ranks that hold copies, its shape."""

    name: str
    copies: str
    shape: tuple[int, ...]


class ReplicaCheck:
    """Comparison by checksums: of replicas on several ranks, and of a rank's memory between two moments.

        check = ReplicaCheck()                                       # all ranks
        if step % 100 == 0:                                          # after the optimizer's step
            for found in check.compare(training_tensors(model, optimizer)):
                print(found)                                         # "fc.weight of rank 3 differs from ..."

    Copies of a DTensor are those along the `Replicate` axes of its mesh; parts of a sum (`Partial`) and shards
    have none. A plain tensor has one on each rank of `plain`, a process group or numbers of ranks, by default on
    all (as in DDP). `group` carries CPU tensors over all ranks (as in `Agreement`, by default the default group).

    Sharded tensors have no replica: `seal` notes their checksums after an update, and the next
    `compare`, before anything may write to them, names those of this rank that changed in between. FSDP2 must have
    resharded its parameters at both (`module.reshard()`): a tensor that is gathered once and sharded once is
    not compared.

    Cost of `compare`: the tensors are read on their device, 3 s for 1 GB on one CPU core; one host sync per
    device; two small exchanges between hosts (about 100 bytes a rank), and one more with all checksums if
    something differs. Of `seal`: the reading, no sync. Every rank calls `compare` alike.
    """

    def __init__(self, group: Any = None, *, plain: Any = None) -> None:
        self._agreement = Agreement(group)
        self._group, self._plain = group, plain
        self._sealed: dict[_Key, Tensor] = {}
        self._copies_of: dict[tuple[Any, Any], str] = {}

    @property
    def is_sealed(self) -> bool:
        """Whether there are checksums of an earlier moment."""
        return bool(self._sealed)

    def seal(self, tensors: Mapping[str, Tensor]) -> None:
        """Note the checksums of `tensors` as they are now; no sync."""
        self._sealed = self._sums(tensors)

    def unseal(self) -> None:
        """Forget the checksums: from now on tensors may change."""
        self._sealed = {}

    def compare(self, tensors: Mapping[str, Tensor]) -> list[Mismatch]:
        """Return the tensors that differ between replicas or from their sealed checksums. Collective.

        The list is the same on every rank."""
        sums = self._sums(tensors)
        before = {key: value for key, value in self._sealed.items() if key in sums}
        read = _read_on_host([*sums.values(), *before.values()])
        now, then = dict(zip(sums, read)), dict(zip(before, read[len(sums) :]))

        sets: dict[str, dict[str, int]] = {}
        for key, value in now.items():
            if key.copies != _NO_REPLICAS:
                sets.setdefault(key.copies, {})[key.name] = value
        own = {
            "changed": [key.name for key in then if now[key] != then[key]],
            "sets": {copies: _digest(members) for copies, members in sets.items()},
        }

        rows = self._agreement.exchange(own)
        ranks = self._ranks(len(rows))
        changed = [(rank, name) for rank, row in zip(ranks, rows) for name in row["changed"]]
        found = [Mismatch(name, "memory", (rank,), (rank,)) for rank, name in changed]

        values: dict[str, set[str]] = {}
        for row in rows:
            for copies, digest in row["sets"].items():
                values.setdefault(copies, set()).add(digest)
        different = [copies for copies, digests in values.items() if len(digests) > 1]

        if different:
            details = self._agreement.exchange({c: sets[c] for c in different if c in sets})
            for copies in different:
                held = {r: row[copies] for r, row in zip(ranks, details) if copies in row}
                found += _differing_tensors(held)
        return found

    def _ranks(self, count: int) -> Sequence[int]:
        """Numbers of the ranks that take part, in the order of their answers."""
        if count == 1 or self._group is None:
            return range(count)
        import torch.distributed as dist

        return dist.get_process_group_ranks(self._group)

    def _sums(self, tensors: Mapping[str, Tensor]) -> dict[_Key, Tensor]:
        """A 0-dim checksum of each of this rank's tensors, on its device."""
        parts: dict[_Key, Tensor] = {}
        for name, tensor in tensors.items():
            copies = self._copies(tensor)
            for part, plain in _plain_parts(name, tensor):
                parts[_Key(part, copies, tuple(plain.shape))] = plain
        sums: dict[_Key, Tensor] = {}
        for device in {plain.device for plain in parts.values()}:
            here = {key: plain for key, plain in parts.items() if plain.device == device}
            sums.update(zip(here, checksums(list(here.values())).unbind()))
        return sums

    def _copies(self, tensor: Any) -> str:
        """An id of the set of ranks with the same bits as this rank's part of `tensor`."""
        if not hasattr(tensor, "device_mesh"):
            return f"plain {self._plain_ranks()}"
        place = (tensor.device_mesh, tensor.placements)
        if place not in self._copies_of:
            self._copies_of[place] = _copies_of(*place)
        return self._copies_of[place]

    def _plain_ranks(self) -> str:
        if self._plain is None or isinstance(self._plain, Sequence):
            return f"{self._plain}"
        import torch.distributed as dist

        return f"{dist.get_process_group_ranks(self._plain)}"


def _copies_of(mesh: Any, placements: Sequence[Any]) -> str:
    """An id of the ranks with the bits of this rank, along the axes that replicate."""
    place = mesh.get_coordinate()
    if place is None or any(p.is_partial() for p in placements):
        return _NO_REPLICAS
    index = tuple(slice(None) if p.is_replicate() else i for p, i in zip(placements, place))
    ranks = mesh.mesh[index].flatten().tolist()
    return _NO_REPLICAS if len(ranks) == 1 else _digest(ranks)


def training_tensors(model: Any, optimizer: Any = None) -> dict[str, Tensor]:
    """The tensors that a step changes, by name: parameters and buffers of `model.state_dict()`, and the tensors of a torch
    optimizer's `state`. No copies; buffers that are not saved are left out, as each rank may have its own."""
    import torch

    state = model.state_dict(keep_vars=True)
    found = {name: t for name, t in state.items() if isinstance(t, torch.Tensor)}
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    for parameter, slots in getattr(optimizer, "state", {}).items():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor) and id(parameter) in names:
                found[f"{names[id(parameter)]}.{slot}"] = value
    return found


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """64-bit checksums of plain tensors of one device, as integers (n,) there; no sync.

    Sum over the 8-byte words of splitmix64(word + position * golden ratio), plus the number of bytes, modulo 2**64:
    a function of only bits, positions and length, equal on every device and in any order of adding. One
    changed word always shows; more of them cancel with a probability of about 2**-64.
    """
    import torch

    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    total = torch.tensor(sizes).to(tensors[0].device, non_blocking=True)

    # (tensor, position of its first word, words): positions are hashed too, so that moved words are found
    pieces: list[tuple[int, int, Tensor]] = []
    room = _CHUNK
    for i, tensor in enumerate(tensors):
        words = _words(tensor)
        begin = 0
        while begin < len(words):
            piece = words[begin : begin + room]
            pieces.append((i, begin, piece))
            begin, room = begin + len(piece), room - len(piece)
            if not room:
                _add_pieces(total, pieces)
                pieces, room = [], _CHUNK

    _add_pieces(total, pieces)
    return total


def _add_pieces(total: Tensor, pieces: Sequence[tuple[int, int, Tensor]]) -> None:
    """Add the sums of the mixed words of pieces to those of their tensors; many small tensors cost one pass."""
    import torch

    if not pieces:
        return
    table = torch.tensor([(i, begin, len(words)) for i, begin, words in pieces])
    index, begins, lengths = table.to(total.device, non_blocking=True).unbind(1)
    words = torch.cat([words for _, _, words in pieces])
    ends = lengths.cumsum(0)
    position = torch.arange(len(words), device=total.device)
    shift = begins - (ends - lengths)
    position += torch.repeat_interleave(shift, lengths, output_size=len(words))
    running = _mix_(words.add_(position.mul_(_GOLDEN))).cumsum(0)  # words is the copy made by cat
    upto = running[ends - 1]
    total.index_add_(0, index, torch.diff(upto, prepend=upto.new_zeros(1)))


def _mix_(x: Tensor) -> Tensor:
    """splitmix64's finalizer in place: a bijection in which each bit reaches all others."""
    for shift, factor in _ROUNDS:
        _fold_(x, shift).mul_(factor)
    return _fold_(x, _LAST_SHIFT)


def _fold_(x: Tensor, shift: int) -> Tensor:
    """x ^= x >> shift of unsigned integers; that of signed ones copies the sign."""
    x ^= (x >> shift).bitwise_and_(2 ** (64 - shift) - 1)
    return x


def _words(tensor: Tensor) -> Tensor:
    """The memory of a tensor in row-major order as int64, zeros at the end; a view where it can be one."""
    import torch

    data = tensor.contiguous().view(-1).view(torch.uint8)
    if missing := -len(data) % 8:
        data = torch.nn.functional.pad(data, (0, missing))
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _plain_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of which this rank's part of a tensor consists, such as values and scales of an 8-bit moment."""
    import torch

    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _plain_parts(f"{name}.{part}", getattr(tensor, part))
    elif tensor.device.type != "meta" and tensor.layout == torch.strided:
        yield name, tensor


def _read_on_host(values: Sequence[Tensor]) -> list[int]:
    """Read 0-dim checksums: one sync per device."""
    import torch

    found: dict[int, int] = {}
    for device in {value.device for value in values}:
        here = [i for i, value in enumerate(values) if value.device == device]
        found.update(zip(here, torch.stack([values[i] for i in here]).tolist()))
    return [found[i] for i in range(len(values))]


def _digest(value: Mapping[str, int] | Sequence[int]) -> str:
    """64-bit digest of checksums by name, or of ranks."""
    items = sorted(value.items()) if isinstance(value, Mapping) else list(value)
    return hashlib.blake2b(repr(items).encode(), digest_size=8).hexdigest()


def _differing_tensors(held: Mapping[int, Mapping[str, int]]) -> Iterator[Mismatch]:
    """The tensors of which copies differ; `held` is rank -> name -> checksum."""
    for name in dict.fromkeys(name for sums in held.values() for name in sums):
        values = {rank: sums.get(name) for rank, sums in held.items()}
        ((usual, count), *others) = Counter(values.values()).most_common()
        if not others:
            continue
        known = 2 * count > len(values)
        odd = tuple(rank for rank, value in values.items() if not known or value != usual)
        yield Mismatch(name, "replicas", odd, tuple(values))


def mismatch_fields(found: Sequence[Mismatch], hosts: Sequence[str]) -> dict[str, Any]:
    """Fields of an event of a journal; `hosts` are the nodes of the ranks."""
    ranks = sorted({rank for m in found for rank in m.ranks})
    known = all(m.is_known for m in found)
    return {
        "rank": ranks[0] if known and len(ranks) == 1 else None,
        "ranks": ranks,
        "nodes": sorted({hosts[rank] for rank in ranks}),
        "is_known": known,
        "tensor": found[0].tensor,
        "tensors": [m.tensor for m in found[:_MOST_NAMES]],
        "num_tensors": len(found),
    }


def mismatch_lines(
    found: Sequence[Mismatch], hosts: Sequence[str], buffers: Collection[str]
) -> list[str]:
    """One sentence for each set of ranks, with its nodes; `buffers` are names that a forward may write to."""
    by_ranks: dict[tuple[int, ...], list[Mismatch]] = {}
    for mismatch in found:
        by_ranks.setdefault(mismatch.ranks, []).append(mismatch)
    lines = []
    for ranks, some in by_ranks.items():
        nodes = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        more = f" (and {len(some) - 1} more tensors)" if len(some) > 1 else ""
        fix = "so that hardware is at fault: run again without that node"
        if all(m.tensor in buffers for m in some):
            fix += ", or, if the model's forward writes to it, register that buffer with persistent=False"
        rule = "copies must be equal bit by bit and memory must keep its values"
        lines.append(f"{some[0]}{more} on {nodes}; {rule}, {fix}")
    return lines


def _name_ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
