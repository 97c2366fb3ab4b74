"""`forge_lab.lm_harness` by its name of 0.1, found until 0.3.0."""

from forge_train._renamed import names_of

__getattr__ = names_of(__name__)
