"""Tests whether a leaf's name in Flax, PyTorch or MXNet means a bias, a kernel or an embedding."""

import re

_BIAS_OR_NORM = re.compile(r"(^|[/.])(bias|scale|beta|gamma)$")
_EMBEDDING = re.compile(r"(^|[/.])[a-z_]*(embedding([/.]weight)?|embeddings|embeds?)$")
_KERNEL = re.compile(r"(^|[/.])([a-z_]*kernel|[a-z_]*weight|w)$")
# In Flax's attention these kernels have the axes [fan-in, heads, head features].
_ATTENTION_INPUT = re.compile(r"(^|[/.])(query|key|value)[/.]kernel$")


def is_bias_or_norm(path: str) -> bool:
  """Returns whether a leaf has the name of a bias, or of a normalization's scale or offset."""
  return _BIAS_OR_NORM.search(path) is not None


def is_embedding(path: str) -> bool:
  """Returns whether a leaf has the name of an embedding."""
  return _EMBEDDING.search(path) is not None


def is_kernel(path: str) -> bool:
  """Returns whether a leaf has the name of a kernel."""
  return _KERNEL.search(path) is not None


def is_attention_input(path: str) -> bool:
  """Returns whether a leaf has the name of a query, key or value kernel of Flax's attention."""
  return _ATTENTION_INPUT.search(path) is not None
