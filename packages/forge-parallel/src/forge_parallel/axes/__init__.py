"""One file for each way of spreading a model over ranks."""
