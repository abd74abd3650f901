"""Simulations: what papers claim of small models, each computed for one seed at a time."""
