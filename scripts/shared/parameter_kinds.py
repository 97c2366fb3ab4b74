"""What a parameter is: the names by which modules of all packages declare it (`parameter_kinds`)."""

from typing import Literal

#: A stack has one more dim, its first: experts, groups or heads. A tensor is a weight of two dims or more that no matmul
#: takes as it is, such as that of a convolution.
ParameterKind = Literal[
    "matrix", "vector", "norm", "bias", "embedding", "tensor",
    "stacked_matrix", "stacked_vector", "stacked_norm", "stacked_bias", "stacked_embedding",
]  # fmt: skip
