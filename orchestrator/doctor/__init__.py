"""Whether a machine, a store and every node of a cluster can do what sweeps need."""
