"""The half-precision example shows what it says."""

import importlib
import pathlib

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_float16_fails_alone_and_learns_with_the_stack():
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("half_precision")
  found = {name: example.run(recipe, 4, 0) for name, recipe in example.RECIPES.items()}
  assert found["float16 alone"][0] < 0.2
  assert found["float16, stack"][0] > found["float32"][0] - 0.02
  _, skipped, scale = found["float16, stack"]
  assert skipped > 0, "the first scale is meant to overflow"
  assert scale < 2**24
