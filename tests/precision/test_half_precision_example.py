"""The half-precision example: float16 fails alone, and learns with the stack."""


def test_float16_fails_alone_and_learns_with_the_stack(import_example):
  example = import_example("half_precision")
  results = {name: example.run(recipe, 4, 0) for name, recipe in example.RECIPES.items()}
  assert results["float16 alone"][0] < 0.2
  assert results["float16, stack"][0] > results["float32"][0] - 0.02
  _, skipped, scale = results["float16, stack"]
  assert skipped > 0, "the first scale is meant to overflow"
  assert scale < 2**24
