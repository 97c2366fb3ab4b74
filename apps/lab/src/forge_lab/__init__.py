"""What is done with the runs of `forge_train`: evaluations, texts, activations, reports, replays and studies."""
