"""Handlers of jobs, a module per kind; what several kinds share stands beside them."""
