"""Groups of layers of public models: a group per block, one before these and one after.

Models with several series of blocks must be told; those with stages may be.
"""

import functools

import jax
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._foundation import _paths
from tests.layer_axes import block_layouts


@functools.cache
def layout_of(name):
  return block_layouts.LAYOUTS[name]()


@functools.cache
def plan_of(name):
  layout = layout_of(name)
  return optax_boost.layer_groups(layout.loss, layout.params, *layout.args, blocks=layout.asked)


def by_default(name):
  layout = layout_of(name)
  return optax_boost.layer_groups(layout.loss, layout.params, *layout.args)


def entries(paths, prefix):
  """What a group has of the leaves with a prefix; of a layer of a scan, its slices."""
  head, bracket, number = prefix.rstrip("]").partition("[")
  found = {path for path in paths if path == head or path.startswith(head.rstrip("/") + "/")}
  return {f"{path}[{number}:{int(number) + 1}]" for path in found} if bracket else found


def expected_groups(layout):
  """For each group its entries, from the prefixes alone."""
  paths = _paths.leaf_paths(layout.params)
  groups = []
  for prefixes in (layout.first, *layout.blocks, layout.last):
    prefixes = (prefixes,) if isinstance(prefixes, str) else prefixes
    groups.append(set().union(*(entries(paths, prefix) for prefix in prefixes)))
  return groups


@pytest.mark.parametrize("name", block_layouts.LAYOUTS)
def test_each_block_is_a_group_and_leaves_before_and_after_blocks_are_two_more(name):
  layout, plan = layout_of(name), plan_of(name)
  found, expected = [set(map(str, group)) for group in plan.groups], expected_groups(layout)
  assert found == expected
  # All leaves, each once: the prefixes leave none out.
  leaves = {path.partition("[")[0] for path in set().union(*expected)}
  assert leaves == set(_paths.leaf_paths(layout.params))
  assert plan.unused == ()


@pytest.mark.parametrize("name", [name for name in block_layouts.LAYOUTS if "scan" not in name])
def test_layerwise_decay_gives_the_rates_of_the_recipe(name):
  """The last group has the rate, each before it `decay` of the next; block by block."""
  layout = layout_of(name)
  tx = optax_boost.layerwise_decay(optax.sgd(1.0), plan_of(name), 0.75)
  # Rates are by leaf: JAX compiles nothing for each shape of a leaf.
  ones = jax.tree.map(lambda _: np.ones((), np.float32), layout.params)
  updates, _ = tx.update(ones, tx.init(ones), ones)
  rates = dict(zip(_paths.leaf_paths(updates), jax.tree.leaves(updates), strict=True))
  groups = expected_groups(layout)
  for number, group in enumerate(groups):
    for path in group:
      np.testing.assert_allclose(rates[path], -(0.75 ** (len(groups) - 1 - number)), rtol=1e-6)


def test_a_tied_embedding_is_in_the_first_group():
  for name in ("gpt2", "gpt2 scanned", "gemma", "bert, masked words"):
    (tied,) = plan_of(name).reused
    assert tied in plan_of(name).groups[0], name


@pytest.mark.parametrize("name", ["resnet 34", "convnext", "convnext of its authors"])
def test_by_default_a_stage_is_a_block_and_the_plan_says_how_to_get_its_inner_blocks(name):
  plan, asked = by_default(name), layout_of(name).asked
  assert len(plan.groups) == 6
  assert plan.groups[0] == plan_of(name).groups[0]
  assert plan.groups[-1] == plan_of(name).groups[-1]
  assert f'{len(plan_of(name).groups) - 2} finer ones pass blocks="{asked}"' in str(plan)


@pytest.mark.parametrize(
  ("name", "series"),
  {
    "t5": ("encoder/block/*", "decoder/block/*"),
    "t5x": ("encoder/layers_*", "decoder/layers_*"),
    "t5x scanned": ("encoder/layers[*]", "decoder/layers[*]"),
    "unet": ("down_*", "up_*"),
    "diffusion unet": ("down_blocks_*", "mid_block/resnets_*", "up_blocks_*"),
  }.items(),
)
def test_several_series_are_a_question_that_names_them(name, series):
  with pytest.raises(ValueError, match=f"finds {len(series)} series of blocks") as question:
    by_default(name)
  # Each follows the one before, so the chain is the first answer.
  first, second = '", "'.join(series), "|".join(series)
  assert f'Pass blocks="{second}" if they are one after the other; or blocks=("{first}") if' in str(
    question.value
  )


@pytest.mark.parametrize("name", ["vit", "bert scanned", "gpt2", "convnext", "resnet 34"])
@pytest.mark.parametrize("num_groups", [2, 3, 7, 10])
def test_fewer_groups_have_whole_blocks_in_the_same_order(name, num_groups):
  layout = layout_of(name)
  plan = optax_boost.layer_groups(
    layout.loss, layout.params, *layout.args, num_groups=num_groups, blocks=layout.asked
  )
  assert len(plan.groups) == num_groups
  assert expected_groups(layout)[0] <= {path for path in plan.groups[0] if isinstance(path, str)}
  group_of_leaf = {str(path): number for number, group in enumerate(plan.groups) for path in group}
  previous = 0
  for block in expected_groups(layout):
    numbers = {group_of_leaf[path] for path in block if path in group_of_leaf}
    if numbers:
      (number,) = numbers
      assert previous <= number
      previous = number


@pytest.mark.parametrize("name", ["unet", "resnet 34", "t5x scanned"])
def test_auto_boost_asks_nothing_and_cuts_between_layers(name):
  layout = layout_of(name)
  config = {"boost": {"mode": "manual", "less_bn": False}, "grad_freeze": {"param_groups": 10}}
  boost = optax_boost.auto_boost("O1", config=config)
  tx = boost.optimizer(optax.sgd(0.1), layout.loss, layout.params, *layout.args)
  group_of = jax.tree.leaves(tx.update.form.step.freezing.number_leaves(layout.params))
  assert set().union(*(np.ravel(number).tolist() for number in group_of)) == set(range(10))
