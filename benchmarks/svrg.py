"""SVRG against its peers: ``python -m benchmarks.svrg --rounds 60 --out benchmarks/results``."""

import argparse
from collections.abc import Callable, Sequence
import contextlib
import itertools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import _harness
import optax_boost

_MXNET = _harness.Environment(
  "mxnet-1.9.1", ("mxnet==1.9.1", "numpy==1.23.5"), newest_python=(3, 11)
)
_TWO = "two gradients in one jit"
_BUFFERS = "two gradients, a step's buffers"
_PEER = "MXNet SVRGModule"
_ABOUT = f"""\
One training step in float32, between two refreshes, of the train step made by
`optax_boost.make_train_step` with `optax.chain(optax_boost.svrg(refresh_every=None),
optax.sgd(...))`. Ratios are medians of the ratios within a round; below 1 is faster than the
reference in the column's head. `{_TWO}` evaluates the loss, its gradient at the params and its
gradient at the snapshot, and returns all three: no correction, no update, no state. `{_BUFFERS}`
takes the step's arguments and returns arrays like its results, in donated memory, and computes
nothing else. `{_PEER}` (1.9.1) makes forward, backward and update in a process of its own. The
first two problems take fractions of a millisecond, of which handling arguments is much."""

Layers = Sequence[int]


def dense(layers: Layers, batch: int) -> tuple[Any, Callable[..., jax.Array], Any]:
  """Params, loss and a batch of a fully connected network; one output is linear regression."""
  rng = np.random.default_rng(0)
  params = [
    {
      "kernel": jnp.asarray(0.05 * rng.standard_normal((m, n)), jnp.float32),
      "bias": jnp.zeros(n),
    }
    for m, n in itertools.pairwise(layers)
  ]

  def loss_fn(params, batch):
    h = batch["x"]
    for i, layer in enumerate(params):
      h = (jax.nn.relu(h) if i else h) @ layer["kernel"] + layer["bias"]
    if layers[-1] == 1:
      return 0.5 * jnp.mean((h[:, 0] - batch["y"]) ** 2)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(h, batch["y"]))

  x = rng.standard_normal((batch, layers[0]), dtype=np.float32)
  y = rng.standard_normal(batch, dtype=np.float32)
  y = y if layers[-1] == 1 else rng.integers(layers[-1], size=batch)
  return params, loss_fn, {"x": jnp.asarray(x), "y": jnp.asarray(y)}


def convolutional(batch: int) -> tuple[Any, Callable[..., jax.Array], Any]:
  """Params, loss and a batch of a small convolutional network on 32 x 32 images."""
  rng = np.random.default_rng(0)
  widths = (3, 32, 64, 128)
  params: dict[str, Any] = {
    f"conv_{i}": jnp.asarray(0.05 * rng.standard_normal((3, 3, m, n)), jnp.float32)
    for i, (m, n) in enumerate(itertools.pairwise(widths))
  }
  params["head"] = jnp.asarray(0.05 * rng.standard_normal((128, 10)), jnp.float32)

  def loss_fn(params, batch):
    h = batch["x"]
    for i in range(3):
      h = jax.lax.conv_general_dilated(
        h, params[f"conv_{i}"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
      )
      h = jax.nn.relu(h)
    logits = jnp.mean(h, (1, 2)) @ params["head"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))

  x = jnp.asarray(rng.standard_normal((batch, 32, 32, 3)), jnp.float32)
  return params, loss_fn, {"x": x, "y": jnp.asarray(rng.integers(10, size=batch))}


def step_contender(
  name: str, tx: optax.GradientTransformation, params: Any, loss_fn: Any, batch: Any, *, svrg: bool
) -> _harness.Contender:
  """A train step, after a refresh if `svrg` says that it has a snapshot."""
  step = optax_boost.make_train_step(loss_fn, tx)
  state = step.init(params)
  if svrg:
    state = step.refresh(state, [batch])
  return contender(name, step, state, batch)


def contender(name: str, step: Any, state: Any, batch: Any) -> _harness.Contender:
  """Makes steps from `state` on, which they donate."""
  start = time.perf_counter()
  compiled = step.lower(state, batch).compile()
  facts = {
    "trace and compile, s": time.perf_counter() - start,
    "temp bytes": compiled.memory_analysis().temp_size_in_bytes,
  }

  def run() -> float:
    nonlocal state
    start = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return time.perf_counter() - start

  run()
  run()
  return _harness.Contender(name, run, facts)


def two_gradients(params: Any, loss_fn: Any, batch: Any) -> _harness.Contender:
  """What a step cannot do without."""
  snapshot = jax.tree.map(lambda p: p + 0.001, params)

  @jax.jit
  def both(params, snapshot, batch):
    value, gradient = jax.value_and_grad(loss_fn)(params, batch)
    return value, gradient, jax.grad(loss_fn)(snapshot, batch)

  start = time.perf_counter()
  compiled = both.lower(params, snapshot, batch).compile()
  facts = {
    "trace and compile, s": time.perf_counter() - start,
    "temp bytes": compiled.memory_analysis().temp_size_in_bytes,
  }

  def run() -> float:
    start = time.perf_counter()
    jax.block_until_ready(both(params, snapshot, batch))
    return time.perf_counter() - start

  run()
  run()
  return _harness.Contender(_TWO, run, facts)


def two_gradients_in_buffers(
  tx: optax.GradientTransformation, params: Any, loss_fn: Any, batch: Any
) -> _harness.Contender:
  """What is left of a step without its arithmetic: the two gradients, and handling its arrays."""
  train = optax_boost.make_train_step(loss_fn, tx)
  state = train.refresh(train.init(params), [batch])

  def step(state, batch):
    value, gradient = jax.value_and_grad(loss_fn)(state.params, batch)
    svrg, *rest = state.opt_state
    svrg = svrg._replace(full_gradient=jax.grad(loss_fn)(svrg.snapshot, batch))
    metrics = {"loss": value, "variance_ratio": value + 1, "notfinite_count": value + 2}
    return state._replace(params=gradient, opt_state=(svrg, *rest)), metrics

  return contender(_BUFFERS, jax.jit(step, donate_argnums=0), state, batch)


def compare(
  title: str, problem: Any, rounds: int, peer_arguments: Sequence[int] = ()
) -> dict[str, Any]:
  """Runs all contenders on one problem.

  Args:
    title: of the table.
    problem: params, loss and batch.
    rounds: quiet rounds to collect.
    peer_arguments: of ``mxnet_svrg.py``; none: without the peer.
  """
  sgd = optax.sgd(1e-4)
  ours = optax.chain(optax_boost.svrg(refresh_every=None), sgd)
  with contextlib.ExitStack() as running:
    peers = []
    if peer_arguments:
      peer = _harness.peer(_PEER, _MXNET, "mxnet_svrg.py", *map(str, peer_arguments))
      peers.append(running.enter_context(peer))
    contenders = [
      step_contender("optax_boost.svrg", ours, *problem, svrg=True),
      two_gradients_in_buffers(ours, *problem),
      two_gradients(*problem),
      *peers,
      step_contender("optax.sgd", sgd, *problem, svrg=False),
    ]
    return _harness.compare(contenders, [_TWO, _BUFFERS, _PEER], rounds, title)


def main() -> None:
  """Measures all problems and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=60, help="quiet rounds to collect")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  shapes = (
    ("Linear regression, 1,000 inputs", 128, (1000, 1)),
    ("Softmax regression, 784 x 10", 128, (784, 10)),
    ("Linear regression, 1,000 inputs", 4096, (1000, 1)),
    ("Softmax regression, 784 x 10", 4096, (784, 10)),
    ("MLP, 784 - 1024 - 1024 - 10", 256, (784, 1024, 1024, 10)),
  )
  comparisons = [
    compare(f"{title}, batches of {batch}", dense(layers, batch), options.rounds, (batch, *layers))
    for title, batch, layers in shapes
  ]
  comparisons.append(compare("CNN on 32 x 32, batches of 64", convolutional(64), options.rounds))
  where = _harness.machine(["jax", "jaxlib", "optax", "numpy"])
  _harness.write("svrg", _ABOUT, comparisons, where, options.out)


if __name__ == "__main__":
  main()
