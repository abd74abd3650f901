"""Which trials of a search garbage collection must leave alone."""

from __future__ import annotations

from orchestrator.search.events import fold_search
from orchestrator.search.log import read_search
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.trials import TrialState


def kept_trials(store: ObjectStore, key: str) -> set[str]:
    """Keys of trials that completed; of a search that is not over those that it stopped and those that run, too.

    Raises:
        ValueError, KeyError, TypeError: the log is damaged, or of a newer version.
    """
    trials = fold_search(read_search(store, key)).values()
    is_over = is_committed(store, key)
    return {view.key for view in trials if view.key and (not is_over or view.state is TrialState.COMPLETED)}
