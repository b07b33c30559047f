"""Meshes of the tests; a test that asks for more devices than there are is skipped.

``make test`` runs on eight virtual CPU devices, ``make test DEVICES=1`` on one, and on a machine
with one GPU on that.
"""

import collections
from collections.abc import Sequence
import math
import re

import jax
import pytest


def devices(count: int) -> list[jax.Device]:
  """The first `count` devices, or a skipped test."""
  if jax.device_count() < count:
    pytest.skip(f"needs {count} devices, has {jax.device_count()}")
  return jax.devices()[:count]


def mesh(sizes: Sequence[int], names: Sequence[str], *kinds: str) -> jax.sharding.Mesh:
  """A mesh whose axes have the kinds, if one is given that kind, else `Auto`."""
  kinds = kinds or ("Auto",)
  types = tuple(jax.sharding.AxisType[kind] for kind in kinds)
  types *= len(sizes) // len(types)
  return jax.make_mesh(sizes, names, axis_types=types, devices=devices(math.prod(sizes)))


def collectives(program, size):
  """Counts the collectives with a result of at least `size` entries."""
  names = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
  found = re.findall(rf"= (\S+|\([^)]*\)) ({names})(?:-start)?\(", program.as_text())
  shapes = [(name, re.findall(r"\[([\d,]*)\]", types)) for types, name in found]
  large = lambda shape: math.prod(map(int, filter(None, shape.split(",")))) >= size  # noqa: E731
  return collections.Counter(name for name, shapes in shapes if any(map(large, shapes)))
