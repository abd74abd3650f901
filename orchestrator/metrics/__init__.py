"""Metrics for Prometheus, and the Grafana dashboard that shows them."""
