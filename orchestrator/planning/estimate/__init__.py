"""Durations and costs of jobs, and the statistical power of a design. Pure: no I/O, no clock."""
