"""Searches: which values of a recipe, or which label space, are best, for a fraction of the cost of all.

A sampler proposes trials, trials report their progress, and a rule stops the worse ones. Everything is written into a
log before it takes effect, and the log alone rebuilds a search after a crash. The backends run the trials (Ray Tune, or
one after the other); nothing here depends on that.
"""
