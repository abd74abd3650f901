"""Failed requests of this process to its object store, as a counter."""

from __future__ import annotations

from orchestrator.metrics.catalog import STORE_ERRORS
from orchestrator.metrics.exporter import Exporter
from orchestrator.storage.error_counts import COUNTED, error_counts


class StoreErrors:
    """Exports what the storage layer counted in a controller's process since the last look."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._seen = error_counts()
        self._is_shown = False

    def show(self) -> None:
        """Count what is new."""
        if not self._is_shown:
            self._is_shown = True
            for source in ("controller", "runner"):
                for error in COUNTED:
                    self._exporter.add(STORE_ERRORS, 0, {"source": source, "error": error})
        counts = error_counts()
        for error, count in counts.items():
            if count > self._seen.get(error, 0):
                labels = {"source": "controller", "error": error}
                self._exporter.add(STORE_ERRORS, count - self._seen.get(error, 0), labels)
        self._seen = counts
