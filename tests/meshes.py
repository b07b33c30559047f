"""Meshes of the tests; a test that asks for more devices than there are is skipped.

``make test`` runs on eight virtual CPU devices, ``make test DEVICES=1`` on one, and on a machine
with one GPU on that.
"""

from collections.abc import Sequence
import math

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
