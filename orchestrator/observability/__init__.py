"""What operators see of a running cluster: metrics for Prometheus, and who is told when it matters."""
