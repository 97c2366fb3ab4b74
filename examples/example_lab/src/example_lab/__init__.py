"""Parts that a training uses without any change to Forge."""
