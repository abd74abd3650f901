"""One pool of rank processes for all tests of this folder."""

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
