"""The shards of a listed source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.core.contract import ExecutionContext, JobRequest
from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import ClassRows
from workloads.data.convert.listing import Listing
from workloads.data.convert.request import Layout, ShardLayout
from workloads.data.convert.write import VERSION, shard_rows, source_samples
from workloads.data.shards import shard_name, write_shard


class ListedShards:
    """See `ShardSet`; which image goes into which shard follows from the listing and the layout alone."""

    def __init__(self, listing: Listing, layout: Layout) -> None:
        self._listing = listing
        found = {split: shard_rows(items, layout, split) for split, items in listing.splits.items()}
        self._places = [(split, rows) for split, shards in found.items() for rows in shards]
        self._names = [shard_name(split, number) for split, shards in found.items() for number in range(len(shards))]

    @property
    def names(self) -> Sequence[str]:
        """See `ShardSet`."""
        return self._names

    @property
    def classes(self) -> ClassRows:
        """See `ShardSet`."""
        return self._listing.classes

    def write(self, number: int, path: Path) -> None:
        """See `ShardSet`. Raises ``UserError`` if an image of the source is gone or another."""
        split, rows = self._places[number]
        items = (self._listing.splits[split].item(row) for row in rows.tolist())
        write_shard(source_samples(items, multi_label=self._listing.multi_label), path)


def open_listed(request: JobRequest, context: ExecutionContext) -> ListedShards:
    """The shards that a job with the input ``listing`` and the parameters ``shards`` is about.

    Raises:
        UserError: this code writes other shards than were planned, or the job has no source.
    """
    asked, location = request.parameters["shards"], request.execution.data_location
    if asked["version"] != VERSION:
        message = f"shards of version {asked['version']!r} were planned, this code writes version {VERSION}: plan again"
        raise UserError(message)
    if "convert" not in location:
        raise UserError(f"{request.job} has no source to read; plan the sweep again with this version")
    listing = Listing.open(context.store, request.inputs["listing"], context.cache, location["convert"])
    layout = ShardLayout(shard_bytes=asked["shard_bytes"], shuffle_seed=asked["shuffle_seed"])
    return ListedShards(listing, layout)
