"""Freezing the layers of a scan: ``python -m benchmarks.stacked_layers --rounds 15``."""

import argparse
from collections.abc import Callable
import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import _harness
import optax_boost

_LAYERS, _WIDTH, _HEADS, _VOCABULARY = 8, 256, 4, 256
_DEPTHS = (0, 2, 4, 6)
# The embedding, a group for each layer, the head.
_GROUPS = _LAYERS + 2
_ABOUT = f"""\
One train step of `optax_boost.make_train_step` (forward, backward, AdamW, params and state donated)
of a transformer with {_LAYERS} blocks of width {_WIDTH} ({_HEADS} heads, an MLP of {4 * _WIDTH}) on
8 sequences of 64 tokens. Its blocks are in stacked leaves that a `lax.scan` runs through, or
written out. `layer_groups` makes a group of the embedding, of each block and of the head; frozen
are the embedding and so many blocks. Ratios are medians of the ratios within a round to the same
step of the same optimizer without `freeze_layers`, of the same form of the model.

GFLOPs are XLA's, which counts the body of a loop once: for the scan they are those of the same step
with `unroll={_LAYERS}`. In a scan every layer that is trained passes its gradient on, the first of
them, too."""


def block(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
  """A pre-norm transformer block."""

  def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

  n = norm(h, w["norm_1"])
  q, k, v = (jnp.einsum("btd,dhk->bthk", n, w[name]) for name in ("query", "key", "value"))
  h += jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), w["out"])
  return h + jax.nn.gelu(norm(h, w["norm_2"]) @ w["up"]) @ w["down"], None


def initial_params() -> Any:
  """The params, blocks stacked along axis 0."""
  head = (_HEADS, _WIDTH // _HEADS)
  shapes = {
    "norm_1": (_WIDTH,),
    "query": (_WIDTH, *head),
    "key": (_WIDTH, *head),
    "value": (_WIDTH, *head),
    "out": (*head, _WIDTH),
    "norm_2": (_WIDTH,),
    "up": (_WIDTH, 4 * _WIDTH),
    "down": (4 * _WIDTH, _WIDTH),
  }
  keys = iter(jax.random.split(jax.random.key(0), len(shapes) + 2))

  def normal(*shape: int) -> jax.Array:
    return jax.random.normal(next(keys), shape) / 16

  blocks = {name: normal(_LAYERS, *shape) for name, shape in shapes.items()}
  return {
    "embed": normal(_VOCABULARY, _WIDTH),
    "blocks": blocks,
    "head": normal(_WIDTH, _VOCABULARY),
  }


def loss_fn(params: Any, tokens: jax.Array, unroll: int = 1) -> jax.Array:
  """Cross-entropy of the next token, blocks in a scan or in a list."""
  h = params["embed"][tokens[:, :-1]]
  if isinstance(params["blocks"], list):
    for w in params["blocks"]:
      h, _ = block(h, w)
  else:
    h, _ = jax.lax.scan(block, h, params["blocks"], unroll=unroll)
  return optax.softmax_cross_entropy_with_integer_labels(h @ params["head"], tokens[:, 1:]).mean()


def transformation(groups: Any, depth: int | None) -> optax.GradientTransformation:
  """AdamW with the embedding and so many blocks frozen; None: without `freeze_layers`."""
  tx = optax.adamw(1e-4)
  if depth is None:
    return tx
  frozen = depth + 1 if depth else 0
  return optax_boost.freeze_layers(tx, groups, optax_boost.fixed_freezing(_GROUPS, frozen))


def contender(
  name: str, loss: Callable[..., jax.Array], params: Any, tx: Any, tokens: jax.Array
) -> _harness.Contender:
  """Compiles a train step."""
  step = optax_boost.make_train_step(loss, tx)
  state = step.init(params)
  start = time.perf_counter()
  compiled = step.lower(state, tokens).compile()
  facts = {"trace and compile, s": time.perf_counter() - start}
  facts["temp MB"] = compiled.memory_analysis().temp_size_in_bytes / 1e6
  flat = optax_boost.make_train_step(functools.partial(loss, unroll=_LAYERS), tx)
  facts["GFLOPs"] = flat.lower(state, tokens).compile().cost_analysis()["flops"] / 1e9
  return _harness.carried(name, lambda state: (step(state, tokens)[0],), (state,), facts=facts)


def main() -> None:
  """Measures both forms of the model and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=15, help="quiet rounds to collect")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  tokens = jax.random.randint(jax.random.key(1), (8, 65), 0, _VOCABULARY)
  stacked = initial_params()
  layers = [jax.tree.map(lambda w: w[i], stacked["blocks"]) for i in range(_LAYERS)]  # noqa: B023
  forms = {
    "scan": (stacked, optax_boost.layer_groups(loss_fn, stacked, tokens, num_groups=_GROUPS)),
    "written out": (
      stacked | {"blocks": layers},
      ["embed", *(f"blocks/{i}/" for i in range(_LAYERS)), "head"],
    ),
  }
  comparisons = []
  for form, (params, groups) in forms.items():
    rows = [("no freezing", None), *((f"{d} of {_LAYERS} frozen", d) for d in _DEPTHS)]
    contenders = [
      contender(name, loss_fn, params, transformation(groups, depth), tokens)
      for name, depth in rows
    ]
    title = f"Blocks {'in a scan' if form == 'scan' else form}"
    comparisons.append(_harness.compare(contenders, ["no freezing"], options.rounds, title))
  where = _harness.machine(["jax", "jaxlib", "optax"])
  _harness.write("stacked_layers", _ABOUT, comparisons, where, options.out)


if __name__ == "__main__":
  main()
