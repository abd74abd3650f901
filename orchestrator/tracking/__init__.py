"""Projection of journals, records and metric segments into MLflow; the only package that imports it."""
