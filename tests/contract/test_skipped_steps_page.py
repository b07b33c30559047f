"""The table of the page on skipped steps, cell for cell, against a step on a NaN batch."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests.contract import registry

PAGE = pathlib.Path(__file__).parents[2] / "docs/guides/skipped_steps.md"
WRAPPERS = {
  "dynamic_loss_scale": optax_boost.dynamic_loss_scale,
  "master_weights": optax_boost.master_weights,
  "stochastic_rounding": lambda tx: optax_boost.stochastic_rounding(tx, jax.random.key(0)),
  "skip_spikes": optax_boost.skip_spikes,
  "accumulate": lambda tx: optax_boost.accumulate(tx, every=3),
  "optax.apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
}
SCHEDULE = optax_boost.gradual_unfreezing(2, every=2)


def table():
  """The cells of the page's table: by row, then by wrapper."""
  lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
  header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
  return {
    row[0]: {
      name: cell
      for names, cell in zip(header[1:], row[1:], strict=True)
      for name in re.findall("`(.*?)`", names)
    }
    for row in rows
  }


def loss(params, model_state, batch):
  statistics = {"mean": 0.5 * model_state["mean"] + 0.5 * batch.mean(), "key": model_state["key"]}
  statistics["key"] = jax.random.fold_in(statistics["key"], 1)
  return jnp.sum((params["first"] * batch - params["last"]) ** 2), statistics


def numbers(tree):
  return [
    np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    for x in jax.tree.leaves(tree)
  ]


def change(before, after):
  """What became of a part of the state, in the page's words."""
  before, after = numbers(before), numbers(after)
  assert before, "this part is missing, or empty"
  if all(np.array_equal(old, new) for old, new in zip(before, after, strict=True)):
    return "kept"
  (old,), (new,) = before, after
  return {1: "one more"}.get(int(new - old), "halved" if 2 * new == old else f"{old} to {new}")


def parts(state):
  """The rows' parts of a state, in their order; None for what the optimizer doesn't have."""
  step = state.opt_state
  inner, window = step.inner_state, step.accumulation
  if isinstance(inner, optax.ApplyIfFiniteState):
    inner, skips = inner.inner_state, inner.total_notfinite
  else:
    skips = step.notfinite_count
  return (
    *(state.params, state.model_state, inner),
    (step.averaging, step.count),
    SCHEDULE.frozen_groups(step.count),
    window and window.accumulator,
    window and window.count,
    step.scaling and step.loss_scale,
    skips,
    state.step,
  )


def optimizer(name):
  """The wrapper with a window and a loss scale, which would judge in the place of one of optax."""
  tx = optax.adam(optax.linear_schedule(0.1, 0.0, 10))
  of_optax = name.startswith("optax.")
  tx = WRAPPERS[name](tx) if of_optax else tx
  tx = optax_boost.freeze_layers(tx, ["first", "last"], SCHEDULE)
  for wrapper in () if of_optax else sorted({name, "accumulate", "dynamic_loss_scale"}):
    tx = WRAPPERS[wrapper](tx)
  return optax_boost.average_params(tx, decay=0.5)


@pytest.mark.parametrize("name", WRAPPERS)
def test_each_cell_says_what_happens(name):
  step = optax_boost.make_train_step(loss, optimizer(name), has_model_state=True, donate=False)
  params = {"first": jnp.ones(2), "last": jnp.zeros(2)}
  state = step.init(params, {"mean": jnp.zeros([]), "key": jax.random.key(0)})
  for _ in range(4):
    state, _ = step(state, jnp.ones(2))
  skipped, _ = step(state, jnp.array([jnp.nan, 1.0]))
  rows = {row: cells[name] for row, cells in table().items()}
  found = {
    row: "none" if before is None else change(before, after)
    for row, before, after in zip(rows, parts(state), parts(skipped), strict=True)
  }
  assert found == rows


def test_the_table_has_all_wrappers_that_skip():
  skipping = {name for name, row in registry.wrappers().items() if row.form.step.leaves_out}
  columns = set(next(iter(table().values())))
  assert columns == set(WRAPPERS)
  assert {name for name in columns if not name.startswith("optax.")} == skipping
