"""Vision-language fusion, encoders, freezing and data for PyTorch."""
