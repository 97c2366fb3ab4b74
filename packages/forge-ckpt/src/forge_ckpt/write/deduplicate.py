"""Replicated boxes are written once: which rank writes which box."""

from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from forge_ckpt._shared.problems import invalid
from forge_ckpt.objects import dtype_name
from forge_ckpt.tree import dotted_name

Key = tuple[str, tuple[int, ...] | None]


def key_of(item: WriteItem) -> Key:
    """(name, offset) of a box: equal for the copies of it that several ranks hold."""
    offset = item.index.offset
    return item.index.fqn, None if offset is None else tuple(offset)


def deduplicate_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """Leave each box in one plan: an object in the lowest rank's, a replica in the smallest so far.

    Tied tensors stay in one plan, because a rank stores the memory that they share once. Raises ValueError for a name
    that is of another shape, dtype or kind on another rank: only one of them would be stored.
    """
    holders: dict[Key, list[int]] = {}
    found: dict[str, tuple[str, int]] = {}  # {name: what it is on its first rank}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            described = _described(item)
            there, first = found.setdefault(item.index.fqn, (described, rank))
            if there != described:
                rule = f"is {described} on rank {rank}, and {there} on rank {first}: plain tensors must be replicas"
                fix = "give each rank's own tensor another name, or save one DTensor"
                raise invalid(item.index.fqn, "ranks", ..., rule, fix)
            holders.setdefault(key_of(item), []).append(rank)

    paths = {
        p: rank for rank, plan in enumerate(plans) for p in plan.planner_data["paths"].values()
    }
    for path, rank in paths.items():
        for above in (path[:length] for length in range(1, len(path)) if path[:length] in paths):
            rule = f"is an object on rank {paths[above]}, and holds tensors on rank {rank}"
            fix = "save the same structure on all ranks"
            raise invalid(dotted_name(above), "ranks", ..., rule, fix)
    planned_bytes = [0] * len(plans)
    writer: dict[Key, int] = {}
    for plan in plans:
        for item in plan.items:
            name, offset = key = key_of(item)
            if key in writer:
                continue
            # The rank that writes the first name of this memory, if it is planned already.
            tied = writer.get((plan.planner_data["ties"].get(name), offset))
            if item.type == WriteItemType.BYTE_IO:
                writer[key] = holders[key][0]
            elif tied in holders[key]:
                writer[key] = tied
            else:
                writer[key] = min(holders[key], key=planned_bytes.__getitem__)
                planned_bytes[writer[key]] += item.tensor_storage_size() or 0
    return [
        SavePlan(
            [item for item in plan.items if writer[key_of(item)] == rank],
            planner_data=plan.planner_data,
        )
        for rank, plan in enumerate(plans)
    ]


def _described(item: WriteItem) -> str:
    data = item.tensor_data
    if data is None:
        return "an object"
    kind = "a plain" if item.type == WriteItemType.TENSOR else "a sharded"
    return f"{kind} tensor of {tuple(data.size)} {dtype_name(data.properties.dtype)}"
