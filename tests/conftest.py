"""For all tests: hypothesis judges results, not how long an example took on a busy machine; processes are forked where they can be."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def forked_ray_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """See :func:`support.forked_workers.forked_workers`; the environment of this process has the variables already."""
    from support.forked_workers import forked_workers

    with forked_workers(tmp_path_factory.mktemp("forks")) as environment:
        os.environ.update(environment)
        yield environment
        for name in environment:
            del os.environ[name]
