"""Masks by patterns of the paths of leaves; all arguments that take patterns match in this way."""

import fnmatch
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost

PARAMS = {"block": [{"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, {"scale": jnp.ones(3)}]}


def tree_of(path):
  """A tree with one leaf."""
  tree = 1.0
  for key in path.split("/")[::-1] if path else []:
    tree = {key: tree}
  return tree


def selects(pattern, path):
  (selected,) = jax.tree.leaves(optax_boost.path_mask(pattern)(tree_of(path)))
  return selected


def test_path_mask_selects_by_patterns_inside_optax_masked():
  tx = optax.masked(optax.scale(0.0), optax_boost.path_mask("kernel", "scale"))
  updates, _ = tx.update(PARAMS, tx.init(PARAMS))
  assert not jnp.any(updates["block"][0]["kernel"])
  assert not jnp.any(updates["block"][1]["scale"])
  assert jnp.all(updates["block"][0]["bias"] == 1)


@pytest.mark.parametrize(
  ("pattern", "selected", "others"),
  [
    # A single name matches at any depth, leaves and modules.
    ("kernel", ["kernel", "dense/kernel", "a/b/kernel", "kernel/bias"], ["dense/bias"]),
    ("1", ["blocks/1/kernel"], ["blocks/11/kernel"]),
    # Names match whole, with all that is below.
    ("blocks/1", ["blocks/1", "blocks/1/mlp/kernel"], ["blocks/10/kernel", "blocks"]),
    ("norm", ["norm/scale"], ["block/layer_norm_1/scale", "norms/scale"]),
    # A pattern with a slash begins at the root, one with a slash at its end alone does not.
    ("attn/kernel", ["attn/kernel"], ["encoder/attn/kernel"]),
    ("/kernel", ["kernel", "kernel/a"], ["dense/kernel"]),
    ("attn/", ["attn/kernel", "encoder/attn/kernel"], ["my_attn/kernel"]),
    # `*`, `?` and brackets match within one name.
    ("*bias", ["bias", "dense/my_bias"], ["bias_2"]),
    ("*norm*", ["block/layer_norm_1/scale"], ["block/kernel"]),
    ("a*e", ["ae", "abcde/kernel"], ["a/e", "dense/a/e/kernel"]),
    ("blocks/*/kernel", ["blocks/1/kernel"], ["blocks/kernel", "blocks/1/mlp/kernel"]),
    ("w?", ["w1", "dense/wo"], ["w", "w10", "w/kernel"]),
    ("blocks/[0-3]", ["blocks/0/kernel", "blocks/3"], ["blocks/4", "blocks/30", "blocks"]),
    ("blocks/[!0-3]", ["blocks/4/kernel"], ["blocks/3", "blocks/44", "blocks"]),
    ("a[+-9]b", ["a1b"], ["a/b"]),
    ("[[]0]", ["[0]"], ["0"]),
    # A name with brackets matches itself, too.
    ("w[0,0] 4x0e", ["w[0,0] 4x0e", "up/w[0,0] 4x0e/b"], ["w[0,0] 4x0", "w[1,0] 4x0e"]),
    ("up/l[0]|v", ["up/l[0]/b", "up/l0", "v"], ["up/l[1]/b", "up/l[00]"]),
    ("[0]/*", ["[0]/b", "0/b"], ["[0]", "[1]/b"]),
    ("*", ["kernel", "a/b", ""], []),
    # `**` is any number of names.
    ("**/attn/kernel", ["attn/kernel", "encoder/0/attn/kernel"], ["encoder/attn/0/kernel"]),
    ("encoder/**/kernel", ["encoder/kernel", "encoder/0/mlp/kernel"], ["decoder/0/kernel"]),
    ("encoder/**", ["encoder/kernel", "encoder/0/mlp/kernel"], ["decoder/encoder/kernel"]),
    ("**", ["kernel", "a/b", ""], []),
    # Bars are between patterns.
    ("embed|blocks/[02]", ["my/embed/w", "blocks/2/w"], ["blocks/1/w", "my/blocks/2/w"]),
    ("a|ab", ["ab/kernel", "a"], ["abc"]),
    # A dot is a slash, in the names of PyTorch.
    (
      "blocks.1",
      ["blocks.1.weight", "blocks/1/weight"],
      ["blocks.10.weight", "h.blocks.1.weight"],
    ),
    ("blocks/1", ["blocks.1.weight"], ["blocks.10.weight"]),
    ("h.*.attn", ["h.0.attn.weight"], ["h.attn.weight", "h.0.mlp.weight"]),
    ("bias", ["fc1.bias"], ["fc1.bias_2"]),
    # Upper and lower case differ.
    ("Conv", ["Conv/kernel"], ["conv/kernel"]),
  ],
)
def test_the_rules_of_patterns(pattern, selected, others):
  for path in selected:
    assert selects(pattern, path), path
  for path in others:
    with pytest.warns(optax_boost.NoEffectWarning):
      assert not selects(pattern, path), path


def is_selected(pattern, path):
  """By `fnmatch` and the enumeration of all numbers of names for each `**`."""
  names = re.split("[/.]", path)

  def matches(alternative):
    if not re.search("[/.]", alternative):
      return any(fnmatch.fnmatchcase(name, alternative) for name in names)
    parts = re.split("[/.]", alternative.removeprefix("/"))
    ways = [
      [["*"] * n for n in range(len(names) + 1)] if part == "**" else [[part]] for part in parts
    ]
    expanded = (list(itertools.chain(*way)) for way in itertools.product(*ways))
    return any(
      len(way) <= len(names) and all(map(fnmatch.fnmatchcase, names, way)) for way in expanded
    )

  return any(map(matches, pattern.split("|")))


@pytest.mark.filterwarnings("ignore::optax_boost.NoEffectWarning")
def test_random_patterns_select_what_fnmatch_and_enumeration_select():
  rng = np.random.default_rng(0)

  def draw(parts, longest, between):
    count = rng.integers(1, longest + 1)
    texts = [str(rng.choice(parts)) for _ in range(count)]
    return "".join(itertools.chain(*zip(texts, rng.choice(between, count), strict=True)))[:-1]

  globs = ["a", "b", "ab", "a*", "*b", "?", "[ab]", "[!a]b", "a[a-c]", "*", "**", "a**", "[!b]*"]
  paths = [draw(["a", "b", "ab", "abc", "cb"], 4, ["/", "/", "."]) for _ in range(40)]
  counts = np.zeros(2, int)
  for _ in range(150):
    pattern = "|".join(draw(globs, 3, ["/"]) for _ in range(rng.integers(1, 3)))
    pattern = "/" * rng.integers(2) + pattern
    for path in paths:
      expected = is_selected(pattern, path)
      assert selects(pattern, path) == expected, (pattern, path)
      counts[int(expected)] += 1
  assert counts.min() > 0.1 * counts.sum()


def test_path_mask_warns_of_a_pattern_that_matches_nothing():
  with pytest.warns(optax_boost.NoEffectWarning, match=r"\['gamma'\]. The leaves are: block/0/b"):
    optax_boost.path_mask("kernel", "gamma")(PARAMS)


@pytest.mark.parametrize(
  ("pattern", "hint"),
  [
    ("0/kernel", "Write '**/0/kernel' to match 'block/0/kernel': a pattern with a slash"),
    ("/kernel", "Write '**/kernel' to match 'block/0/kernel': a pattern with a slash"),
    ("0.kernel", "Write '**/0.kernel' to match 'block/0/kernel': a pattern with a slash or a dot"),
    ("gamma|0/bias", "Write 'gamma|**/0/bias' to match 'block/0/bias'"),
    ("kern", "Write '*kern*' to match 'block/0/kernel': a pattern matches whole names."),
    ("blo/0/kern*", "Write '*blo*/*0*/*kern*' to match 'block/0/kernel': a pattern matches whole"),
    ("blo.*", "Write '*blo*.*' to match 'block/0/bias': a pattern matches whole names."),
    ("block/**/scal", "Write '*block*/**/*scal*' to match 'block/1/scale'"),
  ],
)
def test_the_warning_of_a_pattern_without_effect_has_the_pattern_to_write(pattern, hint):
  with pytest.warns(optax_boost.NoEffectWarning, match=re.escape(hint)) as caught:
    optax_boost.path_mask(pattern)(PARAMS)
  assert "The leaves are: block/0/bias, block/0/kernel, block/1/scale." in str(caught[0].message)
  written = re.search("Write '(.*?)' to", hint)[1]
  assert any(jax.tree.leaves(optax_boost.path_mask(written)(PARAMS)))


def test_path_mask_accepts_only_patterns():
  with pytest.raises(TypeError, match=r"must hold patterns, which are strings; got 3.*head\|"):
    optax_boost.path_mask(3)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_a_mask_that_inject_hyperparams_takes_for_a_schedule_says_static_args(jit):
  params = {"kernel": jnp.ones(3), "bias": jnp.ones(3)}
  zeros = jax.tree.map(jnp.zeros_like, params)
  hyperparams = {"learning_rate": 0.1, "weight_decay": 0.5, "mask": optax_boost.path_mask("kernel")}
  with pytest.raises(TypeError, match=r"got .*, a count of steps.*static_args=\(\"mask\",\)"):
    jit(optax.inject_hyperparams(optax.adamw)(**hyperparams).init)(params)
  tx = optax.inject_hyperparams(optax.adamw, static_args=("mask",))(**hyperparams)
  updates, _ = jit(tx.update)(zeros, tx.init(params), params)
  np.testing.assert_allclose(updates["kernel"], -0.05, rtol=1e-6)
  assert not np.any(updates["bias"])
