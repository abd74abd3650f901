"""Data sets: shards, their index, the order of samples, and loaders."""
