"""Searches: a study of ours, whose trials Ray Tune places; each trial has its own actor."""
