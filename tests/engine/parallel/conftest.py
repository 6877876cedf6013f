"""Models of the tests of ranks."""

from pathlib import Path

import pytest

from support.random_folder import HYBRID, MIXTURE, NORMED_HYBRID, PARALLEL_HYBRID, write_random_folder
from support.random_model import write_random_model


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_folder(tmp_path_factory.mktemp("mixture"), MIXTURE)


@pytest.fixture(scope="package")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_folder(tmp_path_factory.mktemp("hybrid"), HYBRID)


@pytest.fixture(scope="package")
def parallel_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_folder(tmp_path_factory.mktemp("parallel_hybrid"), PARALLEL_HYBRID)


@pytest.fixture(scope="package")
def normed_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_folder(tmp_path_factory.mktemp("normed_hybrid"), NORMED_HYBRID)
