"""Mistakes of a first program are answered by what was required, what came and what to do."""

from flax import linen as nn, nnx
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
