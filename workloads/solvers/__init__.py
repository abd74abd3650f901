"""Solvers of convex problems and of k-means; deterministic on one device."""
