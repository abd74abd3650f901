"""Submitting to a cluster from a machine outside of it: through its dashboard, or through its store."""
