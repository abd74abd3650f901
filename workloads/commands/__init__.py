"""What the control plane asks of the data plane in processes of its own: ``python -m workloads.data``, ``.labels``."""
