"""Parts that somebody adds to a training without touching it."""
