"""Full matrices from shards: each is gathered on one rank, worked on there, and sent back in shards.

The placements of DTensors are undone one mesh axis after the other, for all matrices of a mesh in one collective. Ranks
that hold shards of the same matrices, and those that hold replicas, divide them by cost.
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
#: Takes full matrices (R, C), and returns as many of their shapes, in one dtype.
Work = Callable[[list[Tensor]], list[Tensor]]


class MeshAxis(NamedTuple):
    """A mesh axis, and the dim of a matrix that it shards, 0 or 1; None if its ranks hold replicas."""

    mesh_dim: int
    dim: int | None


class ShardedMatrix(NamedTuple):
    """One matrix on one rank.

    shapes[i]: of the shard after `i` axes are undone; the last is the full shape. sizes[i]: of the shards of the ranks
    of axis `i` along its dim. owner: coordinate on each axis of the rank that works on it.
    """

    axes: tuple[MeshAxis, ...]
    shapes: tuple[tuple[int, int], ...]
    sizes: tuple[tuple[int, ...], ...]
    owner: tuple[int, ...]

    def shape_on(self, level: int, rank: int) -> tuple[int, int]:
        """Shape of the shard that another rank of axis `level` holds."""
        rows, columns = self.shapes[level]
        size = self.sizes[level][rank]
        return (size, columns) if self.axes[level].dim == 0 else (rows, size)


class FullMatrices:
    """Distributes the full matrices of `parameters` over the ranks that share them, to work on them there.

        full = FullMatrices(parameters, cost=lambda rows, columns: rows * columns)
        shards = full.work(shards, orthogonalize)         # of this rank, before and after

    Parameters are (R, C), or stacks of matrices (E, R, C). A rank keeps the matrices that it has in full: plain tensors,
    and stacks that are sharded along E only. All ranks of the other meshes must create this with the same parameters in
    the same order; no process group is created. Shards may be uneven or empty.

    Cost of `work`, per mesh and set of axes: two all-to-alls for each axis that shards matrices, one all-gather for each
    that replicates them, whatever the number of matrices. Memory: about three times the shards.
    """

    def __init__(self, parameters: Sequence[Tensor], cost: Cost) -> None:
        self._kept: list[int] = []
        self._exchanges: list[tuple[list[int], _MatrixExchange]] = []
        shared: dict[Any, list[int]] = {}
        for i, parameter in enumerate(parameters):
            axes = axes_of(parameter)
            if axes:
                kinds = tuple((axis.mesh_dim, axis.dim is None) for axis in axes)
                mesh = parameter.device_mesh  # type: ignore[attr-defined]
                shared.setdefault((mesh, kinds), []).append(i)
            else:
                self._kept.append(i)

        for (mesh, _), members in shared.items():
            matrices = _sharded_matrices(mesh, [parameters[i] for i in members], cost)
            self._exchanges.append((members, _MatrixExchange(mesh, matrices)))

    def work(self, shards: Sequence[Tensor], work: Work) -> list[Tensor]:
        """Run `work` on the full matrices of which `shards` are this rank's; return this rank's shards of the results."""
        stacks = [shard if shard.ndim == 3 else shard[None] for shard in shards]

        # this rank's own matrices, then those that it owns of each exchange
        full = [matrix for i in self._kept for matrix in stacks[i]]
        counts = [len(full)]
        for members, exchange in self._exchanges:
            full += exchange.gather([matrix for i in members for matrix in stacks[i]])
            counts.append(len(full))
        done = work(full)

        found = dict(zip(self._kept, _restack(done[: counts[0]], [stacks[i] for i in self._kept])))
        for (members, exchange), start, end in zip(self._exchanges, counts, counts[1:]):
            back = exchange.scatter(done[start:end], shards[members[0]])
            found.update(zip(members, _restack(back, [stacks[i] for i in members])))
        return [found[i].view(shard.shape) for i, shard in enumerate(shards)]


def axes_of(parameter: Tensor) -> tuple[MeshAxis, ...]:
    """Mesh axes over which a DTensor's matrices are sharded or replicated, in the order in which to undo them.

    Replicas come first: each of their ranks then exchanges its own fraction of the matrices only. The axis of a stack's
    experts is not among them.
    """
    axes = []
    mesh = getattr(parameter, "device_mesh", None)
    placements = getattr(parameter, "placements", ())
    for i, placement in enumerate(placements):
        sharded = getattr(placement, "dim", None)
        dim = None if sharded is None else sharded % parameter.ndim - (parameter.ndim - 2)
        if mesh.size(i) > 1 and (dim is None or dim >= 0):  # type: ignore[union-attr]
            axes.append(MeshAxis(i, dim))

    # Two axes that shard the same dim are undone from the right, as placements are made from the left; but FSDP's shards
    # of what tp has sharded (a placement with a split_factor) were made from the right.
    replicas = [axis for axis in axes if axis.dim is None]
    shards = [axis for axis in axes if axis.dim is not None]
    strided = any(hasattr(placements[axis.mesh_dim], "split_factor") for axis in shards)
    if not strided and len({axis.dim for axis in shards}) < len(shards):
        shards.reverse()
    return (*replicas, *shards)


def chunk_sizes(size: int, ranks: int) -> tuple[int, ...]:
    """Sizes of the shards of a dim, as torch makes them: full chunks first, the last smaller or empty."""
    chunk = math.ceil(size / ranks)
    return tuple(max(0, min(chunk, size - i * chunk)) for i in range(ranks))


def _sharded_matrices(mesh: Any, parameters: Sequence[Tensor], cost: Cost) -> list[ShardedMatrix]:
    """All matrices of which this rank has a shard, with owners of about equal work."""
    found: list[ShardedMatrix] = []
    coordinate = mesh.get_coordinate()
    for parameter in parameters:
        axes = axes_of(parameter)
        shape: tuple[int, int] = tuple(parameter.shape[-2:])  # type: ignore[assignment]
        shapes = [shape]
        sizes: list[tuple[int, ...]] = []

        for axis in reversed(axes):  # from the full matrix down to this rank's shard
            ranks = mesh.size(axis.mesh_dim)
            if axis.dim is None:
                own: tuple[int, ...] = ()
            else:
                own = chunk_sizes(shape[axis.dim], ranks)
                left = own[coordinate[axis.mesh_dim]]
                shape = (left, shape[1]) if axis.dim == 0 else (shape[0], left)
            shapes.insert(0, shape)
            sizes.insert(0, own)

        local = parameter.to_local()  # type: ignore[attr-defined]
        assert local.shape[-2:] == shape, (
            f"{tuple(local.shape)} of {tuple(parameter.shape)} in {axes}"
        )
        number = local.shape[0] if local.ndim == 3 else 1
        found += [ShardedMatrix(axes, tuple(shapes), tuple(sizes), ())] * number

    # every rank computes the same owners, so none are sent
    ranks_of = [mesh.size(axis.mesh_dim) for axis in found[0].axes] if found else []
    owners = balanced([cost(*matrix.shapes[-1]) for matrix in found], math.prod(ranks_of))
    return [
        matrix._replace(owner=_coordinate(owner, ranks_of))
        for matrix, owner in zip(found, owners, strict=True)
    ]


def balanced(costs: Sequence[int], ranks: int) -> list[int]:
    """Return a rank for each cost: the largest first, each to the rank with the least so far.

    The largest load is at most 4/3 of the best possible (Graham 1969, longest processing time first).
    """
    loads = [(0, rank) for rank in range(ranks)]
    found = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = heapq.heappop(loads)
        found[i] = rank
        heapq.heappush(loads, (load + costs[i], rank))
    return found


def _coordinate(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Coordinate of the rank with number `index` on axes of these sizes."""
    found: list[int] = []
    for size in reversed(sizes):
        index, last = divmod(index, size)
        found.insert(0, last)
    return tuple(found)


def _restack(matrices: Sequence[Tensor], stacks: Sequence[Tensor]) -> list[Tensor]:
    """Matrices as stacks of as many as `stacks` have."""
    ends = [0, *accumulate(len(stack) for stack in stacks)]
    return [
        torch.stack(list(matrices[a:b])) if b > a + 1 else matrices[a][None] if b > a else stack
        for a, b, stack in zip(ends, ends[1:], stacks)
    ]


class _MatrixExchange:
    """The collectives of one mesh; `matrices` are the same on its ranks except for the shapes of shards."""

    def __init__(self, mesh: Any, matrices: list[ShardedMatrix]) -> None:
        self._matrices = matrices
        self._axes = matrices[0].axes if matrices else ()
        self._coordinate = [mesh.get_coordinate()[axis.mesh_dim] for axis in self._axes]
        self._groups = [mesh.get_group(axis.mesh_dim) for axis in self._axes]
        self._ranks = [mesh.size(axis.mesh_dim) for axis in self._axes]

        #: Matrices of which this rank holds a shard after so many axes are undone.
        self._held = [list(range(len(matrices)))]
        for level, own in enumerate(self._coordinate):
            self._held.append([m for m in self._held[-1] if matrices[m].owner[level] == own])

    # A level is the number of axes that are undone: `gather` goes up from the shards, `scatter` back down.

    def gather(self, shards: list[Tensor]) -> list[Tensor]:
        """Shards of all matrices -> the full matrices that this rank owns."""
        held = dict(enumerate(shards))
        for level, axis in enumerate(self._axes):
            if axis.dim is not None:
                held = self._to_owners(level, held, shards[0])
        return [held[m] for m in self._held[-1]]

    def scatter(self, full: list[Tensor], like: Tensor) -> list[Tensor]:
        """The full matrices that this rank owns, perhaps none -> shards of all matrices, with the dtype of `like`."""
        held = dict(zip(self._held[-1], full))
        for level in reversed(range(len(self._axes))):
            replicated = self._axes[level].dim is None
            send = self._to_replicas if replicated else self._to_shards
            held = send(level, held, like)
        return [held[m] for m in self._held[0]]

    def _to_owners(self, level: int, held: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """Gather one axis: the shards of every rank go to the owners."""
        ranks = range(self._ranks[level])
        own = self._held[level + 1]
        outgoing = [[held[m] for m in self._owned_by(level, rank)] for rank in ranks]
        shapes = [[self._matrices[m].shape_on(level, rank) for m in own] for rank in ranks]
        received = _all_to_all(outgoing, shapes, self._groups[level], like)
        return {
            m: torch.cat([received[rank][i] for rank in ranks], dim=self._dim(m, level))
            for i, m in enumerate(own)
        }

    def _to_shards(self, level: int, held: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """Scatter one axis: the matrices of an owner go in shards to every rank."""
        ranks = range(self._ranks[level])
        own = self._held[level + 1]
        split = {m: held[m].split(self._matrices[m].sizes[level], self._dim(m, level)) for m in own}
        outgoing = [[split[m][rank] for m in own] for rank in ranks]
        members = [self._owned_by(level, rank) for rank in ranks]
        shapes = [[self._matrices[m].shapes[level] for m in owned] for owned in members]
        received = _all_to_all(outgoing, shapes, self._groups[level], like)
        return {m: shard for owned, row in zip(members, received) for m, shard in zip(owned, row)}

    def _to_replicas(self, level: int, held: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """Replicate along one axis: the matrices of every owner go to every rank."""
        import torch.distributed as dist

        members = [self._owned_by(level, rank) for rank in range(self._ranks[level])]
        shapes = [[self._matrices[m].shapes[level] for m in owned] for owned in members]

        # an all-gather needs equal lengths: shorter ones are padded
        length = max(sum(map(math.prod, row)) for row in shapes)
        mine = _flat([held[m] for m in self._held[level + 1]], like)
        padded = mine.new_zeros(length)
        padded[: mine.numel()] = mine
        everything = mine.new_empty(len(members) * length)
        dist.all_gather_into_tensor(everything, padded, group=self._groups[level])
        return {
            m: shard
            for owned, row, flat in zip(members, shapes, everything.split(length))
            for m, shard in zip(owned, _views(flat, row))
        }

    def _owned_by(self, level: int, rank: int) -> list[int]:
        """Matrices held at `level` that go to a rank of its axis."""
        return [m for m in self._held[level] if self._matrices[m].owner[level] == rank]

    def _dim(self, matrix: int, level: int) -> int:
        """The dim along which an axis shards a matrix."""
        dim = self._matrices[matrix].axes[level].dim
        assert dim is not None
        return dim


def _all_to_all(
    outgoing: list[list[Tensor]], shapes: list[list[tuple[int, int]]], group: Any, like: Tensor
) -> list[list[Tensor]]:
    """Send a list of tensors to each rank; receive tensors of `shapes` from each. One collective."""
    # imported late: processes without ranks need none of it
    import torch.distributed as dist

    counts = [sum(map(math.prod, row)) for row in shapes]
    received = like.new_empty(sum(counts))
    sent = _flat([tensor for row in outgoing for tensor in row], like)
    sent_counts = [sum(tensor.numel() for tensor in row) for row in outgoing]
    dist.all_to_all_single(received, sent, counts, sent_counts, group=group)
    return [_views(flat, row) for flat, row in zip(received.split(counts), shapes)]


def _flat(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Concatenate tensors, in the dtype and on the device of `like`."""
    return torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in tensors)])


def _views(flat: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Matrices of these shapes, one after another in `flat`, with padding after them or not."""
    counts = [math.prod(shape) for shape in shapes]
    used = flat[: sum(counts)].split(counts) if counts else ()
    return [part.view(shape) for part, shape in zip(used, shapes)]
