"""Foundations of the data plane: ranks, precision, random streams, how artifacts are written."""
