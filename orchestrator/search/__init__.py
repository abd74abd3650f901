"""Searches: which values of a recipe, or which label space, are best, for a fraction of what trying all would cost.

A search asks and tells: a sampler asks for trials, trials tell how far they are, a rule ends those that fall behind.
All of it is written into a log before it takes effect, and the log alone rebuilds a search after a crash. What runs the
trials (Ray Tune, or one after the other) is the backends' business; nothing here knows it.
"""
