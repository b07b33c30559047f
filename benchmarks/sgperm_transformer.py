"""A step of SGPerm on a transformer: ``python -m benchmarks.sgperm_transformer``."""

import argparse
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import _harness
import optax_boost

_LAYERS, _WIDTH, _HEADS, _HIDDEN, _WORDS = 12, 512, 8, 2048, 25_000
_ADAM = "optax.adam"
_ABOUT = f"""\
One optimizer step, `update` and `optax.apply_updates` in one jit, params and state donated, in CPU
seconds of all threads (`time.process_time`), on random float32 gradients of a transformer of
{{size:.1f}} million params: {_LAYERS} layers of width {_WIDTH} with {_HEADS} heads and {_HIDDEN:,}
hidden units, {_WORDS:,} words. SGPerm permutes the kernels, {{permuted:.1f}} million weights;
LayerNorms, biases and the embedding go to Adam by `optax.partition`. Memory is XLA's statement:
`temporary` beside params, state and gradients, `peak` with all of them."""


def params() -> dict[str, Any]:
  """Params with the names and shapes of Flax, at random."""
  head = (_HEADS, _WIDTH // _HEADS)
  layer = {
    "attention": {
      **{name: {"kernel": (_WIDTH, *head), "bias": head} for name in ("query", "key", "value")},
      "out": {"kernel": (*head, _WIDTH), "bias": (_WIDTH,)},
    },
    "up": {"kernel": (_WIDTH, _HIDDEN), "bias": (_HIDDEN,)},
    "down": {"kernel": (_HIDDEN, _WIDTH), "bias": (_WIDTH,)},
    **{f"norm_{i}": {"scale": (_WIDTH,), "bias": (_WIDTH,)} for i in range(2)},
  }
  shapes = {"embedding": {"embedding": (_WORDS, _WIDTH)}}
  shapes |= {f"layer_{i}": layer for i in range(_LAYERS)}
  leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
  keys = jax.random.split(jax.random.key(0), len(leaves))
  return structure.unflatten(map(jax.random.normal, keys, leaves))


def labels(tree: Any) -> Any:
  """What becomes of each leaf."""
  return jax.tree.map_with_path(
    lambda path, _: "permuted" if path[-1].key == "kernel" else "free", tree
  )


def contender(name: str, tx: optax.GradientTransformation) -> _harness.Contender:
  """Compiles a step."""

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  now, grads = params(), jax.tree.map(jnp.sin, params())
  state = tx.init(now)
  start = time.perf_counter()
  compiled = jax.jit(step, donate_argnums=(0, 1)).lower(now, state, grads).compile()
  seconds = time.perf_counter() - start
  memory = compiled.memory_analysis()
  outside = memory.argument_size_in_bytes + memory.output_size_in_bytes
  peak = outside - memory.alias_size_in_bytes + memory.temp_size_in_bytes
  facts = {
    "trace and compile, s": seconds,
    "temporary, MB": memory.temp_size_in_bytes / 1e6,
    "peak, MB": peak / 1e6,
  }

  def run() -> float:
    nonlocal now, state
    start = time.process_time()
    now, state = jax.block_until_ready(compiled(now, state, grads))
    return time.process_time() - start

  run()
  return _harness.Contender(name, run, facts)


def main() -> None:
  """Measures and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=5, help="quiet rounds to collect")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()

  def partitioned(method: str) -> optax.GradientTransformation:
    permuted = optax_boost.sgperm(method=method, key=0)
    return optax.partition({"permuted": permuted, "free": optax.adam(1e-3)}, labels)

  contenders = [
    contender("sgperm, pairs", partitioned("pairs")),
    contender("sgperm, rank", partitioned("rank")),
    contender(_ADAM, optax.adam(1e-3)),
  ]
  shapes = jax.eval_shape(params)
  parts = zip(jax.tree.leaves(shapes), jax.tree.leaves(labels(shapes)), strict=True)
  permuted = sum(x.size for x, label in parts if label == "permuted")
  size = sum(x.size for x in jax.tree.leaves(shapes))
  record = _harness.compare(contenders, [_ADAM], options.rounds, "A transformer", patience=1)
  about = _ABOUT.format(size=size / 1e6, permuted=permuted / 1e6)
  where = _harness.machine(["jax", "jaxlib", "optax"])
  _harness.write("sgperm_transformer", about, [record], where, options.out)


if __name__ == "__main__":
  main()
