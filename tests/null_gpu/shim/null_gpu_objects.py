"""Python objects between ranks travel through the store of the default group.

torch sends the size of a pickled object first, which a kernel puts together: on a device without numbers all objects would
be empty. These take the place of its functions with the same names; as there, all ranks of a group call them in one order.
"""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_sent: Counter[str] = Counter()


def install() -> None:
    for function in (
        send_object_list,
        recv_object_list,
        broadcast_object_list,
        all_gather_object,
        gather_object,
        scatter_object_list,
    ):
        setattr(dist, function.__name__, function)
        setattr(dist.distributed_c10d, function.__name__, function)


def _key(source: int, target: int, group: Any) -> str:
    """The next message of a rank to a rank, both of the world, in a group."""
    place = f"null-gpu/{group.group_name}/{source}/{target}"
    _sent[place] += 1
    return f"{place}/{_sent[place]}"


def _put(value: Any, target: int, group: Any) -> None:
    _get_default_store().set(_key(dist.get_rank(), target, group), pickle.dumps(value))  # type: ignore[arg-type]


def _take(source: int, group: Any) -> Any:
    name = _key(source, dist.get_rank(), group)
    value = pickle.loads(_get_default_store().get(name))  # waits
    _get_default_store().delete_key(name)
    return value


def _of_world(rank: int | None, group: Any, group_rank: int | None) -> int:
    if group_rank is not None:
        return dist.get_global_rank(group, group_rank)
    return 0 if rank is None else rank


def _peers(group: Any) -> list[int]:
    return [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    group = group or dist.group.WORLD
    _put(object_list, _of_world(dst, group, group_dst), group)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    group = group or dist.group.WORLD
    source = _of_world(src, group, group_src)
    object_list[:] = _take(source, group)
    return source


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    group = group or dist.group.WORLD
    source = _of_world(src, group, group_src)
    if dist.get_rank() != source:
        object_list[:] = _take(source, group)
        return
    for peer in _peers(group):
        _put(object_list, peer, group)


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    group = group or dist.group.WORLD
    for peer in _peers(group):
        _put(obj, peer, group)
    ranks = dist.get_process_group_ranks(group)
    object_list[:] = [obj if rank == dist.get_rank() else _take(rank, group) for rank in ranks]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> None:
    group = group or dist.group.WORLD
    target = _of_world(dst, group, group_dst)
    if dist.get_rank() != target:
        _put(obj, target, group)
        return
    assert object_gather_list is not None
    ranks = dist.get_process_group_ranks(group)
    object_gather_list[:] = [obj if rank == target else _take(rank, group) for rank in ranks]


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> None:
    group = group or dist.group.WORLD
    source = _of_world(src, group, group_src)
    if dist.get_rank() != source:
        scatter_object_output_list[0] = _take(source, group)
        return
    assert scatter_object_input_list is not None
    for rank, value in zip(dist.get_process_group_ranks(group), scatter_object_input_list):
        if rank == source:
            scatter_object_output_list[0] = value
        else:
            _put(value, rank, group)
