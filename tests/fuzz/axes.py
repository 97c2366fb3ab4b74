"""What the fuzzer varies: each axis with its values, and the keys of a job that a value sets.

A value is reached by `--only AXIS=VALUE`. `rules.py` has the combinations that Forge rejects, `draw.py` the sizes.
"""

from __future__ import annotations

from tests.fuzz.axes_data import DATA, TRAINING
from tests.fuzz.axes_experts import EXPERTS
from tests.fuzz.axes_images import IMAGES
from tests.fuzz.axes_layout import COMPUTATION, EVENTS, LAYOUT
from tests.fuzz.axes_model import MODEL
from tests.fuzz.axes_optimizer import OPTIMIZER
from tests.fuzz.job import Axis

AXES: dict[str, Axis] = {
    **MODEL, **EXPERTS, **IMAGES, **DATA, **TRAINING, **OPTIMIZER, **LAYOUT, **COMPUTATION, **EVENTS,
}  # fmt: skip
