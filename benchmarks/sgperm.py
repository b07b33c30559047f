"""SGPerm and LaPerm against the published algorithm: ``python -m benchmarks.sgperm``.

With the environment variable ``OPTAX_BOOST_DATA``, a folder that holds MNIST as ``mnist.npz``, the
gradients are those of a training on it; otherwise of one on scikit-learn's digits.
"""

import argparse
import functools
import os
import pathlib
import time
from typing import Any
from unittest import mock

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

from benchmarks import _harness
from benchmarks.peers import sgperm_reference
import optax_boost
from optax_boost._methods._sgperm import _device_search, _host_search

_REFERENCE = "as published"
_HYPER = {
  "alpha": 0.2,
  "lamda": 0.1,
  "beta1": 0.99,
  "beta2": 1.0,
  "alpha_min": 0.01,
  "lamda_max": 0.5,
  "momentum_lr": 0.01,
  "momentum": 0.9,
  "partition_size_min": 10,
}
_BATCH = 128
_WARM_UP = 20
_ABOUT = f"""\
One optimizer step of the whole model, momentum included, in CPU seconds of all threads
(`time.process_time`). `{_REFERENCE}` is the published algorithm in plain Python and NumPy
(`benchmarks/peers/sgperm_reference.py`, checked against recorded runs). The column `times as fast`
is the inverse of the median ratio to it. `goal` was set against the published program itself,
measured once on another machine at 0.9 to 1.3 s for the MLP and 14 to 16 s for the CNN. Weights,
momentum and gradients are those of a run on {{data}}, in batches of {_BATCH}, after {_WARM_UP}
steps; lamda 0.1, alpha 0.2 falling by 1 % a step, momentum 0.9. Ours are
`apply_gradients` in one jit, params and state donated. `numba` and `python` are the host
kernel's search, with and without its compiler. `growing lamda` has subsets that grow by 5 % a step:
it is measured at more than a quarter and up to half a vector, and `programs` counts what was
compiled on the way. `pairs` and `rank` are the faster methods; `laperm` synchronizes every 20
steps, over which it is measured. `state` and `temp` are in copies of the params; `temp` is what XLA
takes beside arguments and results. The CNN has few rounds: one step of SGPerm.py takes
seconds. The last two tables have the exact kernel alone, over nine sizes of subsets from lamda 0.1
to 0.5."""


class Perceptron(nn.Module):
  """784-100-10."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Logits."""
    x = x.reshape(len(x), -1)
    return nn.Dense(10)(nn.relu(nn.Dense(100)(x)))


class ConvNet(nn.Module):
  """Two convolutions, two dense layers."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Logits."""
    for width in (32, 64):
      x = nn.relu(nn.Conv(width, (3, 3), padding="VALID")(x))
      x = nn.max_pool(x, (2, 2), (2, 2))
    return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))


@functools.cache
def images_and_labels() -> tuple[str, np.ndarray, np.ndarray]:
  """MNIST if it is there; else digits of 20 x 20 about the middle of 28 x 28 images, as its are."""
  folder = os.environ.get("OPTAX_BOOST_DATA")
  if folder:
    with np.load(pathlib.Path(folder) / "mnist.npz") as file:
      images, labels = file["train_images"][:2048], file["train_labels"][:2048]
    return "MNIST", images[..., None].astype(np.float32) / 255, labels.astype(np.int32)
  images, labels = datasets.load_digits(return_X_y=True)
  large = jax.image.resize(images.reshape(-1, 8, 8) / 16, (len(images), 20, 20), "linear")
  rng = np.random.default_rng(0)
  x = np.zeros((len(images), 28, 28, 1), np.float32)
  for image, digit, (i, j) in zip(x, large, rng.integers(2, 7, (len(x), 2)), strict=True):
    image[i : i + 20, j : j + 20, 0] = digit
  return "scikit-learn's digits, drawn into 28 x 28 images", x, labels


def batches() -> list[tuple[jax.Array, jax.Array]]:
  """Shuffled once."""
  _, x, labels = images_and_labels()
  order = np.random.default_rng(1).permutation(len(labels))
  chosen = [order[i : i + _BATCH] for i in range(0, len(labels) - _BATCH, _BATCH)]
  return [(jnp.asarray(x[i]), jnp.asarray(labels[i])) for i in chosen]


class Problem:
  """A training that has gone on for some steps.

  Args:
    module: the model.
  """

  def __init__(self, module: nn.Module) -> None:
    data = batches()
    self.start = module.init(jax.random.key(0), data[0][0])
    self.size = sum(leaf.nbytes for leaf in jax.tree.leaves(self.start))

    @jax.jit
    def gradient(params, x, y):
      def loss(params):
        return optax.softmax_cross_entropy_with_integer_labels(module.apply(params, x), y).mean()

      return jax.grad(loss)(params)

    tx = optax_boost.sgperm(**_HYPER, key=0, backend="host")
    apply = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
    self.params, state = self.start, tx.init(self.start)
    self.gradients = []
    for t in range(_WARM_UP):
      self.gradients.append(gradient(self.params, *data[t % len(data)]))
      self.params, state = apply(self.gradients[-1], state, self.params)
    self.momentum, self.alpha = state.momentum, float(state.alpha)

  def reference(self) -> _harness.Contender:
    """The published program at this point of the training."""
    numbers = _HYPER | {"alpha": self.alpha}
    program = sgperm_reference.Sgperm(
      jax.tree.map(np.asarray, jax.tree.leaves(self.start)), **numbers
    )
    # Ranges are those of the start, in which the weights have hardly moved.
    for into, tree in ((program.variables, self.params), (program.slots, self.momentum)):
      for array, leaf in zip(into, jax.tree.leaves(tree), strict=True):
        array[...] = leaf
    gradients = [np.asarray(leaf) for leaf in jax.tree.leaves(self.gradients[-1])]

    def run() -> float:
      start = time.process_time()
      program.step(gradients)
      return time.process_time() - start

    return _harness.Contender(_REFERENCE, run)

  def contender(
    self,
    name: str,
    tx: optax.GradientTransformation,
    *,
    goal: float | None = None,
    repeat: int = 1,
    plain: bool = False,
  ) -> _harness.Contender:
    """Compiles a step and trains as far as the others.

    Args:
      name: of the contender.
      tx: the transformation.
      goal: how many times as fast as SGPerm.py it ought to be.
      repeat: steps in one measurement.
      plain: whether the host kernel does without its compiler.
    """
    state = tx.init(self.start)

    def step(params, state, grads):
      return optax_boost.apply_gradients(tx, grads, state, params)

    params = jax.tree.map(jnp.copy, self.start)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    jitted = jax.jit(step, donate_argnums=(0, 1))
    start = time.perf_counter()
    compiled = jitted.lower(params, state, self.gradients[0]).compile()
    facts = {
      "trace and compile, s": time.perf_counter() - start,
      "state": held / self.size,
      "temp": compiled.memory_analysis().temp_size_in_bytes / self.size,
    }
    if goal is not None:
      facts["goal"] = goal

    def advance(grads) -> None:
      nonlocal params, state
      params, state = jitted(params, state, grads)

    def run() -> float:
      with mock.patch.object(_host_search, "have_numba", return_value=not plain):
        start = time.process_time()
        for _ in range(repeat):
          advance(self.gradients[-1])
        jax.block_until_ready((params, state))
        return time.process_time() - start

    with mock.patch.object(_host_search, "have_numba", return_value=not plain):
      for grads in self.gradients:
        advance(grads)
      jax.block_until_ready((params, state))

    def seconds() -> float:
      return run() / repeat

    return _harness.Contender(name, seconds, facts)


def compare(
  title: str, module: nn.Module, goals: dict[str, float], rounds: int, patience: int
) -> dict[str, Any]:
  """Runs all contenders on one model.

  Args:
    title: of the table.
    module: the model.
    goals: by contender.
    rounds: quiet rounds to collect.
    patience: see `_harness.measure`.
  """
  problem = Problem(module)

  def ours(name: str, repeat: int = 1, plain: bool = False, **options: Any) -> _harness.Contender:
    tx = optax_boost.sgperm(**_HYPER | options, key=0)
    return problem.contender(name, tx, goal=goals.get(name), repeat=repeat, plain=plain)

  laperm = optax_boost.laperm(optax.adam(1e-3), sync_every=20)
  # Compile times are compared: let nobody pay for JAX's own warming up.
  ours("warm up", method="rank")
  contenders = [
    problem.reference(),
    ours("exact, host, python", backend="host", plain=True),
    ours("exact, host, numba", 5, backend="host"),
    ours("exact, device", 5, backend="device"),
    ours("exact, device, growing lamda", 5, backend="device", beta2=1.05),
    ours("pairs", 20, method="pairs"),
    ours("rank", 5, method="rank"),
    problem.contender("laperm", laperm, repeat=20),
    problem.contender("optax.sgd, momentum", optax.sgd(0.1, momentum=0.9), repeat=20),
  ]
  record = _harness.compare(contenders, [_REFERENCE], rounds, title, patience)
  for row in record["rows"]:
    row["facts"] = {"times as fast": 1 / row["ratios"][_REFERENCE][1], **row["facts"]}
  return record


def growth(length: int, vectors: int, rounds: int) -> dict[str, Any]:
  """The exact step on the device, in a program for growing subsets beside one for each size.

  Args:
    length: entries of a weight vector.
    vectors: their number.
    rounds: quiet rounds to collect.
  """
  rng = np.random.default_rng(0)
  weights, momentum = rng.normal(size=(2, length, vectors)).astype(np.float32)
  brackets = _HYPER["alpha"] + 1 / np.maximum(np.arange(length + 1), 1)
  least, most = (round(_HYPER[name] * length) for name in ("lamda", "lamda_max"))
  sizes = [round(least * (most / least) ** (k / 8)) for k in range(9)]
  work = _host_search.Work(
    weights=jnp.asarray(weights),
    momentum=jnp.asarray(momentum),
    order=jnp.asarray(rng.permuted(np.indices(weights.shape)[0], axis=0), jnp.int32),
    size=jnp.int32(least),
    brackets=jnp.asarray(brackets, jnp.float32),
  )

  def contender(name: str, bounds: Any) -> _harness.Contender:
    works = [work._replace(size=jnp.int32(size)) for size in sizes]
    start = time.perf_counter()
    programs = {
      bound: _device_search.permute.lower(work, sizes=bound, remainder=True).compile()
      for bound in map(bounds, sizes)
    }
    facts = {"trace and compile, s": time.perf_counter() - start, "programs": len(programs)}

    def run() -> float:
      start = time.process_time()
      for size, one in zip(sizes, works, strict=True):
        programs[bounds(size)](one).block_until_ready()
      return (time.process_time() - start) / len(sizes)

    run()
    return _harness.Contender(name, run, facts)

  contenders = [
    contender("a program for each size", lambda size: (size, size)),
    contender("one program for growing subsets", lambda size: (least, most)),
  ]
  title = f"Growing subsets, {vectors} vectors of {length}"
  return _harness.compare(contenders, [contenders[0].name], rounds, title, patience=2)


def main() -> None:
  """Measures both models and the growth of subsets, and writes the tables."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=10, help="quiet rounds to collect")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  names = ("exact, host, python", "exact, host, numba", "exact, device", "pairs")
  mlp = dict(zip(names, (40.0, 200.0, 115.0, 1200.0), strict=True))
  cnn = dict(zip(names[1:], (800.0, 700.0, 9000.0), strict=True))
  # A step of the published program takes seconds on the CNN: few have to do.
  few = min(options.rounds, 5)
  comparisons = [
    compare("MLP: 784-100-10", Perceptron(), mlp, options.rounds, patience=2),
    compare("CNN: 3x3x1x32, 3x3x32x64, 1600x128, 128x10", ConvNet(), cnn, few, patience=1),
    growth(784, 100, options.rounds),
    growth(1600, 128, options.rounds),
  ]
  where = _harness.machine(["jax", "jaxlib", "optax", "numpy", "numba"])
  about = _ABOUT.format(data=images_and_labels()[0])
  _harness.write("sgperm", about, comparisons, where, options.out)


if __name__ == "__main__":
  main()
