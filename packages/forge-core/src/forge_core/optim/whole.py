"""Whole matrices from shards: each is gathered on one rank, worked on there, and sent back in parts.

The placements of DTensors are undone one axis of their mesh after the other, for all matrices of a mesh in one
collective. Ranks that hold parts of the same matrices, and those that hold copies, divide them by cost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: FLOPs for a matrix (rows, columns), up to a factor.
Cost = Callable[[int, int], int]
#: Takes whole matrices (R, C), and returns as many of their shapes, in one dtype.
Work = Callable[[list[Tensor]], list[Tensor]]


class Axis(NamedTuple):
    """An axis of a mesh, and the dim of a matrix that it cuts, 0 or 1; None where its ranks hold copies."""

    mesh_dim: int
    dim: int | None


class Unit(NamedTuple):
    """One matrix on one rank.

    shapes[i]: of the part after `i` axes are undone; the last is the whole. sizes[i]: of the parts of the ranks
    of axis `i` along its dim. owner: place on each axis of the rank that works on it.
    """

    axes: tuple[Axis, ...]
    shapes: tuple[tuple[int, int], ...]
    sizes: tuple[tuple[int, ...], ...]
    owner: tuple[int, ...]

    def shape(self, level: int, rank: int) -> tuple[int, int]:
        """Of the part that another rank of the axis holds."""
        rows, columns = self.shapes[level]
        size = self.sizes[level][rank]
        return (size, columns) if self.axes[level].dim == 0 else (rows, size)


class WholeMatrices:
    """Spreads whole matrices of `parameters` over the ranks that share them, to work on them there.

        whole = WholeMatrices(parameters, cost=lambda rows, columns: rows * columns)
        parts = whole.work(parts, orthogonalise)         # of this rank, before and after

    Parameters are (R, C), or stacks of matrices (E, R, C). What a rank has whole it keeps: plain tensors, and
    stacks that are cut along E alone. All ranks of the others' meshes must make this with the same parameters
    in the same order; no process group is made. Shards may be uneven or empty.

    Cost of `work`, per mesh and set of axes: two all-to-alls for each axis that cuts matrices, one all-gather
    for each that holds copies, whatever the number of matrices. Memory: about three times the parts.
    """

    def __init__(self, parameters: Sequence[Tensor], cost: Cost) -> None:
        self._alone: list[int] = []
        self._exchanges: list[tuple[list[int], _Exchange]] = []
        shared: dict[Any, list[int]] = {}
        for i, parameter in enumerate(parameters):
            axes = axes_of(parameter)
            if axes:
                kinds = tuple((axis.mesh_dim, axis.dim is None) for axis in axes)
                mesh = parameter.device_mesh  # type: ignore[attr-defined]
                shared.setdefault((mesh, kinds), []).append(i)
            else:
                self._alone.append(i)
        for (mesh, _), members in shared.items():
            units = _units(mesh, [parameters[i] for i in members], cost)
            self._exchanges.append((members, _Exchange(mesh, units)))

    def work(self, parts: Sequence[Tensor], work: Work) -> list[Tensor]:
        """`work` on the whole matrices of which `parts` are this rank's parts; parts of the results."""
        stacks = [part if part.ndim == 3 else part[None] for part in parts]
        whole = [matrix for i in self._alone for matrix in stacks[i]]
        counts = [len(whole)]
        for members, exchange in self._exchanges:
            whole += exchange.gather([matrix for i in members for matrix in stacks[i]])
            counts.append(len(whole))
        done = work(whole)
        found = dict(
            zip(self._alone, _restack(done[: counts[0]], [stacks[i] for i in self._alone]))
        )
        for (members, exchange), start, end in zip(self._exchanges, counts, counts[1:]):
            back = exchange.scatter(done[start:end], parts[members[0]])
            found.update(zip(members, _restack(back, [stacks[i] for i in members])))
        return [found[i].view(part.shape) for i, part in enumerate(parts)]


def axes_of(parameter: Tensor) -> tuple[Axis, ...]:
    """Axes of a DTensor's mesh over which its matrices are cut or copied, in the order in which to undo them.

    Copies come first: then each of their ranks exchanges its share of the matrices alone. Two axes that cut the same
    dim are undone from the right, as placements are made from the left; FSDP's cut of what tp cut before
    (a placement with a split_factor) was made from the right. The axis of a stack's experts is none of them.
    """
    axes = []
    mesh = getattr(parameter, "device_mesh", None)
    placements = getattr(parameter, "placements", ())
    for i, placement in enumerate(placements):
        cut = getattr(placement, "dim", None)
        dim = None if cut is None else cut % parameter.ndim - (parameter.ndim - 2)
        if mesh.size(i) > 1 and (dim is None or dim >= 0):  # type: ignore[union-attr]
            axes.append(Axis(i, dim))
    copies = [axis for axis in axes if axis.dim is None]
    cuts = [axis for axis in axes if axis.dim is not None]
    strided = any(hasattr(placements[axis.mesh_dim], "split_factor") for axis in cuts)
    if not strided and len({axis.dim for axis in cuts}) < len(cuts):
        cuts.reverse()
    return (*copies, *cuts)


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """As torch cuts a dim: full chunks first, the last smaller or empty."""
    chunk = math.ceil(size / parts)
    return tuple(max(0, min(chunk, size - i * chunk)) for i in range(parts))


def _units(mesh: Any, parameters: Sequence[Tensor], cost: Cost) -> list[Unit]:
    """A unit for each matrix that this rank has a part of, with owners of about equal work."""
    found: list[Unit] = []
    place = mesh.get_coordinate()
    for parameter in parameters:
        axes = axes_of(parameter)
        shape: tuple[int, int] = tuple(parameter.shape[-2:])  # type: ignore[assignment]
        shapes = [shape]
        sizes: list[tuple[int, ...]] = []
        for axis in reversed(axes):  # from the whole down to this rank's part
            ranks = mesh.size(axis.mesh_dim)
            if axis.dim is None:
                own: tuple[int, ...] = ()
            else:
                own = chunk_sizes(shape[axis.dim], ranks)
                left = own[place[axis.mesh_dim]]
                shape = (left, shape[1]) if axis.dim == 0 else (shape[0], left)
            shapes.insert(0, shape)
            sizes.insert(0, own)
        local = parameter.to_local()  # type: ignore[attr-defined]
        assert local.shape[-2:] == shape, (
            f"{tuple(local.shape)} of {tuple(parameter.shape)} in {axes}"
        )
        number = local.shape[0] if local.ndim == 3 else 1
        found += [Unit(axes, tuple(shapes), tuple(sizes), ())] * number
    ranks_of = [mesh.size(axis.mesh_dim) for axis in found[0].axes] if found else []
    owners = balanced([cost(*unit.shapes[-1]) for unit in found], math.prod(ranks_of))
    return [
        unit._replace(owner=_places(owner, ranks_of))
        for unit, owner in zip(found, owners, strict=True)
    ]


def balanced(costs: Sequence[int], ranks: int) -> list[int]:
    """A rank for each: the dearest first, each to the rank with the least so far (Graham 1969: at most 4/3 of the best)."""
    loads = [(0, rank) for rank in range(ranks)]
    found = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = heapq.heappop(loads)
        found[i] = rank
        heapq.heappush(loads, (load + costs[i], rank))
    return found


def _places(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(sizes):
        index, place = divmod(index, size)
        found.insert(0, place)
    return tuple(found)


def _restack(matrices: Sequence[Tensor], stacks: Sequence[Tensor]) -> list[Tensor]:
    """Matrices as stacks of as many as `stacks` have."""
    ends = [0, *accumulate(len(stack) for stack in stacks)]
    return [
        torch.stack(list(matrices[a:b])) if b > a + 1 else matrices[a][None] if b > a else stack
        for a, b, stack in zip(ends, ends[1:], stacks)
    ]


class _Exchange:
    """The collectives of one mesh; `units` are alike on its ranks but for the shapes of parts."""

    def __init__(self, mesh: Any, units: list[Unit]) -> None:
        self._units = units
        self._axes = units[0].axes if units else ()
        self._place = [mesh.get_coordinate()[axis.mesh_dim] for axis in self._axes]
        self._groups = [mesh.get_group(axis.mesh_dim) for axis in self._axes]
        self._ranks = [mesh.size(axis.mesh_dim) for axis in self._axes]
        #: Units of which this rank holds a part once so many axes are undone.
        self._held = [list(range(len(units)))]
        for level, place in enumerate(self._place):
            self._held.append([u for u in self._held[-1] if units[u].owner[level] == place])

    def gather(self, parts: list[Tensor]) -> list[Tensor]:
        """Parts of all units -> whole matrices of this rank's own."""
        held = dict(enumerate(parts))
        for level, axis in enumerate(self._axes):
            if axis.dim is not None:
                held = self._gathered(level, held, parts[0])
        return [held[u] for u in self._held[-1]]

    def scatter(self, whole: list[Tensor], like: Tensor) -> list[Tensor]:
        """Whole matrices of this rank's own, which may be none -> parts of all units, with the dtype of `like`."""
        held = dict(zip(self._held[-1], whole))
        for level in reversed(range(len(self._axes))):
            copies = self._axes[level].dim is None
            held = self._copied(level, held, like) if copies else self._scattered(level, held, like)
        return [held[u] for u in self._held[0]]

    def _gathered(self, level: int, held: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """One axis: every rank's parts to their owners."""
        ranks = range(self._ranks[level])
        own = self._held[level + 1]
        outgoing = [[held[u] for u in self._of(level, rank)] for rank in ranks]
        shapes = [[self._units[u].shape(level, rank) for u in own] for rank in ranks]
        received = _all_to_all(outgoing, shapes, self._groups[level], like)
        return {
            u: torch.cat([received[rank][i] for rank in ranks], dim=self._dim(u, level))
            for i, u in enumerate(own)
        }

    def _scattered(self, level: int, held: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """One axis: what an owner has, in parts to every rank."""
        ranks = range(self._ranks[level])
        own = self._held[level + 1]
        cut = {u: held[u].split(self._units[u].sizes[level], self._dim(u, level)) for u in own}
        outgoing = [[cut[u][rank] for u in own] for rank in ranks]
        members = [self._of(level, rank) for rank in ranks]
        shapes = [[self._units[u].shapes[level] for u in units] for units in members]
        received = _all_to_all(outgoing, shapes, self._groups[level], like)
        return {u: part for units, row in zip(members, received) for u, part in zip(units, row)}

    def _copied(self, level: int, held: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """One axis of copies: what an owner has, to every rank."""
        import torch.distributed as dist

        members = [self._of(level, rank) for rank in range(self._ranks[level])]
        shapes = [[self._units[u].shapes[level] for u in units] for units in members]
        length = max(sum(map(math.prod, row)) for row in shapes)
        mine = _flat([held[u] for u in self._held[level + 1]], like)
        padded = mine.new_zeros(length)
        padded[: mine.numel()] = mine
        everything = mine.new_empty(len(members) * length)
        dist.all_gather_into_tensor(everything, padded, group=self._groups[level])
        return {
            u: part
            for units, row, flat in zip(members, shapes, everything.split(length))
            for u, part in zip(units, _views(flat, row))
        }

    def _of(self, level: int, rank: int) -> list[int]:
        """Units of level `level` that go to a rank of its axis."""
        return [u for u in self._held[level] if self._units[u].owner[level] == rank]

    def _dim(self, unit: int, level: int) -> int:
        dim = self._units[unit].axes[level].dim
        assert dim is not None
        return dim


def _all_to_all(
    outgoing: list[list[Tensor]], shapes: list[list[tuple[int, int]]], group: Any, like: Tensor
) -> list[list[Tensor]]:
    """A row of tensors to each rank; of each, tensors of `shapes`."""
    # imported late: processes without ranks need none of it
    import torch.distributed as dist

    counts = [sum(map(math.prod, row)) for row in shapes]
    received = like.new_empty(sum(counts))
    sent = _flat([tensor for row in outgoing for tensor in row], like)
    sent_counts = [sum(tensor.numel() for tensor in row) for row in outgoing]
    dist.all_to_all_single(received, sent, counts, sent_counts, group=group)
    return [_views(flat, row) for flat, row in zip(received.split(counts), shapes)]


def _flat(tensors: list[Tensor], like: Tensor) -> Tensor:
    """End to end, in the dtype and on the device of `like`."""
    return torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in tensors)])


def _views(flat: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Matrices that lie end to end, perhaps with padding behind."""
    counts = [math.prod(shape) for shape in shapes]
    used = flat[: sum(counts)].split(counts) if counts else ()
    return [part.view(shape) for part, shape in zip(used, shapes)]
