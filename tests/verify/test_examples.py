"""The worked examples in the docstrings of the acceptance rules are right."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["accept", "block", "tree", "typical"])
def test_the_examples_of(name: str) -> None:
    result = doctest.testmod(import_module(f"draftsmith.verify.{name}"))
    assert result.failed == 0 and result.attempted > 0
