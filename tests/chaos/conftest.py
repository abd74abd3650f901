"""The same cluster as the integration tests'."""

from tests.integration.conftest import namespace, ray_cluster, store, until

__all__ = ["namespace", "ray_cluster", "store", "until"]
