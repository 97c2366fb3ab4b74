"""Replicated boxes are written once: which rank writes which box."""

from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

Key = tuple[str, tuple[int, ...] | None]


def key_of(item: WriteItem) -> Key:
    """(name, offset) of a box: equal for the copies of it that several ranks hold."""
    offset = item.index.offset
    return item.index.fqn, None if offset is None else tuple(offset)


def deduplicate_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """Leave each box in one plan: an object in the lowest rank's, a replica in the smallest so far.

    Tied tensors stay in one plan, because a rank stores the memory that they share once.
    """
    holders: dict[Key, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(key_of(item), []).append(rank)
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
