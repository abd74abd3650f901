"""Submitting to a cluster that this machine is no part of: through its dashboard, or through its store."""
