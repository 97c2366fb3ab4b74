"""Transformers, losses, optimizers and generation for PyTorch."""
