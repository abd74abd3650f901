"""One pool of rank processes for all tests of this folder, which `make test` does not start."""

from collections.abc import Iterator

import pytest
import torch

from tests.rank_processes import RankPool


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    pool, threads = RankPool(4), torch.get_num_threads()
    torch.set_num_threads(1)
    yield pool
    torch.set_num_threads(threads)
    pool.close()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave tests of several ranks to CI."""
    if "pool" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.ci)
