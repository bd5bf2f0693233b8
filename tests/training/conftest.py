"""What several tests of training begin with."""

from pathlib import Path

import pytest

from tests.helpers import training_toy as toy


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return toy.write_data(tmp_path)
