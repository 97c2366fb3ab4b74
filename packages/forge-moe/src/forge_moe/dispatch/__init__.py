"""Strategies that bring tokens to experts and results back.

A strategy is an object with

    dispatch(x (T, D), weights (T, K) fp32, ids (T, K) int64 in 0..E) -> Dispatched
    combine(rows (R, D), meta) -> (T, D) fp32

and, if it overlaps work, `run(x, weights, ids, experts, meanwhile) -> ((T, D) fp32, result of meanwhile)`,
which does both and the experts between them, and calls `meanwhile()` (or gets None) while rows travel.
"""

from forge_moe.dispatch.local import Dispatched, LocalDispatch

__all__ = ["Dispatched", "LocalDispatch"]
