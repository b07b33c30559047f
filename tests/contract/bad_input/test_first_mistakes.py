"""Mistakes of a first program are answered by what was required, what came and what to do."""

import re

from flax import errors, linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx

PARAMS = {"w": jnp.ones((3, 1))}
BATCH = {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 1))}


def squares(params, batch):
  return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def loss_of_model(model, batch):
  return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


WITH_SCHEDULE = {
  "decay(k)": lambda f: optax_boost.average_params(optax.sgd(0.1), decay=lambda k: 0.5 * f(k)),
  "every(inner_count)": lambda f: optax_boost.accumulate(optax.sgd(0.1), lambda step: f(step) + 1),
  "sync_every(count)": lambda f: optax_boost.laperm(optax.sgd(0.1), lambda step: f(step) + 1),
}
OF_A_PYTHON_NUMBER = {
  "if": lambda step: -1 if step > 3 else 0,
  "int": lambda step: min(int(step), 0),
  "numpy": lambda step: int(np.minimum(step, 0)),
  "list": lambda step: [0, 0, 0][step],
}


@pytest.mark.parametrize("function", OF_A_PYTHON_NUMBER.values(), ids=OF_A_PYTHON_NUMBER)
@pytest.mark.parametrize("call", WITH_SCHEDULE)
def test_a_schedule_that_needs_a_python_number_is_told_to_compute_with_jnp(call, function):
  step = optax_boost.make_train_step(squares, WITH_SCHEDULE[call](function))
  with pytest.raises(TypeError) as refused:
    step(step.init(PARAMS), BATCH)
  text = str(refused.value)
  assert text.startswith(f"`{call}` must compute with `jnp`")
  assert "needs a Python number, as `if`" in text
  assert "`jnp.where(step < 100, 0, 4)`" in text


NO_COUNTS = {
  "2.5": lambda step: 2.5,
  "zero": lambda step: 0,
  "a traced float": lambda step: 1.0 + step,
  "a vector": lambda step: jnp.ones(2, int),
}


@pytest.mark.parametrize("function", NO_COUNTS.values(), ids=NO_COUNTS)
@pytest.mark.parametrize("call", ["every(inner_count)", "sync_every(count)"])
def test_a_function_that_returns_no_whole_number_is_refused_like_the_constant(call, function):
  method = {"every": optax_boost.accumulate, "sync_every": optax_boost.laperm}[call.split("(")[0]]
  tx = method(optax.sgd(0.1), function)
  with pytest.raises((TypeError, ValueError), match=rf"^`{re.escape(call)}` must (be|return) a?"):
    jax.eval_shape(tx.update, PARAMS, tx.init(PARAMS), PARAMS)


def test_a_number_below_one_that_is_computed_on_the_device_counts_as_one():
  params, grads = jnp.array([[0.0], [0.01], [0.02]]), jnp.array([[-1.0], [0.0], [1.0]])
  for method in (optax_boost.accumulate, optax_boost.laperm):
    updates = []
    for every in (1, lambda step: step - 5):
      tx = method(optax.sgd(0.1), every)
      updates.append(jax.jit(tx.update)(grads, tx.init(params), params)[0])
    assert np.any(updates[0])
    np.testing.assert_array_equal(*updates)


def test_the_loss_of_a_linen_model_without_split_loss_is_told_to_split():
  variables = nn.Dense(1).init(jax.random.key(0), BATCH["x"])
  step = optax_boost.make_train_step(loss_of_model, optax.sgd(0.1))
  with pytest.raises(
    TypeError, match=r"params, which can't be called like a model.*linen\.split_loss\(loss_fn, mod"
  ):
    step(step.init(variables), BATCH)


def test_a_function_that_reads_the_loss_of_a_linen_model_without_split_loss_says_to_split():
  variables = nn.Dense(1).init(jax.random.key(0), BATCH["x"])
  for params in (variables, variables["params"]):
    with pytest.raises(TypeError, match=r"can't be called like a model.*linen\.split_loss\(") as e:
      optax_boost.layer_axes(loss_of_model, params, BATCH)
    assert str(e.value.__cause__) == "'dict' object is not callable"


def by_unpacking(params, batch):
  x, y = batch
  return squares(params, {"x": x, "y": y})


def by_number(params, batch):
  return squares(params, {"x": batch[0], "y": batch[1]})


def by_attribute(params, batch):
  return squares(params, {"x": batch.x, "y": batch.y})


PAIR = (BATCH["x"], BATCH["y"])
MISREAD = {
  "a tuple by name": (squares, PAIR, TypeError),
  "an array by name": (squares, BATCH["x"], TypeError),
  "a dict without this name": (squares, {"x": BATCH["x"]}, KeyError),
  "a dict by number": (by_number, BATCH, KeyError),
  "a short tuple": (by_number, PAIR[:1], IndexError),
  "a dict of two, unpacked": (by_unpacking, BATCH, TypeError),
  "a dict of three, unpacked": (by_unpacking, BATCH | {"z": BATCH["y"]}, ValueError),
  "a dict by attribute": (by_attribute, BATCH, AttributeError),
  "rows of another width": (squares, BATCH | {"x": jnp.ones((4, 5))}, TypeError),
}


def in_nnx(loss, batch, *rngs):
  model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
  step = optax_boost.nnx.make_train_step(
    lambda model, batch, *rngs: loss({"w": model.kernel[...]}, batch)
  )
  step(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), batch, *rngs)


def in_linen(loss, batch):
  module = nn.Dense(1, use_bias=False)
  variables = {"params": {"kernel": PARAMS["w"]}}
  pure, *start = optax_boost.linen.split_loss(
    lambda model, batch: loss(PARAMS, batch) * jnp.sum(model(jnp.ones(3))), module, variables
  )
  step = optax_boost.make_train_step(pure, optax.sgd(0.1))
  step(step.init(*start), batch)


def in_plain_jax(loss, batch):
  step = optax_boost.make_train_step(loss, optax.sgd(0.1))
  step(step.init(PARAMS), batch)


def ahead(loss, batch):
  step = optax_boost.make_train_step(loss, optax.sgd(0.1))
  step.compile_ahead(step.init(PARAMS), [batch])


def in_a_race(loss, batch):
  optimizers = {"a": optax.sgd(0.1), "b": optax.sgd(0.2)}
  optax_boost.race(loss, lambda key: PARAMS, batch, optimizers, steps=2, batch_size=4, seeds=2)


CALLS = {
  "plain": in_plain_jax,
  "linen": in_linen,
  "nnx": in_nnx,
  "nnx with a key": lambda loss, batch: in_nnx(loss, batch, jax.random.key(0)),
  "compile_ahead": ahead,
  "race": in_a_race,
  "layer_axes": lambda loss, batch: optax_boost.layer_axes(loss, PARAMS, batch),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("loss", "batch", "error"), MISREAD.values(), ids=MISREAD)
def test_a_loss_that_misreads_its_batch_is_told_what_came(call, loss, batch, error):
  with pytest.raises(error) as raised:
    call(loss, batch)
  (note,) = [note for note in raised.value.__notes__ if "`loss_fn`" in note]
  types = jax.tree.map(jax.typeof, batch)
  assert f"{types!r}" in note
  assert "Batch(" not in note
  assert "read it by the names or numbers that it has" in note


@jax.tree_util.register_pytree_node_class
class Images:
  """A batch whose class reads the shape of its leaf."""

  def __init__(self, pixels):
    self.pixels, self.width = pixels, pixels.shape[1]

  def tree_flatten(self):
    return (self.pixels,), None

  @classmethod
  def tree_unflatten(cls, _, children):
    return cls(*children)


def test_a_batch_whose_class_reads_shapes_does_not_hide_the_error_of_the_loss():
  step = optax_boost.make_train_step(lambda p, batch: batch.labels, optax.sgd(0.1))
  with pytest.raises(AttributeError, match="'Images' object has no attribute 'labels'"):
    step(step.init(PARAMS), Images(jnp.ones((4, 3))))


def test_another_type_error_of_a_loss_keeps_its_words():
  step = optax_boost.make_train_step(lambda p, batch: batch["x"](p), optax.sgd(0.1))
  with pytest.raises(TypeError, match=r"^'.*Tracer' object is not callable\n`loss_fn`"):
    step(step.init(PARAMS), BATCH)


@pytest.mark.parametrize("text", ["a name", np.array(["a", "b", "c", "d"])])
def test_a_text_in_a_batch_is_named(text):
  step = optax_boost.make_train_step(squares, optax.sgd(0.1))
  state, batch = step.init(PARAMS), BATCH | {"name": text}
  calls = (step, step.lower, lambda state, batch: step.compile_ahead(state, [batch]))
  for call in calls:
    with pytest.raises(TypeError, match=r"`batch` must hold arrays.*'name' is.*Leave it out of"):
      call(state, batch)
  step(state, BATCH)


class Normalized(nnx.Module):
  def __init__(self):
    self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.norm(x)


class LinenNormalized(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.BatchNorm(use_running_average=False)(x)


@pytest.mark.parametrize("batch", [BATCH, (BATCH["x"], BATCH["y"])], ids=["dict", "tuple"])
def test_statistics_of_batches_that_are_no_arrays_ask_for_a_forward_fn(batch):
  module = LinenNormalized()
  variables = module.init(jax.random.key(0), BATCH["x"])
  text = rf"`forward_fn` must say what.*got None and a {type(batch).__name__},.*Pass, for example"
  with pytest.raises(TypeError, match=text):
    optax_boost.nnx.estimate_batch_stats(Normalized(), [batch])
  with pytest.raises(TypeError, match=text):
    optax_boost.linen.estimate_batch_stats(module, variables, [batch])


def test_a_step_without_the_optimizer_or_the_batch_is_told_what_is_missing():
  model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
  step = optax_boost.nnx.make_train_step(loss_of_model)
  with pytest.raises(TypeError, match=r"`optimizer` must be what `nnx\.Optimizer\(.*got \{'x'"):
    step(model, BATCH)
  with pytest.raises(TypeError, match=r"needs a batch, too: `step\(model, optimizer, batch\)`"):
    step(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))


def race(init_fn, contender):
  return optax_boost.race(squares, init_fn, jnp.ones(2), {"a": contender}, steps=1, progress=False)


FUNCTIONS = {
  "init_fn(key)": lambda f: race(f, optax.sgd(0.1)),
  "batch_fn(batch, step)": lambda f: race(lambda key: PARAMS, (optax.sgd(0.1), f)),
  "weight_fn(batch)": lambda f: optax_boost.full_gradient(
    jax.grad(squares), PARAMS, [], weight_fn=f
  ),
}


@pytest.mark.parametrize("form", FUNCTIONS)
def test_a_function_of_other_arguments_is_refused_before_it_is_called(form):
  with pytest.raises(TypeError) as refused:
    FUNCTIONS[form](lambda: 1)
  assert f"is called as `{form}`; got a function of (), which can't be called so" in str(
    refused.value
  )


def linen_step(loss):
  module = nn.Dense(1)
  variables = module.init(jax.random.key(0), BATCH["x"])
  pure, *start = optax_boost.linen.split_loss(
    lambda model, batch: loss(module, model, batch), module, variables
  )
  step = optax_boost.make_train_step(pure, optax.sgd(0.1))
  step(step.init(*start), BATCH)


def nnx_step(loss):
  module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
  step = optax_boost.nnx.make_train_step(lambda model, batch: loss(module, model, batch))
  step(module, nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param), BATCH)


@pytest.mark.parametrize("step", [linen_step, nnx_step])
@pytest.mark.parametrize(
  "loss",
  [
    lambda module, params, batch: jnp.mean(batch["x"] @ params["kernel"]),
    lambda module, params, batch: jnp.mean(module.apply({"params": params}, batch["x"])),
  ],
  ids=["reads", "applies"],
)
def test_a_loss_of_params_in_the_place_of_a_model_is_told_that_it_gets_the_model(step, loss):
  with pytest.raises((TypeError, AttributeError, errors.FlaxError)) as raised:
    step(loss)
  (note,) = [note for note in raised.value.__notes__ if "`loss_fn`" in note]
  assert "called with the model, " in note
  assert "holds its params, and is called as `model(x)`" in note


def test_params_and_a_model_state_in_one_tuple_are_told_of_has_model_state():
  start = (PARAMS, {"mean": jnp.zeros([])})
  step = optax_boost.make_train_step(squares, optax.sgd(0.1))
  calls = [
    lambda: step(step.init(start), BATCH),
    lambda: optax_boost.race(
      squares, lambda key: start, BATCH, {"a": optax.sgd(0.1)}, steps=1, progress=False
    ),
  ]
  for call in calls:
    with pytest.raises(TypeError) as raised:
      call()
    assert any("model state, pass `has_model_state=True`" in n for n in raised.value.__notes__)


def test_a_step_for_a_loss_without_data_is_told_to_pass_none():
  step = optax_boost.make_train_step(lambda params: jnp.sum(params["w"] ** 2), optax.sgd(0.1))
  with pytest.raises(
    TypeError, match=r"needs a batch, too.*`step\(state, None\)`.*loss_fn\(params, "
  ):
    step(step.init(PARAMS))
  step = optax_boost.make_train_step(lambda params, _: jnp.sum(params["w"] ** 2), optax.sgd(0.1))
  assert step(step.init(PARAMS), None)[1]["loss"] == 3
