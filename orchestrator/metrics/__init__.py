"""Metrics for Prometheus; infra/grafana has the dashboard that shows them."""
