"""Tiny residual networks in NNX and in Linen, with names that say nothing of the structure.

`drop` builds, by hand, the network that ``less_bn`` should make of the one without it.
"""

from typing import Any

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 4
# Before flax 0.12 plain lists hold modules.
List = getattr(nnx, "List", list)
X = jax.random.normal(jax.random.key(0), (2, 6, 6, 3))


def identity(x):
  return x


class NnxBlock(nnx.Module):
  """Layers in reverse order of names; the shortcut's BatchNorm is the first of all."""

  def __init__(self, inputs, outputs, sizes, rngs, drop=False, pre=False):
    n = len(sizes)
    widths = [inputs, *[WIDTH] * (n - 1), outputs]
    self.convs = List(
      [
        nnx.Conv(widths[i], widths[i + 1], (size, size), use_bias=False, rngs=rngs)
        for i, size in enumerate(sizes)
      ][::-1]
    )
    self.norms = List(
      [
        identity if drop and i < n - 1 else nnx.BatchNorm(widths[i if pre else i + 1], rngs=rngs)
        for i in range(n)
      ][::-1]
    )
    same = inputs == outputs
    self.a = identity if same else nnx.Conv(inputs, outputs, (1, 1), rngs=rngs)
    self.bn1 = identity if same or pre else nnx.BatchNorm(outputs, rngs=rngs)
    self.pre = pre

  def __call__(self, x):
    layers = list(zip(self.convs, self.norms, strict=True))[::-1]
    y = x
    for i, (conv, norm) in enumerate(layers):
      if self.pre:
        y = conv(nnx.relu(norm(y)))
      else:
        y = norm(conv(y))
        y = nnx.silu(y) if i < len(layers) - 1 else y
    short = self.bn1(self.a(x))
    return short + y if self.pre else nnx.relu(short + y)


class NnxNet(nnx.Module):
  """Stem, two blocks (the first with a shortcut of its own), head."""

  def __init__(self, sizes=(1, 3, 1), rngs=None, drop=False, pre=False, block=NnxBlock):
    rngs = rngs or nnx.Rngs(0)
    self.last = nnx.Linear(2 * WIDTH, 5, rngs=rngs)
    self.blocks = List(
      [
        block(WIDTH, 2 * WIDTH, sizes, rngs, drop, pre),
        block(2 * WIDTH, 2 * WIDTH, sizes, rngs, drop, pre),
      ]
    )
    self.norm9 = nnx.BatchNorm(WIDTH, rngs=rngs)
    self.first = nnx.Conv(3, WIDTH, (3, 3), use_bias=False, rngs=rngs)

  def features(self, x):
    x = nnx.relu(self.norm9(self.first(x)))
    for block in self.blocks:
      x = block(x)
    return jnp.mean(x, (1, 2))

  def __call__(self, x):
    return self.last(self.features(x))


def filled(tree, seed):
  """Arrays for abstract ones; each of flax's initializers is a program to compile per shape."""
  rng = np.random.default_rng(seed)

  def fill(path, leaf):
    name = path[-1].key
    if name == "kernel":
      return jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype)
    return jnp.asarray(np.full(leaf.shape, name in ("scale", "var", "multiplier")), leaf.dtype)

  return jax.tree.map_with_path(fill, tree)


def filled_nnx_net(seed, make=NnxNet):
  graphdef, state = nnx.split(nnx.eval_shape(make))
  return nnx.merge(graphdef, filled(nnx.to_pure_dict(state), seed))


class LinenBlock(nn.Module):
  outputs: int
  sizes: tuple[int, ...]
  drop: bool = False
  pre: bool = False

  @nn.compact
  def __call__(self, x, train):
    n = len(self.sizes)
    short = x
    if x.shape[-1] != self.outputs:
      short = nn.Conv(self.outputs, (1, 1), name="a")(x)
      short = short if self.pre else self.norm(train, "bn1")(short)
    y = x
    for i, size in enumerate(self.sizes):
      norm = identity if self.drop and i < n - 1 else self.norm(train, f"norms_{n - 1 - i}")
      width = self.outputs if i == n - 1 else WIDTH
      conv = nn.Conv(width, (size, size), use_bias=False, name=f"convs_{n - 1 - i}")
      if self.pre:
        y = conv(nn.relu(norm(y)))
      else:
        y = norm(conv(y))
        y = nn.silu(y) if i < n - 1 else y
    return short + y if self.pre else nn.relu(short + y)

  def norm(self, train, name):
    return nn.BatchNorm(use_running_average=not train, name=name)


class LinenNet(nn.Module):
  sizes: tuple[int, ...] = (1, 3, 1)
  drop: bool = False
  pre: bool = False
  block: Any = LinenBlock

  def setup(self):
    self.last = nn.Dense(5)
    self.blocks = [self.block(2 * WIDTH, self.sizes, self.drop, self.pre) for _ in range(2)]
    self.norm9 = nn.BatchNorm()
    self.first = nn.Conv(WIDTH, (3, 3), use_bias=False)

  def features(self, x, train=False):
    x = nn.relu(self.norm9(self.first(x), use_running_average=not train))
    for block in self.blocks:
      x = block(x, train)
    return jnp.mean(x, (1, 2))

  def __call__(self, x, train=False):
    return self.last(self.features(x, train))
