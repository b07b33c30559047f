"""What the name of a leaf tells of its role, as in Flax, PyTorch and MXNet."""

import re

_BIAS_OR_NORM = re.compile(r"(^|[/.])(bias|scale|beta|gamma)$")


def is_bias_or_norm(path: str) -> bool:
  """Whether a leaf has the name of a bias or a normalization in Flax or MXNet."""
  return _BIAS_OR_NORM.search(path) is not None
