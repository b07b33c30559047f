"""DimReduce against its peers: ``python -m benchmarks.dim_reduce --rounds 20``."""

import argparse
from collections.abc import Sequence
import contextlib
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import _harness, _stream
import optax_boost

_K = 32
_TORCH = _harness.Environment("torch-2.13.0", ("torch==2.13.0",), newest_python=(3, 13))
_READS = "C, reads the basis twice"
_CELL = "MindSpore DimReduce"
_DLDR = "PyTorch DLDR, in memory"
_ABOUT = f"""\
One step in float32 with {_K} components, gradients given, params and state donated: update of
`optax_boost.dim_reduce` and `optax.apply_updates`. Ratios are medians of the ratios within a round;
below 1 is faster than the contender in the column's head. `{_READS}` reads as many bytes as the
basis has, twice, on all cores; with the gradient, the momentum and the params, a step can't move
less than 1.11 times that. Searches accept the first trial of a loss that costs next to nothing.
XLA need not store the trial's params for such a loss, the peers do; a network would add some 5 %
to ours. Gradients are the same at every step, so the peers skip their BFGS update of {_K} x {_K}
numbers, which ours always computes. `{_CELL}` (2.10.0, graph mode) and `{_DLDR}` (2.13.0) run on
the CPU in processes of their own."""

Shapes = Sequence[tuple[int, ...]]


def network(size: int, leaves: int) -> Shapes:
  """Shapes of kernels of unlike sizes, and of biases: about `size` numbers in all."""
  kernels = leaves // 2
  weights = np.geomspace(1, 16, kernels)
  rows = np.maximum(weights / weights.sum() * size / 64, 1).astype(int)
  shapes: list[tuple[int, ...]] = []
  for n in rows.tolist():
    shapes += [(n, 64), (64,)]
  return shapes + [(64,)] * (leaves - len(shapes))


def step_contender(name: str, shapes: Shapes, **kwargs: Any) -> _harness.Contender:
  """Our step, compiled, with its state."""
  rng = np.random.default_rng(0)
  size = sum(int(np.prod(s)) for s in shapes)

  def arrays(scale: float, *leading: int) -> list[jax.Array]:
    draw = rng.standard_normal
    return [jnp.asarray(scale * draw((*leading, *s), dtype=np.float32)) for s in shapes]

  params, grads = arrays(0.05), arrays(0.01)
  variance = jnp.ones(_K)
  subspace = optax_boost.Subspace(params, arrays(size**-0.5, _K), variance, variance / _K)
  tx = optax_boost.dim_reduce(subspace, **kwargs)
  state = tx.init(params)
  del subspace

  def value_fn(params):
    return 0 * params[0][0, 0] - 1.0

  def update(params, state, grads):
    updates, state = tx.update(grads, state, params, value=jnp.zeros([]), value_fn=value_fn)
    return optax.apply_updates(params, updates), state

  start = time.perf_counter()
  step = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, grads).compile()
  facts = {
    "trace and compile, s": time.perf_counter() - start,
    "temp floats / n": step.memory_analysis().temp_size_in_bytes / 4 / size,
    "basis, MB": sum(x.nbytes for x in state.basis) / 1e6,
  }

  return _harness.carried(name, step, (params, state), grads, facts=facts)


def compare(size: int, leaves: int, rounds: int, with_peers: bool) -> dict[str, Any]:
  """Runs all contenders on one list of shapes."""
  shapes = network(size, leaves)
  arguments = (str(_K), json.dumps(shapes))
  with contextlib.ExitStack() as running:
    peers = []
    if with_peers:
      peers = [
        running.enter_context(
          _harness.peer(_CELL, _harness.MINDSPORE, "mindspore_dim_reduce.py", *arguments)
        ),
        running.enter_context(_harness.peer(_DLDR, _TORCH, "torch_dldr.py", *arguments)),
      ]
    total = sum(int(np.prod(s)) for s in shapes)
    contenders = [
      _harness.Contender(_READS, _stream.read_pass(_K * total, 2)),
      step_contender("optax_boost.dim_reduce, no search", shapes, max_search=None),
      step_contender("optax_boost.dim_reduce", shapes),
      *peers,
    ]
    title = f"{total:,} params in {len(shapes)} leaves"
    return _harness.compare(contenders, [_READS, _CELL, _DLDR], rounds, title)


def main() -> None:
  """Measures all sizes and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=20, help="quiet rounds to collect")
  parser.add_argument("--sizes", type=float, nargs="+", default=[1e5, 1e6, 1e7])
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  comparisons = [compare(int(n), 40, options.rounds, True) for n in options.sizes]
  if 1e6 in options.sizes:
    comparisons.append(compare(1_600_000, 161, options.rounds, False))
  where = _harness.machine(["jax", "jaxlib", "optax", "numpy"])
  _harness.write("dim_reduce", _ABOUT, comparisons, where, options.out)


if __name__ == "__main__":
  main()
