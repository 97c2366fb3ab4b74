"""Two sequences of text with three images of four tokens."""

import torch

IMAGE = 63


def rows(length):
    """tokens (2, length), images (3, 3, 8, 8)"""
    tokens = torch.randint(1, 60, (2, length), generator=torch.Generator().manual_seed(0))
    tokens[0, 2:6] = IMAGE
    tokens[1, 1:5] = tokens[1, 7:11] = IMAGE
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return tokens, images
