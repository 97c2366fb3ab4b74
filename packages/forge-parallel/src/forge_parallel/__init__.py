"""Device, precision and parallel layouts for PyTorch models."""
