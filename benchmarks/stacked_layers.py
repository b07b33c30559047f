"""Freezing the layers of a scan: ``python -m benchmarks.stacked_layers --rounds 15``.

With ``--half``: a step with half of the blocks frozen, beside the same step by optax alone.
"""

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
_FEW = 4  # blocks of the table of half-frozen steps
_HALF = _FEW // 2
_WHOLE, _CLIPPED = "nothing frozen", ", gradients clipped"
_ABOUT_HALF = f"""\
One train step (forward, backward, AdamW, params and state donated) of a transformer with
{_FEW} blocks of width {_WIDTH} ({_HEADS} heads, an MLP of {4 * _WIDTH}) on 4 sequences of 64
tokens, with the embedding and {_HALF} of the blocks frozen. `freeze_layers` is in the step of
`optax_boost.make_train_step`; the other rows are `jax.value_and_grad`, `update` and
`optax.apply_updates` in one `jax.jit`. Where blocks are written out, optax freezes by
`optax.partition` with `optax.set_to_zero`: XLA then removes the gradients that nothing reads. Where
a `lax.scan` runs through stacked leaves, a label of `optax.partition` or a mask of `optax.masked`
holds for all layers of a leaf, so the row sets the updates of the first {_HALF} layers to zero.
"Gradients clipped" puts `optax.clip_by_global_norm` before the optimizer, outside of
`optax.partition`; in `freeze_layers` the norm is of the trained layers' gradients.

Ratios are medians of the ratios within a round to the step of plain optax without freezing, of
processor time. GFLOPs are XLA's, which counts the body of a scan once. State: the optimizer's;
`freeze_layers` keeps no moments of layers that no step trains."""


def block(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
  """A pre-norm transformer block."""

  def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

  n = norm(h, w["norm_1"])
  q, k, v = (jnp.einsum("btd,dhk->bthk", n, w[name]) for name in ("query", "key", "value"))
  h += jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), w["out"])
  return h + jax.nn.gelu(norm(h, w["norm_2"]) @ w["up"]) @ w["down"], None


def initial_params(layers: int = _LAYERS) -> Any:
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

  blocks = {name: normal(layers, *shape) for name, shape in shapes.items()}
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


def by_hand(loss: Callable[..., jax.Array], tx: optax.GradientTransformation) -> Any:
  """A jitted train step of plain optax."""

  def step(params: Any, state: Any, tokens: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(params, tokens)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value

  return jax.jit(step, donate_argnums=(0, 1))


def half_frozen_by_optax(params: Any) -> optax.GradientTransformation:
  """AdamW for the second half of the blocks and the head, without `freeze_layers`."""
  if isinstance(params["blocks"], list):
    labels: Any = {
      "embed": "frozen",
      "blocks": ["frozen"] * _HALF + ["trained"] * (_FEW - _HALF),
      "head": "trained",
    }
    return optax.partition({"trained": optax.adamw(1e-4), "frozen": optax.set_to_zero()}, labels)

  def zero_frozen(updates: Any, params: Any = None) -> Any:
    del params
    blocks = jax.tree.map(lambda u: u.at[:_HALF].set(0), updates["blocks"])
    return updates | {"embed": jnp.zeros_like(updates["embed"]), "blocks": blocks}

  return optax.chain(optax.adamw(1e-4), optax.stateless(zero_frozen))


def half_contender(
  name: str, tx: optax.GradientTransformation, ours: bool, params: Any, tokens: jax.Array
) -> _harness.Contender:
  """Compiles a train step of the table of half-frozen steps."""
  carry: tuple[Any, ...]
  if ours:
    train_step = optax_boost.make_train_step(loss_fn, tx)
    carry = (train_step.init(params),)
    lowered = train_step.lower(*carry, tokens)
    state = carry[0].opt_state
    run = lambda state: (train_step(state, tokens)[0],)  # noqa: E731
  else:
    hand = by_hand(loss_fn, tx)
    carry = jax.tree.map(jnp.copy, (params, tx.init(params)))
    lowered = hand.lower(*carry, tokens)
    state = carry[1]
    run = lambda params, state: hand(params, state, tokens)[:2]  # noqa: E731
  compiled = lowered.compile()
  facts = {
    "temp MB": compiled.memory_analysis().temp_size_in_bytes / 1e6,
    "state MB": sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e6,
  }
  if isinstance(params["blocks"], list):
    facts["GFLOPs"] = compiled.cost_analysis()["flops"] / 1e9
  wall = _harness.carried(name, run, carry, facts=facts)
  return _harness.in_processor_time(wall)


def compare_half(rounds: int) -> list[Any]:
  """Compares half-frozen steps of both forms of the model."""
  tokens = jax.random.randint(jax.random.key(1), (4, 65), 0, _VOCABULARY)
  stacked = initial_params(_FEW)
  layers = [jax.tree.map(lambda w, i=i: w[i], stacked["blocks"]) for i in range(_FEW)]
  freezing = optax_boost.fixed_freezing(_FEW + 2, _HALF + 1)
  adamw, clip = optax.adamw(1e-4), optax.clip_by_global_norm(1.0)
  comparisons = []
  for title, theirs, params in (
    ("Blocks in a scan", "updates set to zero", stacked),
    ("Blocks written out", "optax.partition", stacked | {"blocks": layers}),
  ):
    blocks = "blocks[*]" if params is stacked else "blocks/*"
    groups = optax_boost.layer_groups(params, ["embed", blocks, "head"])
    frozen = half_frozen_by_optax(params)
    rows = [
      (_WHOLE, adamw, False),
      (theirs, frozen, False),
      ("freeze_layers", optax_boost.freeze_layers(adamw, groups, freezing), True),
    ]
    references = [_WHOLE, theirs]
    if params is not stacked:
      clipped = optax_boost.freeze_layers(optax.chain(clip, adamw), groups, freezing)
      rows.append((theirs + _CLIPPED, optax.chain(clip, frozen), False))
      rows.append(("freeze_layers" + _CLIPPED, clipped, True))
      references.append(theirs + _CLIPPED)
    contenders = [half_contender(*row, params, tokens) for row in rows]
    comparisons.append(_harness.compare(contenders, references, rounds, title, patience=1))
  return comparisons


def main() -> None:
  """Measures both forms of the model and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=15, help="quiet rounds to collect")
  parser.add_argument("--half", action="store_true", help="half-frozen steps beside optax's")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  where = _harness.machine(["jax", "jaxlib", "optax"])
  if options.half:
    comparisons = compare_half(options.rounds)
    _harness.write("half_frozen", _ABOUT_HALF, comparisons, where, options.out)
    return
  tokens = jax.random.randint(jax.random.key(1), (8, 65), 0, _VOCABULARY)
  stacked = initial_params()
  layers = [jax.tree.map(lambda w: w[i], stacked["blocks"]) for i in range(_LAYERS)]  # noqa: B023
  forms = {
    "scan": (stacked, "blocks[*]"),
    "written out": (stacked | {"blocks": layers}, "blocks/*"),
  }
  comparisons = []
  for form, (params, blocks) in forms.items():
    groups = optax_boost.layer_groups(params, ["embed", blocks, "head"])
    rows = [("no freezing", None), *((f"{d} of {_LAYERS} frozen", d) for d in _DEPTHS)]
    contenders = [
      contender(name, loss_fn, params, transformation(groups, depth), tokens)
      for name, depth in rows
    ]
    title = f"Blocks {'in a scan' if form == 'scan' else form}"
    comparisons.append(_harness.compare(contenders, ["no freezing"], options.rounds, title))
  _harness.write("stacked_layers", _ABOUT, comparisons, where, options.out)


if __name__ == "__main__":
  main()
