import shutil
from pathlib import Path

import pytest

from tests.support.trained import small_run
from turbogr.recommend.model import Model


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of a small HSTU."""
    return small_run(tmp_path_factory.mktemp("trained") / "run", epochs=2)


@pytest.fixture(scope="session")
def model(run: Path) -> Model:
    return Model.load(run)


@pytest.fixture(scope="session")
def exported(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's export, to be read only."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    model.save(folder)
    return folder


@pytest.fixture
def spoiled(exported: Path, tmp_path: Path) -> Path:
    """A copy of the export, to be damaged."""
    return Path(shutil.copytree(exported, tmp_path / "spoiled"))
