"""The parts of the table; each yields its rows as they are measured."""

from collections.abc import Callable, Iterator
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import models
from benchmarks.gpu import sizes, timing
import optax_boost
import optax_boost.linen

Rows = Iterator[tuple[str, timing.Record]]


def _sgd() -> optax.GradientTransformation:
  return optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.01, momentum=0.9))


def _centralized() -> optax.GradientTransformation:
  return optax.chain(optax_boost.centralize(), _sgd())


def _always(
  groups: optax_boost.LayerGroups, depth: int, tx: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
  """The optimizer with so many groups frozen in every step."""
  schedule = optax_boost.fixed_freezing(len(groups.groups), depth)
  return optax_boost.freeze_layers(tx or _sgd(), groups, schedule)


class _Images:
  """The network of images with its batch."""

  def __init__(self, of: sizes.Sizes):
    self.calls = of.calls
    count, side = of.images
    keys = jax.random.split(jax.random.key(0), 3)
    self.batch = {
      "x": jax.random.normal(keys[0], (count, side, side, 3), of.resnet.dtype),
      "y": jax.random.randint(keys[1], (count,), 0, of.resnet.classes),
    }
    self.module = of.resnet
    self.key = keys[2]

  def groups(self, module: Any, number: int) -> Any:
    variables = jax.eval_shape(module.init, self.key, self.batch["x"])
    split = optax_boost.linen.split_loss(models.image_loss, module, variables)
    return optax_boost.layer_groups(*split, self.batch, num_groups=number)

  def step(self, module: Any, tx: optax.GradientTransformation) -> timing.Record:
    variables = jax.jit(module.init)(self.key, self.batch["x"])
    loss, *arrays = optax_boost.linen.split_loss(models.image_loss, module, variables)
    made = optax_boost.make_train_step(loss, tx)
    return timing.train_step(made, made.init(*arrays), self.batch, self.calls)


def resnet50(of: sizes.Sizes) -> Rows:
  """AutoBoost's levels on the network of images."""
  images = _Images(of)
  boost = optax_boost.auto_boost("O1", total_steps=100)
  fewer = boost.model(optax_boost.linen.less_bn, images.module, images.batch["x"])
  yield "O0", images.step(images.module, _sgd())
  yield "first half frozen", images.step(images.module, _always(images.groups(images.module, 2), 1))
  unfrozen = images.step(fewer, _centralized())
  yield "O1's and O2's first steps: fewer BatchNorms, centralized", unfrozen
  groups = images.groups(fewer, 2)
  frozen = images.step(fewer, _always(groups, 1, _centralized()))
  yield "their last steps: the same, first half frozen", frozen
  for level, share in (("O1", 0.3), ("O2", 0.45)):
    mean = (1 - share) * unfrozen["ms"] + share * frozen["ms"]
    yield f"{level}: the mean of a training, from these", {"ms": mean}


def freezing(of: sizes.Sizes) -> Rows:
  """The programs of two depths."""
  images = _Images(of)
  groups = images.groups(images.module, 4)
  yield "2 of 4 frozen", images.step(images.module, _always(groups, 2))
  yield "none frozen", images.step(images.module, _always(groups, 0))


def optimizers(of: sizes.Sizes) -> Rows:
  """Optimizers alone, on many leaves."""
  x = jnp.zeros((1, 64, 64, 3))
  resnet = jax.eval_shape(of.resnet.init, jax.random.key(0), x)["params"]
  gpt2 = jax.eval_shape(lambda key: of.gpt2.unstacked(of.gpt2.init(key)), jax.random.key(0))
  trees = {
    "ResNet's leaves": [leaf.shape for leaf in jax.tree.leaves(resnet)],
    "leaves of 10 x 16": [(10, 16)] * of.many_leaves,
    "GPT-2's leaves": [leaf.shape for leaf in jax.tree.leaves(gpt2)],
  }
  adam = optax.adam(1e-3)
  methods: dict[str, optax.GradientTransformation] = {
    "optax.sgd": optax.sgd(0.1, momentum=0.9),
    "optax.adam": adam,
    "lars": optax_boost.lars(0.1, weight_decay=1e-4),
    "optax.lars": optax.lars(0.1, weight_decay=1e-4),
    "centralize, sgd": optax.chain(optax_boost.centralize(), optax.sgd(0.1, momentum=0.9)),
    "accumulate(adam, 4)": optax_boost.accumulate(adam, 4),
    "optax.MultiSteps(adam, 4)": optax.MultiSteps(adam, 4).gradient_transformation(),
    "dynamic_loss_scale(adam)": optax_boost.dynamic_loss_scale(adam),
    "optax.apply_if_finite(adam)": optax.apply_if_finite(adam, 5),
  }
  for title, shapes in trees.items():
    params = timing.arrays(shapes)
    for name, tx in methods.items():
      yield f"{len(shapes)} {title}: {name}", timing.optimizer_step(tx, params, of.calls)


def dim_reduce(of: sizes.Sizes) -> Rows:
  """Training in a subspace."""
  for size in of.subspaces:
    side = round((size / 10) ** 0.5)
    params = timing.arrays([(side, side)] * 10)
    name = f"{10 * side * side:,} params"
    yield f"{name}: optax.sgd", timing.optimizer_step(optax.sgd(0.1, 0.9), params, of.calls)
    basis = [jnp.zeros((of.components, *p.shape), p.dtype) for p in params]
    variance = jnp.ones(of.components)
    subspace = optax_boost.Subspace(params, basis, variance, variance)
    value_fn = lambda point: point[0][0, 0]  # noqa: E731  # a loss that costs nothing
    extra = {"value": jnp.zeros([]), "value_fn": value_fn}
    tx = optax_boost.dim_reduce(subspace)
    yield f"{name}: dim_reduce", timing.optimizer_step(tx, params, of.calls, **extra)


def sgperm(of: sizes.Sizes) -> Rows:
  """SGPerm's kernels, and the host's with its transfers."""
  params = timing.arrays(list(of.permuted))
  methods: dict[str, Callable[[], optax.GradientTransformation]] = {
    "optax.adam": lambda: optax.adam(1e-3),
    "pairs": lambda: optax_boost.sgperm(method="pairs", key=0),
    "rank": lambda: optax_boost.sgperm(method="rank"),
    "exact, on the device": lambda: optax_boost.sgperm(key=0, backend="device"),
    "laperm(adam)": lambda: optax_boost.laperm(optax.adam(1e-3), 2),
  }
  for name, make in methods.items():
    yield name, timing.optimizer_step(make(), params, of.calls)
  yield "exact, on the host, with transfers", _on_host(params)


def _on_host(params: list[jax.Array]) -> timing.Record:
  """Gradients go to the host, the host's kernel runs there, updates come back."""
  tx = optax_boost.sgperm(key=0, backend="host")
  cpu = jax.devices("cpu")[0]
  found = []
  state = tx.init(jax.device_put(params, cpu))
  update = jax.jit(tx.update)
  for _ in range(4):
    start = time.perf_counter()
    there = jax.device_put((params, params), cpu)
    updates, state = update(there[0], state, there[1])
    here = jax.device_put(updates, jax.tree.leaves(params)[0].sharding)
    jax.block_until_ready(optax.apply_updates(params, here))
    found.append(1e3 * (time.perf_counter() - start))
  return {"ms": min(found[1:]), "spread": max(found[1:]) / min(found[1:]) - 1}


def gpt2(of: sizes.Sizes) -> Rows:
  """A training step of the transformer, its blocks recomputed in the backward pass."""
  count, length = of.tokens
  tokens = jnp.asarray(
    np.random.default_rng(0).integers(0, of.gpt2.vocabulary, (count, length + 1))
  )
  optimizers = {
    "adamw": optax.adamw(1e-4),
    "accumulate(adamw, 4)": optax_boost.accumulate(optax.adamw(1e-4), 4),
    "lars": optax_boost.lars(0.1),
  }
  for name, tx in optimizers.items():
    made = optax_boost.make_train_step(of.gpt2.loss, tx)
    state = made.init(of.gpt2.init(jax.random.key(0)))
    yield name, timing.train_step(made, state, tokens, of.calls)


def sequences(of: sizes.Sizes) -> Rows:
  """A training step of the transformer at each sequence length, of the same tokens."""
  count, length = of.tokens
  tokens = np.random.default_rng(0).integers(0, of.gpt2.vocabulary, (count, length + 1))
  made = optax_boost.make_train_step(of.gpt2.loss, optax.adamw(1e-4))
  for windows in (1, 2, 4, 8):
    batch = jnp.asarray(optax_boost.cut_sequences(tokens, length // windows, length))
    state = made.init(of.gpt2.init(jax.random.key(0)))
    name = f"{count * windows} sequences of {length // windows}"
    yield name, timing.train_step(made, state, batch, of.calls)


_PARTS: dict[str, Callable[[sizes.Sizes], Rows]] = {
  "resnet50": resnet50,
  "optimizers": optimizers,
  "gpt2": gpt2,
  "sequences": sequences,
  "sgperm": sgperm,
  "dim_reduce": dim_reduce,
  "freezing": freezing,
}


def run(part: str, small: bool) -> Iterator[tuple[str, timing.Record]]:
  """Yields the device's name, then the rows of a part; for a process of its own."""
  yield jax.devices()[0].device_kind, {}
  yield from _PARTS[part](sizes.SMALL if small else sizes.LARGE)
