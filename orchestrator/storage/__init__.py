"""Object stores, and the commit protocol on top of them."""

from orchestrator.storage.open import open_store
from orchestrator.storage.protocol import ObjectStat, ObjectStore

__all__ = ["ObjectStat", "ObjectStore", "open_store"]
