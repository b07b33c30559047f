"""Programs compiled in the background are those that the steps call."""

import threading
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import _train_step
import optax_boost.nnx
from tests import compilations

SIZES = (4, 8, 16)


def batches():
  return [np.ones((size, 3), np.float32) for size in SIZES]


def mean_square(model, batch):
  return jnp.mean((model(batch) - 1) ** 2)


def plain():
  tx = optax_boost.freeze_layers(optax.adam(0.1), ["a", "b"], optax_boost.fixed_freezing(2, 1))

  def loss_fn(params, mean, batch):
    return jnp.mean((batch @ params["a"] + params["b"]) ** 2), 0.9 * mean + 0.1 * batch.mean()

  step = optax_boost.make_train_step(loss_fn, tx, has_model_state=True)
  state = [step.init({"a": jnp.ones(3), "b": jnp.ones(())}, jnp.zeros(()))]

  def train(batch):
    state[0], metrics = step(state[0], batch)
    return metrics["loss"]

  return lambda batches: step.compile_ahead(state[0], batches), train


def nnx_model():
  rngs = nnx.Rngs(0)
  layers = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
  model = nnx.Sequential(*layers)
  optimizer = nnx.Optimizer(model, optax_boost.dynamic_loss_scale(optax.adam(0.1)), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(mean_square)
  return (
    lambda batches: step.compile_ahead(model, optimizer, batches),
    lambda batch: step(model, optimizer, batch)["loss"],
  )


@pytest.mark.parametrize("make", [plain, nnx_model])
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_step_compiles_nothing_that_was_compiled_ahead(make, trained_before):
  compile_ahead, train = make()
  first, *later = batches()
  if trained_before:
    train(first)
  compile_ahead(later).result()
  train(first)
  losses, compiled = compilations.counted(lambda: jax.block_until_ready(list(map(train, later))))
  assert compiled == 0
  _, train = make()
  expected = [train(batch) for batch in [first] * (1 + trained_before) + later][-2:]
  np.testing.assert_array_equal(losses, expected)


def test_training_goes_on_before_the_programs_are_compiled():
  compile_ahead, train = plain()
  first, *later = batches()
  future = compile_ahead(later)  # reads a state that the next step donates
  assert np.isfinite([train(batch) for batch in [first, *later, first]]).all()
  future.result()


def test_batches_may_be_abstract():
  compile_ahead, train = plain()
  shapes = [jax.ShapeDtypeStruct(batch.shape, batch.dtype) for batch in batches()]
  compile_ahead(shapes).result()
  _, compiled = compilations.counted(lambda: jax.block_until_ready(list(map(train, batches()))))
  assert compiled == 0


def test_a_program_is_ready_before_the_next_is_traced_and_each_is_reported():
  ready, lines = [threading.Event() for _ in SIZES], []

  class Program:
    def __init__(self, number):
      self.number = number

    def compile(self):
      assert len(lines) == self.number + 1
      ready[self.number].set()

  def lower(batch):
    number = SIZES.index(len(batch))
    # The timeout keeps a failing test from hanging.
    assert all(event.wait(60) for event in ready[:number])
    return Program(number)

  _train_step.compile_for(batches(), lower, lines.append).result()
  assert lines == [
    f"compiling the train step, program {i} of 3: float32[{size}, 3]"
    for i, size in enumerate(SIZES, 1)
  ]


def test_the_first_step_calls_the_program_that_was_begun_for_it():
  compile_ahead, train = plain()
  _, compiled = compilations.counted(
    lambda: (compile_ahead(batches()), train(batches()[0]))[0].result()
  )
  _, train_alone = plain()
  alone = compilations.count(lambda: list(map(train_alone, batches())))
  assert compiled == alone


def test_an_error_of_the_thread_comes_with_the_result():
  class Program:
    def compile(self):
      raise RuntimeError("no memory")

  with pytest.raises(RuntimeError, match="no memory"):
    _train_step.compile_for(batches(), lambda _: Program()).result()


class Pair(NamedTuple):
  x: np.ndarray
  y: np.ndarray


@pytest.mark.parametrize(
  ("batch", "shapes"),
  [
    (np.ones((4, 3), np.float32), r"float32\[4, 3\]"),
    ({"x": np.ones((4, 3)), "y": np.ones(4)}, r"float64\[4, 3\], float64\[4\]"),
    (Pair(np.ones((4, 3)), np.ones(4)), r"float64\[4, 3\], float64\[4\]"),
    (jax.ShapeDtypeStruct((4, 3), jnp.float32), r"float32\[4, 3\]"),
    (4, "4"),
  ],
)
@pytest.mark.parametrize("make", [plain, nnx_model])
def test_a_batch_in_the_place_of_a_list_is_refused(make, batch, shapes):
  compile_ahead, _ = make()
  with pytest.raises(TypeError, match=rf"must be a list of batches.*{shapes}.*\[batch\]"):
    compile_ahead(batch)


def test_a_tuple_that_may_be_a_batch_fails_with_a_note():
  def loss_fn(w, batch):
    x, y = batch
    return jnp.mean((x @ w - y) ** 2)

  step = optax_boost.make_train_step(loss_fn, optax.sgd(0.1))
  batch = np.ones((4, 3), np.float32), np.ones(4, np.float32)
  with pytest.raises(ValueError, match="too many values to unpack") as error:
    step.compile_ahead(step.init(jnp.ones(3)), batch)
  assert error.value.__notes__[-1:] == [
    "If `batches` is a single batch, pass a list: `compile_ahead(..., [batch])`."
  ]


def test_params_in_the_place_of_a_state_are_refused():
  step = optax_boost.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1))
  with pytest.raises(TypeError, match=r"`state` must be an `optax_boost.TrainState`"):
    step.compile_ahead(jnp.ones(3), [np.ones((4, 3), np.float32)])


def test_an_error_of_the_trace_comes_at_once_and_the_state_lives():
  compile_ahead, train = plain()
  with pytest.raises(TypeError, match="dot_general"):
    compile_ahead([np.ones((4, 5), np.float32)])
  assert np.isfinite(train(batches()[0]))
