"""Checks that a machine, a store and every node of a cluster have what sweeps need."""
