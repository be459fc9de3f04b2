"""Engines for the tests of this folder; without their environment these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engines import Vllm, environment


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """One server for all tests."""
    if not any(environment().glob("lib/python*/site-packages/vllm")):
        pytest.skip(f"no vLLM in {environment()}: run `make engines` (about 3.5 GB), or set DRAFTSMITH_ENGINES to such an environment")
    server = Vllm(tmp_path_factory.mktemp("vllm") / "log.txt")
    try:
        server.start()
        yield server
    finally:
        server.kill()
