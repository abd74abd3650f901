"""The controller of a cluster, and what its clients do with the store alone."""
