"""`forge_lab.lm_harness` by its name of 0.1, which goes in 0.3.0."""

from functools import partial

from forge_train._renamed import moved

__getattr__ = partial(moved, __name__)
