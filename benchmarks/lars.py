"""LARS against its peers: ``python -m benchmarks.lars --rounds 60 --out benchmarks/results``."""

import argparse
from collections.abc import Sequence
import contextlib
import json
import math
import pathlib
import subprocess
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import _harness, _stream
import optax_boost

_MXNET = _harness.Environment(
  "mxnet-1.9.1", ("mxnet==1.9.1", "numpy==1.23.5"), newest_python=(3, 11)
)
_OURS = "optax_boost.lars"
_FLOOR = "C, two passes"
_ABOUT = f"""\
One optimizer step (`update` and `optax.apply_updates` in one jit, params and state donated) on
float32 tensors. Ratios are medians of the ratios within a round; below 1 is faster than the
contender in the column's head. `no-op` takes and returns the arguments of `{_OURS}`: what
handling them costs. `optax.lars` is masked to give the same leaves a trust ratio. `{_FLOOR}`
reads params and gradients for the norms, then these and the momentum, and writes params and
momentum in place, on all cores, all tensors as one: the floor of the method. MXNet runs in a
process of its own; its times include its Python calls, as in its `Trainer`. On 1,000 small tensors
everything fits into cache and handling arguments is most of the time."""

Shapes = Sequence[tuple[int, ...]]


def resnet50() -> Shapes:
  """The 161 tensors of ResNet-50 for ImageNet, in forward order."""
  shapes: list[tuple[int, ...]] = []

  def conv_norm(size: int, inputs: int, outputs: int) -> None:
    shapes.extend([(size, size, inputs, outputs), (outputs,), (outputs,)])

  conv_norm(7, 3, 64)
  inputs = 64
  for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
    for block in range(blocks):
      conv_norm(1, inputs, width)
      conv_norm(3, width, width)
      conv_norm(1, width, 4 * width)
      if block == 0:
        conv_norm(1, inputs, 4 * width)
      inputs = 4 * width
  return [*shapes, (2048, 1000), (1000,)]


def step_contender(
  name: str, tx: optax.GradientTransformation, shapes: Shapes, *, work: bool = True
) -> _harness.Contender:
  """Compiles one step of `tx`.

  Args:
    name: of the contender.
    tx: the transformation.
    shapes: of the params.
    work: False for a step that returns its arguments.
  """
  rng = np.random.default_rng(0)
  params = [jnp.asarray(0.05 * rng.standard_normal(s, dtype=np.float32)) for s in shapes]
  grads = [jnp.asarray(0.01 * rng.standard_normal(s, dtype=np.float32)) for s in shapes]
  state = jax.jit(tx.init)(params)

  def step(params, state, grads):
    if not work:
      return params, state
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  # Without work all arguments would be unused and dropped, and with them what they cost.
  jitted = jax.jit(step, donate_argnums=(0, 1), keep_unused=not work)
  start = time.perf_counter()
  compiled = jitted.lower(params, state, grads).compile()
  facts = {
    "trace and compile, s": time.perf_counter() - start,
    "temp bytes": compiled.memory_analysis().temp_size_in_bytes,
  }

  return _harness.carried(name, jitted, (params, state), grads, facts=facts)


def floor(shapes: Shapes) -> _harness.Contender:
  """The C passes over as many parameters, or the reason why there is none."""
  try:
    return _harness.Contender(_FLOOR, _stream.lars_passes(sum(map(math.prod, shapes))))
  except (OSError, subprocess.CalledProcessError) as error:
    return _harness.Contender(_FLOOR, None, note=f"not compiled: {error}")


def matrices(params: optax.Params) -> optax.Params:
  """The leaves to which LARS gives a trust ratio."""
  return jax.tree.map(lambda p: p.ndim > 1, params)


def compare(
  title: str, shapes: Shapes, aggregates: Sequence[int], rounds: int, *, bandwidth: bool = False
) -> dict[str, Any]:
  """Runs all contenders on one list of tensors.

  Args:
    title: of the table.
    shapes: of the params.
    aggregates: values of MXNet's `aggregate_num`.
    rounds: quiet rounds to collect.
    bandwidth: whether to add the C passes, which say something only beyond the caches.
  """
  theirs = optax.lars(0.1, 1e-4, trust_ratio_mask=matrices)
  plain = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9))
  ours = optax_boost.lars(0.1, weight_decay=1e-4, momentum=0.9)
  # Compile times are compared: let nobody pay for JAX's own warming up.
  for tx in (theirs, plain, ours):
    step_contender("warm up", tx, [(2, 2), (2,)])
  with contextlib.ExitStack() as running:
    peers = [
      running.enter_context(
        _harness.peer(
          f"MXNet, aggregate_num {n}", _MXNET, "mxnet_lars.py", json.dumps(shapes), str(n)
        )
      )
      for n in aggregates
    ]
    contenders = [
      step_contender(_OURS, ours, shapes),
      step_contender("optax.lars", theirs, shapes),
      *peers,
      step_contender("optax.sgd, weight decay", plain, shapes),
      step_contender("no-op", ours, shapes, work=False),
      *([floor(shapes)] if bandwidth else []),
    ]
    references = ["optax.lars", *(peer.name for peer in peers), _FLOOR]
    return _harness.compare(contenders, references, rounds, title)


def main() -> None:
  """Measures both lists and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=60, help="quiet rounds to collect")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  comparisons = [
    compare(
      "ResNet-50: 161 tensors, 25.6 M parameters", resnet50(), [4], options.rounds, bandwidth=True
    ),
    compare("1,000 tensors of 10 x 16", [(10, 16)] * 1000, [4, 60], options.rounds),
  ]
  where = _harness.machine(["jax", "jaxlib", "optax", "numpy"])
  _harness.write("lars", _ABOUT, comparisons, where, options.out)


if __name__ == "__main__":
  main()
