"""Patterns match whole names of a leaf's path, in every argument that takes patterns."""

import re

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._foundation import _trees
import optax_boost.linen
import optax_boost.nnx
from tests import meshes

# Those of twelve blocks that a pattern might confuse, and one after the chosen one.
BLOCKS = ("0", "1", "2", "10", "11")
NAMES = ["embed", *(f"blocks/{i}" for i in BLOCKS), "head"]


def make_params():
  rng = np.random.default_rng(0)

  def kernel():
    return {"kernel": jnp.asarray(rng.normal(size=(3, 3)), jnp.float32)}

  blocks = {i: kernel() for i in BLOCKS}
  return {"embed": kernel(), "blocks": blocks, "head": kernel()}


PARAMS = make_params()
GRADS = jax.tree.map(lambda p: 1.0 + p**2, PARAMS)
STACKED = jax.tree.map(lambda p: jnp.stack([p, 1.0 - p.T]), PARAMS)


def updates_of(tx):
  return tx.update(GRADS, tx.init(PARAMS), PARAMS)[0]


def blocks_where(flags):
  """The blocks, by number, of whose only leaf a flag is true; no leaf beside them is."""
  assert not any(jax.tree.leaves([flags["embed"], flags["head"]]))
  return {int(i) for i, flag in flags["blocks"].items() if any(jax.tree.leaves(flag))}


def changed(tree, other):
  """Whether each leaf differs by more than rounding, as of a sum in another order."""

  def differs(a, b):
    return not np.allclose(np.asarray(a, float), np.asarray(b, float), rtol=1e-5, atol=1e-6)

  return jax.tree.map(differs, tree, other)


def by_path_mask(pattern):
  return optax_boost.path_mask(pattern)(PARAMS)


def excluded_by(make):
  def selected(pattern):
    return changed(updates_of(make()), updates_of(make(exclude=pattern)))

  return selected


def decayed_by_lars(pattern):
  options = {"weight_decay": 0.1, "exclude": None}
  none = optax_boost.lars(
    0.1, weight_decay_mask=lambda p: jax.tree.map(lambda _: False, p), **options
  )
  return changed(
    updates_of(none), updates_of(optax_boost.lars(0.1, weight_decay_mask=pattern, **options))
  )


def laperm(exclude=None):
  return optax_boost.laperm(optax.sgd(5.0), sync_every=1, exclude=exclude)


def grouped_by_adasum(pattern):
  # The group of one leaf has the leaf's own coefficients, so another leaf joins it.
  alone = optax_boost.adasum_reduce(STACKED)
  tree = optax_boost.adasum_reduce(
    STACKED | {"other": 3 * jnp.ones((2, 5))}, groups=f"{pattern}|other"
  )
  del tree["other"]
  return changed(alone, tree)


def frozen_by(pattern):
  tx = optax_boost.freeze_layers(
    optax.sgd(1.0), [pattern, "head"], optax_boost.fixed_freezing(2, 1)
  )
  return jax.tree.map(lambda u: bool(jnp.all(u == 0)), updates_of(tx))


def decayed_by_layer(pattern):
  tx = optax_boost.layerwise_decay(optax.identity(), [pattern, "head"], 0.5)
  return changed(updates_of(tx), GRADS)


def grouped_in_a_subspace(pattern):
  snapshots = jax.tree.map(lambda p: jnp.stack([0 * p, 0 * p + 1, 0 * p + 2]), PARAMS)
  # All leaves move alike, so in a group of n leaves each has the norm n ** -0.5.
  basis = optax_boost.fit_subspace(snapshots, 1, groups=[pattern, "head"]).basis
  return jax.tree.map(lambda b: bool(jnp.linalg.norm(b[0]) > 0.5), basis)


def sharded_by_name(make):
  def selected(pattern):
    mesh = meshes.mesh((2,), ("x",))
    spec = jax.sharding.PartitionSpec()

    def updates(axis_name):
      tx = make(axis_name=axis_name)

      # Each device has grown differently, as its number.
      def step(grads, params):
        rank = 1.0 + jax.lax.axis_index("x")
        grads = jax.tree.map(lambda g: g * (rank + jnp.arange(9.0).reshape(3, 3)), grads)
        out = tx.update(grads, tx.init(params), params)[0]
        return jax.tree.map(lambda u: u[None], out)

      out_specs = jax.sharding.PartitionSpec("x")
      return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=out_specs, check_vma=False)
      )(GRADS, PARAMS)

    return changed(updates(None), updates({pattern: "x"}))

  return selected


def named_as_a_block(pattern):
  """Whether the pattern, as the only name, groups the params of a block alone."""

  def is_named(leaf_of_tree):
    try:
      optax_boost.layer_groups(leaf_of_tree, [pattern])
    except ValueError as error:
      if "which matches no leaf" not in str(error):
        raise
      return False
    return True

  flags = {i: {"kernel": is_named({"blocks": {i: PARAMS["blocks"][i]}})} for i in BLOCKS}
  outer = {name: {"kernel": is_named({name: PARAMS[name]})} for name in ("embed", "head")}
  return {"blocks": flags, **outer}


SELECTORS = {
  "path_mask": by_path_mask,
  "lars exclude": excluded_by(lambda exclude=None: optax_boost.lars(0.1, exclude=exclude)),
  "lars weight_decay_mask": decayed_by_lars,
  "centralize exclude": excluded_by(lambda exclude=None: optax_boost.centralize(exclude=exclude)),
  "laperm exclude": excluded_by(laperm),
  "adasum groups": grouped_by_adasum,
  "freeze_layers groups": frozen_by,
  "layerwise_decay groups": decayed_by_layer,
  "layer_groups blocks": named_as_a_block,
  "dim_reduce groups": grouped_in_a_subspace,
  "lars axis_name": sharded_by_name(
    lambda axis_name: optax_boost.lars(0.1, exclude=None, axis_name=axis_name)
  ),
  "centralize axis_name": sharded_by_name(
    lambda axis_name: optax_boost.centralize(exclude=None, axis_name=axis_name)
  ),
}


@pytest.mark.parametrize("name", SELECTORS)
def test_the_pattern_of_a_block_takes_no_block_from_the_eleventh_on(name):
  assert blocks_where(SELECTORS[name]("blocks/1")) == {1}
  assert blocks_where(SELECTORS[name]("blocks/1*")) == {1, 10, 11}


def batch_norms(argument):
  def estimate(pattern):
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    optax_boost.nnx.estimate_batch_stats(model, [jnp.ones((2, 2))], **{argument: pattern})

  return estimate


def linen_batch_norms(argument):
  def estimate(pattern):
    module, batches = nn.BatchNorm(use_running_average=False), [jnp.ones((2, 2))]
    variables = module.init(jax.random.key(0), batches[0])
    optax_boost.linen.estimate_batch_stats(module, variables, batches, **{argument: pattern})

  return estimate


def level_of_tokens(pattern):
  boost = optax_boost.auto_boost("O1", total_steps=99, sequence_length=16, axes={pattern: 1})
  boost.batch({"tokens": np.ones((2, 16), int)}, 0)


def chain(params, x):
  return jnp.mean(jnp.tanh(x @ params["body"]) @ params["head"])


CHAIN = chain, {"body": jnp.eye(2), "head": jnp.eye(2)}, jnp.ones((1, 2))
# Those of `SELECTORS`, and arguments of which patterns select something else than leaves.
TAKING_PATTERNS = SELECTORS | {
  "adasum groups": lambda pattern: optax_boost.adasum_reduce(STACKED, groups=pattern),
  "adasum groups in a sequence": lambda pattern: TWO_GROUPS["adasum"](["embed", pattern]),
  "auto_boost axes": level_of_tokens,
  "cut_sequences axes": lambda pattern: optax_boost.cut_sequences(
    {"tokens": np.ones((2, 8))}, 4, 8, axes={pattern: 1}
  ),
  "layer_axes axes": lambda pattern: optax_boost.layer_axes(*CHAIN, axes={pattern: ("outputs",)}),
  **{f"nnx.estimate_batch_stats {name}": batch_norms(name) for name in ("only", "exclude")},
  **{f"linen.estimate_batch_stats {name}": linen_batch_norms(name) for name in ("only", "exclude")},
}


@pytest.mark.parametrize("pattern", ["kernel$", "^kernel", ".*kernel", "(a|b)", r"b\d", "b[0-9]+"])
@pytest.mark.parametrize("name", TAKING_PATTERNS)
def test_a_regular_expression_is_refused_with_patterns_to_write_instead(name, pattern):
  argument = name.split()[1] if " " in name else "patterns"
  words = f"`{argument}` has {pattern!r}, a regular expression, but patterns are globs: 'kernel' ma"
  with pytest.raises(ValueError, match=re.escape(words)):
    TAKING_PATTERNS[name](pattern)


@pytest.mark.parametrize("name", ["path_mask", "cut_sequences axes", "layer_groups blocks"])
@pytest.mark.parametrize(
  ("pattern", "words"),
  [
    ("blocks/[0", "a bracket is not closed within a name"),
    ("h[0.1]", "a bracket is not closed within a name"),
    ("[!]", "a bracket is not closed within a name"),
    ("[9-0]", "bad character range 9-0"),
    ("", "each part between bars needs a name"),
    ("/", "each part between bars needs a name"),
    ("head|", "each part between bars needs a name"),
  ],
)
def test_a_pattern_that_says_nothing_is_refused(name, pattern, words):
  with pytest.raises(ValueError, match=re.escape(f"{pattern!r}, which is not a pattern: {words}")):
    TAKING_PATTERNS[name](pattern)


def test_groups_of_one_block_each_have_rates_of_their_own():
  for inner in (optax.sgd(1.0), optax.adam(1.0)):
    alone, ours = updates_of(inner), updates_of(optax_boost.layerwise_decay(inner, NAMES, 0.75))
    for number, name in enumerate(NAMES):
      expected, found = alone, ours
      for key in name.split("/"):
        expected, found = expected[key], found[key]
      factor = 0.75 ** (len(NAMES) - 1 - number)
      np.testing.assert_allclose(found["kernel"], factor * expected["kernel"], rtol=1e-6)


TWO_GROUPS = {
  "freeze_layers": lambda groups: optax_boost.freeze_layers(
    optax.sgd(0.1), groups, optax_boost.fixed_freezing(len(groups), 1)
  ).init(PARAMS),
  "layerwise_decay": lambda groups: optax_boost.layerwise_decay(optax.sgd(0.1), groups).init(
    PARAMS
  ),
  "adasum": lambda groups: optax_boost.adasum("replicas", groups=groups).init(PARAMS),
  "adasum_reduce": lambda groups: optax_boost.adasum_reduce(STACKED, groups=groups),
  "fit_subspace": lambda groups: optax_boost.fit_subspace(STACKED, 1, groups=groups),
}


@pytest.mark.parametrize("name", TWO_GROUPS)
def test_a_leaf_of_two_groups_is_an_error_that_names_both_patterns(name):
  words = "'blocks/10/kernel', which 'blocks/1*' of group 1 and 'blocks/10' of group 2 match"
  with pytest.raises(ValueError, match=re.escape(words)):
    TWO_GROUPS[name](["embed", "blocks/1*", "blocks/10", "head"])
  TWO_GROUPS[name](["embed", "blocks/1", "blocks/10", "head"])


@pytest.mark.parametrize("name", ["freeze_layers", "layerwise_decay", "fit_subspace"])
def test_a_final_catch_all_pattern_is_an_error_that_says_why_it_is_not_needed(name):
  with pytest.raises(ValueError, match=r"no pattern matches is in the last group already"):
    TWO_GROUPS[name](["embed", "blocks/0", "*"])


def test_selections_may_overlap():
  mask = optax_boost.path_mask("blocks/1*", "blocks/10", "kernel")(PARAMS)
  assert all(jax.tree.leaves(mask))


def test_a_plan_per_tree_survives_if_another_thread_clears_the_plans_at_any_time():
  plan = _trees.once_per_tree(lambda tree, *static: np.shape(tree["w"]))

  class Interrupted:
    """An argument at whose every lookup another thread runs, with more trees than are kept."""

    is_idle = True

    def __hash__(self):
      if self.is_idle:
        self.is_idle = False
        for n in range(100):
          plan({"w": np.ones((n, 2))})
        self.is_idle = True
      return 0

  argument = Interrupted()
  for _ in range(3):
    assert plan({"w": np.ones(5)}, argument) == (5,)


WITH_FUNCTIONS = {
  "lars exclude": lambda f: optax_boost.lars(0.1, exclude=f),
  "lars weight_decay_mask": lambda f: optax_boost.lars(0.1, weight_decay=0.1, weight_decay_mask=f),
  "centralize exclude": lambda f: optax_boost.centralize(exclude=f),
  "laperm exclude": lambda f: optax_boost.laperm(optax.sgd(0.1), 2, exclude=f),
}


@pytest.mark.parametrize("name", WITH_FUNCTIONS)
def test_a_function_of_path_and_leaf_is_refused_with_the_argument_that_a_function_gets(name):
  argument = name.split()[1]
  words = f"`{argument}` is called as `{argument}(params)`; got a function of (path, leaf)"
  with pytest.raises(TypeError, match=re.escape(words)):
    WITH_FUNCTIONS[name](lambda path, leaf: leaf.ndim < 2)
