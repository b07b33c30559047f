"""The cards name the metrics that the train steps return; the page's lines fit the loggers."""

import itertools
import pathlib
import re
import runpy
import sys
from unittest import mock

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.nnx
from tests import problems
from tests.contract import registry

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "metrics.md").read_text(encoding="utf-8")
CARDS = runpy.run_path(str(DOCS / "card_tables.py"))["read_cards"]()


def metrics_of(row):
  """The metrics of a row's train step."""
  step = optax_boost.make_train_step(
    lambda params, scale: problems.distance(params, problems.target(params)) * scale,
    row.optimizer(),
  )

  def first_metrics(params):
    return step(step.init(params), np.float32(1))[1]

  # The step reads on the host how many groups it freezes, so that one runs.
  call = (lambda f, x: f(x)) if row.factory == "freeze_layers" else jax.eval_shape
  return call(first_metrics, problems.params())


def test_the_page_has_the_metrics_of_every_step_with_their_dtypes_and_shapes():
  """The cards, of which the page is made."""
  returned = {}
  # What the tests put around a step of the root hides it from the train step.
  for row in (row for row in registry.ROWS if not (row.is_root and row.extra)):
    for name, value in metrics_of(row).items():
      returned.setdefault(name, set()).add((row.factory, value.dtype.name, value.shape))
  shapes = {"": (), ", one per leaf": (len(jax.tree.leaves(problems.params())),)}
  described = {}
  for metric in itertools.chain.from_iterable(card.metrics for card in CARDS):
    factories = re.findall(r"`(\w+)`", metric.of)
    if metric.of == "every step, if asked":  # tests/train_step/test_requested_metrics.py
      optax_boost.make_train_step(max, optax.identity(), metrics=(metric.name,))
      continue
    if metric.of == "every step":
      factories = [row.factory for row in registry.ROWS]
    if metric.of == "wrappers that skip":
      rows = registry.wrappers()
      factories = [name for name, row in rows.items() if row.form.step.leaves_out]
    found = {(factory, metric.dtype, shapes[metric.shape]) for factory in factories}
    described.setdefault(metric.name, set()).update(found)
  assert described == returned, "correct the section Metrics of the card"


def test_the_other_fields_that_the_page_names_are_in_the_states():
  rows = {row.factory: row for row in registry.ROWS}
  fields = re.findall(r"^\| (`.+`) \| (`.+`) \| [^|]+ \|$", PAGE, re.MULTILINE)
  assert fields
  for cells in fields:
    for field, factory in itertools.product(*(re.findall(r"\w+", cell) for cell in cells)):
      state = rows[factory].make().init(problems.params())
      assert optax.tree.get_all_with_path(state, field), f"{factory} has no field {field}"


def test_names_come_from_paths_leaves_and_numbers():
  metrics = {
    "loss": jnp.bfloat16(0.5),
    "ratio": jnp.arange(2.0),
    "aux": {"pair": jnp.arange(2), "done": jnp.bool_(True), "logits": jnp.ones((2, 2))},
  }
  rest = {"loss": 0.5, "aux/done": True, "aux/pair/0": 0, "aux/pair/1": 1}
  assert optax_boost.flatten_metrics(metrics) == {**rest, "ratio/0": 0.0, "ratio/1": 1.0}
  flat = optax_boost.flatten_metrics(metrics, {"dense": {"kernel": 1, "bias": 2}})
  assert flat == {**rest, "ratio/dense/bias": 0.0, "ratio/dense/kernel": 1.0}
  # As inside `optax.masked`, whose method sees a part of the leaves.
  assert "ratio/1" in optax_boost.flatten_metrics(metrics, {"kernel": 1})
  assert optax_boost.flatten_metrics({"ratio": np.ones(1)}, jnp.ones(3)) == {"ratio": 1.0}
  assert optax_boost.flatten_metrics({"aux": jnp.ones(1)}, {"kernel": 1}) == {"aux/0": 1.0}


def test_metrics_that_are_traced_or_in_the_place_of_params_are_refused():
  metrics, params = {"loss": jnp.ones([]), "trust_ratio": jnp.ones(1)}, {"kernel": jnp.ones((2, 2))}
  with pytest.raises(ValueError, match=r"takes the metrics first.*Exchange the two"):
    optax_boost.flatten_metrics(params, metrics)
  with pytest.raises(TypeError, match=r"outside of `jit`.*flatten what comes back"):
    jax.jit(optax_boost.flatten_metrics)(metrics)
  # Params may be called as a metric is.
  assert optax_boost.flatten_metrics(metrics, {"loss": 0})["trust_ratio/loss"] == 1


def test_an_nnx_model_names_the_ratios_of_its_layers():
  model = nnx.Sequential(*(nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(11)))
  for i, layer in enumerate(model.layers):
    layer.kernel[...] = jnp.eye(2) * 10.0**-i
  optimizer = nnx.Optimizer(model, optax_boost.lars(1e-3, trust_coefficient=1.0), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(
    lambda model, _: sum(jnp.sum(layer.kernel[...]) for layer in model.layers)
  )
  flat = optax_boost.flatten_metrics(step(model, optimizer, None), nnx.state(model, nnx.Param))
  for i in range(11):
    np.testing.assert_allclose(flat[f"trust_ratio/layers/{i}/kernel"], 10.0**-i / 2**0.5, rtol=1e-5)


@pytest.mark.parametrize(
  ("module", "expected"),
  [
    ("tensorboardX", mock.call.SummaryWriter().add_scalar("loss", 0.5, 100)),
    ("flax.metrics", mock.call.tensorboard.SummaryWriter().scalar("loss", 0.5, 100)),
    ("clu", mock.call.metric_writers.create_default_writer().write_scalars(100, {"loss": 0.5})),
    ("wandb", mock.call.init().log({"loss": 0.5}, step=100)),
  ],
)
def test_the_lines_for_a_logger_write_every_scalar(monkeypatch, module, expected):
  logger = mock.MagicMock()
  monkeypatch.setitem(sys.modules, module, logger)
  (code,) = re.findall(rf"```py\n((?:from|import) {module}\b.*?)```", PAGE, re.DOTALL)
  exec(compile(code, "metrics.md", "exec"), {"scalars": {"loss": 0.5}, "i": 99})
  assert expected in logger.mock_calls
