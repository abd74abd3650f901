"""The node's cache of immutable objects, shared by all processes and runs on the node.

``ObjectCache`` gives whole objects as local files (index columns, shards); ``ShardCache`` gives the samples of a
split's shards, from local files if the shards fit into the cache, else by ranged reads.
"""

from workloads.data.cache.folder import CacheStats, Pin
from workloads.data.cache.objects import ObjectCache
from workloads.data.cache.shards import FilePart, ShardCache

__all__ = ["CacheStats", "FilePart", "ObjectCache", "Pin", "ShardCache"]
