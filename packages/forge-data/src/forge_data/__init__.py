"""Token files, packing and a resumable global order of training data."""
