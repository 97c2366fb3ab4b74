"""Stop signals, exit codes and an event journal for training jobs."""
