"""The race: fair to every method, counted rightly, and honest about what went wrong."""

import concurrent.futures
import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import sys
import threading
import types

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx
from optax_boost.race import RaceCurves
from optax_boost.race import RaceResult
from optax_boost.race import _api
from optax_boost.race import _cost
from optax_boost.race import _curves
from optax_boost.race import _result
from optax_boost.race import _run
from optax_boost.race import _text

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype(np.float32)
DATA = {"x": X, "y": X @ np.array([1.0, -2.0, 0.5], np.float32)}
KEY = jax.random.key(0)


def loss_fn(w, batch):
  return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def noisy_loss(w, batch, rng):
  return loss_fn(w + 0.1 * jax.random.normal(rng, w.shape), batch)


def init_fn(key):
  return jax.random.normal(key, (3,))


def error(w):
  return {"error": jnp.mean((X @ w - DATA["y"]) ** 2)}


def small(transformations, loss=loss_fn, **changed):
  options = {"steps": 6, "batch_size": 8, "seeds": 2, "points": 3, "progress": False}
  return optax_boost.race(loss, init_fn, DATA, transformations, **options | changed)


@pytest.fixture(scope="module")
def raced():
  """SGD, twice as fast SGD, and one that diverges."""
  methods = {"sgd": optax.sgd(0.05), "fast": optax.sgd(0.1), "wild": optax.sgd(1e20)}
  return small(methods, noisy_loss, seeds=3, evaluate=error)


def by_hand(rate, seed, steps=6):
  """SGD in a plain loop: the losses, and the params after each step."""
  w, losses, path = init_fn(jax.random.key(seed)), [], []
  rng, key = np.random.default_rng(seed), jax.random.fold_in(jax.random.key(seed), 1)
  order = []
  for t in range(steps):
    if not len(order):
      order = rng.permutation(24)
    chosen, order = order[:8], order[8:]
    batch = jax.tree.map(lambda leaf, chosen=chosen: leaf[chosen], DATA)
    loss, grad = jax.value_and_grad(noisy_loss)(w, batch, jax.random.fold_in(key, t))
    w = w - rate * grad
    losses.append(float(loss))
    path.append(w)
  return np.array(losses), path


def test_curves_are_those_of_a_plain_loop_with_the_same_seeds(raced):
  for name, rate in (("sgd", 0.05), ("fast", 0.1)):
    curves = raced.curves[name]
    assert curves.steps.tolist() == [2, 4, 6]
    for row, seed in enumerate(raced.seeds):
      losses, path = by_hand(rate, seed)
      np.testing.assert_allclose(curves.loss[row], losses.reshape(3, 2).mean(1), rtol=1e-5)
      expected = [float(error(path[step - 1])["error"]) for step in (2, 4, 6)]
      np.testing.assert_allclose(curves.metrics["error"][row], expected, rtol=1e-5)


def test_a_method_that_diverges_is_reported_and_left_out_of_means(raced):
  assert raced.curves["wild"].diverged.all()
  assert not raced.curves["sgd"].diverged.any()
  table = raced.table()
  assert table.count("diverged: 3 of 3") == len(table.split("At equal")) - 1
  assert "nan" not in table.partition("Costs:")[0]
  assert raced.verdict("wild") == "wild: diverged."
  assert np.isnan(raced.values("wild", "error")).all()
  assert math.isnan(raced.difference("wild", "error")[0])


def test_seeds_at_once_give_what_they_give_one_at_a_time():
  methods = {"sgd": optax.sgd(0.05), "adam": optax.adam(0.1)}
  results = [
    small(methods, noisy_loss, seeds=4, evaluate=error, seeds_at_once=number)
    for number in (1, 2, 5)
  ]
  assert [r.curves["adam"].seeds_at_once for r in results] == [1, 2, 3]
  for result in results[1:]:
    assert result.seeds == (0, 1, 2, 3)
    for name in methods:
      np.testing.assert_allclose(
        result.curves[name].loss, results[0].curves[name].loss, rtol=1e-5, atol=1e-6
      )
      np.testing.assert_allclose(
        result.rows(name, "error"), results[0].rows(name, "error"), rtol=1e-4, atol=1e-6
      )


def patch_blocks(monkeypatch, seconds):
  """Lets `seconds` say, from the losses and the measured time, how long steps took."""
  advance = _run._Training.advance

  def timed(self, *args):
    losses, measured = advance(self, *args)
    return losses, seconds(losses, measured)

  monkeypatch.setattr(_run._Training, "advance", timed)


@pytest.mark.parametrize(
  ("compiling", "together", "expected"), [(0.0, 1e-9, 2), (0.0, 1e9, 1), (1e9, 1e-9, 1)]
)
def test_seeds_run_at_once_only_where_that_is_faster(monkeypatch, compiling, together, expected):
  patch_blocks(monkeypatch, lambda losses, alone: together if losses.ndim == 2 else alone)
  compile_method = _run.Method.compile

  def compiled(self, seed):
    compile_method(self, seed)
    self.compile_seconds = compiling

  monkeypatch.setattr(_run.Method, "compile", compiled)
  curves = small({"sgd": optax.sgd(0.05)}, noisy_loss, seeds=3).curves["sgd"]
  assert curves.seeds_at_once == expected
  expected_loss = by_hand(0.05, 2)[0].reshape(3, 2).mean(1)
  np.testing.assert_allclose(curves.loss[2], expected_loss, rtol=1e-5)


def test_seeds_that_do_not_fit_into_memory_at_once_are_trained_one_at_a_time(monkeypatch):
  def short_of_memory(losses, _):
    if losses.ndim == 2:
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    return 1e9

  patch_blocks(monkeypatch, short_of_memory)
  result = small({"sgd": optax.sgd(0.05)}, seeds=4)
  assert result.curves["sgd"].seeds_at_once == 1
  assert result.seeds == (0, 1, 2, 3)


def test_gradient_evaluations_are_counted():
  batches = jax.tree.map(lambda leaf: leaf.reshape(3, 8, *leaf.shape[1:]), DATA)
  methods = {
    "sgd": optax.sgd(0.05),
    "svrg": optax.chain(optax_boost.svrg(None), optax.sgd(0.05)),
    "refreshed": optax.chain(optax_boost.svrg(refresh_every=3), optax.sgd(0.05)),
    "scaled": optax_boost.dynamic_loss_scale(optax.sgd(0.05)),
    "search": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
  }
  full_grad_fn = functools.partial(optax_boost.scan_full_gradient, batches=batches)
  curves = small(methods, seeds=1, full_grad_fn=full_grad_fn).curves
  spent = {name: curves[name].gradient_evaluations.tolist() for name in methods}
  assert spent["sgd"] == spent["scaled"] == [2, 4, 6]
  assert spent["svrg"] == [4, 8, 12]
  # Two at each step; three more, the full pass, on steps 0 and 3.
  assert spent["refreshed"] == [7, 14, 18]
  # A gradient and at least one trial of a third at each step.
  assert (np.diff(spent["search"], prepend=0) >= 2 + 2 / 3 - 1e-9).all()


def test_a_line_search_is_charged_for_its_trials():
  """Halving steps from 1 on a parabola: the number of trials is known."""
  trials = 3

  def parabola(w, batch):
    return 3.9 * jnp.sum(w**2) / 2 + 0 * jnp.sum(batch["y"])  # stable below 2 / 3.9 = 0.51

  tx = optax.chain(
    optax.sgd(1.0),
    optax.scale_by_backtracking_linesearch(
      10, slope_rtol=0.1, increase_factor=math.inf, decrease_factor=0.5
    ),
  )
  curves = small({"search": tx}, parabola, seeds=1, steps=2, points=2).curves["search"]
  # 1 and 0.5 fail (0.5 lowers the loss by too little), 0.25 succeeds; the loss is known from there.
  np.testing.assert_allclose(curves.gradient_evaluations, [1 + trials / 3, 2 + 2 * trials / 3])


def test_what_the_trace_does_not_show_is_counted_by_running(monkeypatch):
  monkeypatch.setattr(_cost, "_BACKWARD", "a name that no equation has")
  assert small({"sgd": optax.sgd(0.05)}).curves["sgd"].gradient_evaluations.tolist() == [2, 4, 6]


def test_only_control_flow_around_the_loss_needs_a_run_to_be_counted():
  counter = _cost.Counter()
  marked = counter.mark(loss_fn)
  w, batch = jnp.ones(3), jax.tree.map(jnp.asarray, DATA)

  def count(function):
    return _cost.traced(jax.make_jaxpr(function)(w))

  value, grad = (lambda w: marked(w, batch)), jax.grad(lambda w: marked(w, batch))
  assert count(value) == (0, 1)
  assert count(grad) == (1, 0)
  assert count(jax.jit(jax.value_and_grad(value))) == (1, 0)
  assert count(jax.checkpoint(grad)) == (1, 0)
  assert count(lambda w: jax.lax.scan(lambda w, _: (w - grad(w), None), w, length=5)[0]) == (5, 0)
  assert count(lambda w: jax.lax.cond(w[0] > 0, grad, lambda w: w, w)) is None
  assert count(lambda w: jax.lax.cond(w[0] > 0, lambda w: -w, lambda w: w, grad(w))) == (1, 0)
  jax.jit(lambda w: jax.lax.cond(w[0] > 0, grad, lambda w: w, w))(w)
  assert counter.take() == (1, 0)
  assert counter.take() == (0, 0)
  assert _cost.Evaluations(2, 3).cost == pytest.approx(3)


def curves_of(loss, evaluations=(1, 2, 3), seconds=(1.0, 2.0, 3.0)):
  return RaceCurves(
    steps=np.array([1, 2, 3]),
    loss=np.array(loss, float),
    metrics={},
    gradient_evaluations=np.array(evaluations, float),
    seconds=np.array(seconds),
    compile_seconds=0.5,
    seeds_at_once=1,
  )


def result_of(complete=True, **curves):
  count = len(next(iter(curves.values())).loss)
  return RaceResult(curves, tuple(range(count)), next(iter(curves)), complete, "cpu")


def test_budgets_are_those_of_the_cheapest_and_curves_are_interpolated_there():
  result = result_of(
    cheap=curves_of([[9, 8, 7], [9, 6, 5]]),
    dear=curves_of([[6, 4, 2], [4, 3, 1]], evaluations=(2, 4, 6), seconds=(1.5, 3.5, 5.0)),
  )
  assert [result.budget(of) for of in _result.BUDGETS] == [3, 3, 3.0]
  loss = _curves.LOSS
  np.testing.assert_allclose(result.values("cheap", loss, "seconds"), [7, 5])
  np.testing.assert_allclose(result.values("dear", loss, "steps"), [2, 1])
  # 3 evaluations lie midway between the points at 2 and 4; 3 s three quarters from 1.5 to 3.5.
  np.testing.assert_allclose(result.values("dear", loss, "gradient_evaluations"), [5, 3.5])
  np.testing.assert_allclose(result.values("dear", loss, "seconds"), [4.5, 3.25])
  mean, half = result.difference("dear", loss, "gradient_evaluations")
  # Differences -2 and -1.5; Student's t for one degree of freedom is 12.706.
  assert mean == -1.75
  assert half == pytest.approx(12.706 * 0.25, rel=1e-4)
  assert result.verdict("dear") == (
    "dear: training loss against cheap: no clear difference (-4.5 ± 6.4) at equal steps;"
    " no clear difference (-1.8 ± 3.2) at equal gradient evaluations;"
    " no clear difference (-2.1 ± 4.8) at equal wall time."
  )


def test_names_do_not_break_the_cells_of_a_table():
  plain, odd = curves_of([[9, 8, 7]]), curves_of([[9, 8, 7]], evaluations=(2, 4, 6))
  table = result_of(**{"a|b": plain, "two\nlines": odd}).table()
  header, rule, *rows = next(part for part in table.split("\n\n") if part[0] == "|").splitlines()
  assert r" against a\|b " in header
  assert [row[:13] for row in rows] == [r"| a\|b      |", "| two lines |"]
  assert {row.replace(r"\|", "").count("|") for row in (header, rule, *rows)} == {5}


def test_a_clear_difference_is_called_higher_or_lower():
  low, high = curves_of([[3, 2, 1], [3, 2, 1.1]]), curves_of([[4, 3, 2], [4, 3, 2.1]])
  assert result_of(high=high, low=low).verdict("high") == "high: the baseline."
  assert "training loss against high: lower by 1 ± " in result_of(high=high, low=low).verdict("low")
  assert "higher by 1 ± " in result_of(low=low, high=high).verdict("high")
  single = result_of(low=curves_of([[3, 2, 1]]), high=curves_of([[4, 3, 2]]))
  assert "higher by 1 with the one seed, which says little" in single.verdict("high")


def test_a_budget_spent_before_the_first_point_is_no_value():
  result = result_of(
    cheap=curves_of([[9, 8, 7]]), dear=curves_of([[1, 1, 1]], evaluations=(10, 20, 30))
  )
  assert np.isnan(result.values("dear", _curves.LOSS, "gradient_evaluations")).all()
  line = result.table().partition("gradient evaluations")[2].partition("| dear")[2].splitlines()[0]
  assert line.split() == ["|", "-", "|", "-", "|", "1", "|"]
  assert "not known at equal gradient evaluations" in result.verdict("dear")


def test_times_that_are_not_known_leave_the_rest_as_it_is():
  nan = math.nan
  result = result_of(a=curves_of([[3, 2, 1]]), b=curves_of([[3, 2, 1]], seconds=(nan, nan, nan)))
  assert "At equal wall time (not known):" in result.table()
  assert "not known at equal wall time" in result.verdict("b")
  steps, _, seconds = result.plot().axes
  assert [len(line.get_xdata()) for line in steps.get_lines()] == [3, 3]
  assert [len(line.get_xdata()) for line in seconds.get_lines()] == [3, 0]


def test_budgets_that_coincide_share_a_table():
  result = result_of(a=curves_of([[3, 2, 1]]), b=curves_of([[3, 2, 1]], seconds=(2, 4, 6)))
  assert "At equal steps and gradient evaluations (3):" in result.table()
  assert "At equal wall time (3 s):" in result.table()


def test_some_diverged_seeds_are_left_out_of_pairs():
  gap, bad = [9, np.nan, 7], [9, np.inf, np.inf]
  result = result_of(a=curves_of([gap, [9, 8, 6], [9, 8, 5]]), b=curves_of([[8, 7, 6]] * 2 + [bad]))
  assert result.curves["a"].diverged.tolist() == [False] * 3
  assert result.curves["b"].diverged.tolist() == [False, False, True]
  assert result.difference("b", _curves.LOSS)[0] == -0.5
  assert "diverged: 1 of 3" in result.table()
  assert result.verdict("b").endswith("diverged on 1 of 3 seeds.")


def test_a_seed_that_diverged_has_no_values_even_where_its_curve_is_finite():
  result = result_of(
    a=curves_of([[3, 2, 1]] * 2, seconds=(1, 2, 2.5)),
    b=curves_of([[3, 2, np.nan], [3, 2, 1]], seconds=(2, 4, 6)),
  )
  # At 2.5 s the first seed's loss was still finite.
  np.testing.assert_allclose(result.values("b", _curves.LOSS, "seconds"), [np.nan, 2.75])
  # A bounded metric stays finite where the loss does not.
  bounded = {"accuracy": np.array([[0.1, 0.2, 0.1], [0.1, 0.5, 0.9]])}
  curves = dataclasses.replace(curves_of([[3, 2, np.inf], [3, 2, 1]]), metrics=bounded)
  assert result_of(a=curves).values("a", "accuracy").tolist()[1:] == [0.9]
  assert np.isnan(result_of(a=curves).values("a", "accuracy")[0])


@pytest.mark.parametrize(
  ("changed", "error", "message"),
  [
    ({"steps": [1, 2, 3]}, TypeError, r"`steps` must be a NumPy array of whole numbers"),
    ({"steps": np.array([1.0, 2, 3])}, TypeError, r"whole numbers with 1 axes; got 'shape \(3,\)"),
    ({"loss": np.ones((0, 3))}, ValueError, r"`loss` must have a row for each seed"),
    ({"loss": np.ones(3)}, TypeError, r"`loss` must be a NumPy array of real numbers with 2 axes"),
    ({"metrics": [1]}, TypeError, r"`metrics` must be a dict of arrays by name; got \[1\]"),
    ({"metrics": {"training loss": np.ones((1, 3))}}, ValueError, r"names other than 'training"),
    ({"metrics": {"a": np.ones((1, 2))}}, ValueError, r"`metrics\['a'\]` must have the shape of"),
    ({"seconds": np.array([1, np.inf, 3])}, ValueError, r"`seconds` must be 3 numbers >= 0"),
    ({"compile_seconds": "1"}, TypeError, r"`compile_seconds` must be a real number"),
    ({"seeds_at_once": 1.0}, TypeError, r"`seeds_at_once` must be a whole number"),
  ],
)
def test_curves_that_do_not_fit_together_are_refused(changed, error, message):
  with pytest.raises(error, match=message):
    dataclasses.replace(curves_of([[3, 2, 1]]), **changed)


def test_a_method_that_always_diverged_sets_no_budget():
  lost = [9, 9, np.nan]
  result = result_of(
    a=curves_of([[3, 2, 1]] * 2, seconds=(2, 4, 6)), b=curves_of([lost] * 2, seconds=(1, 2, 3))
  )
  assert result.budget("seconds") == 6
  assert result_of(a=curves_of([lost])).budget("seconds") == 3
  assert "| a      |             - |" in result_of(a=curves_of([lost])).table()


def test_spreads_are_written_to_their_second_digit():
  assert _text.plus_minus(1.23456, 0.0345) == "1.235 ± 0.035"
  assert _text.plus_minus(97.123, 1.23) == "97.1 ± 1.2"
  assert _text.plus_minus(1234.5, 67.8, sign="+") == "+1234 ± 68"
  assert _text.plus_minus(2.5e-9, 1.1e-10) == "2.500e-09 ± 1.1e-10"
  assert _text.plus_minus(0.5, None) == "0.5"
  assert _text.plus_minus(3.0, 0.0) == "3 ± 0"


def equal(one, other):
  assert one.seeds == other.seeds
  for name, curves in one.curves.items():
    read = other.curves[name]
    jax.tree.map(np.testing.assert_array_equal, vars(curves), vars(read))
  assert one.table() == other.table()


def test_it_is_saved_and_loaded_whole_with_numbers_that_are_not_finite(raced, tmp_path):
  raced.save(tmp_path / "race.json")
  equal(raced, RaceResult.load(tmp_path / "race.json"))
  assert [p.name for p in tmp_path.iterdir()] == ["race.json"]
  json.loads((tmp_path / "race.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("replaced", ["replace", "fsync"])
def test_a_save_that_fails_leaves_the_old_file(raced, tmp_path, monkeypatch, replaced):
  path = tmp_path / "race.json"
  path.write_text("old")

  def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, replaced, full_disk)
  with pytest.raises(OSError, match=r"No space left on device: '.*race\.json'"):
    raced.save(path)
  with pytest.raises(OSError, match=r"No space left on device: '.*race\.png'"):
    raced.plot(path.with_suffix(".png"))
  assert [p.name for p in tmp_path.iterdir()] == ["race.json"]
  assert path.read_text() == "old"


def test_threads_may_save_to_one_file_at_once(raced, tmp_path):
  path = tmp_path / "race.json"
  raced.save(path)
  start = threading.Barrier(8)

  def save(_):
    start.wait()
    for _ in range(5):
      raced.save(path)
      RaceResult.load(path)

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    list(pool.map(save, range(8)))
  equal(raced, RaceResult.load(path))
  assert [p.name for p in tmp_path.iterdir()] == ["race.json"]


def changed_file(path, raced, changes):
  """Saves a race with the values at some paths of its JSON changed, or removed where None."""
  raced.save(path)
  content = json.loads(path.read_text())
  for keys, value in changes.items():
    *parents, last = keys.split("/")
    place = content
    for key in parents:
      place = place[key]
    if value is None:
      place.pop(last)
    else:
      place[last] = value
  path.write_text(json.dumps(content))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"version": 2}, r"`version` must be 1; got 2"),
    ({"version": True}, r"`version` must be 1; got True"),
    ({"baseline": "adam"}, r"`baseline` must be one of 'sgd', 'fast', 'wild'; got 'adam'"),
    ({"baseline": []}, r"`baseline` must be one of .*; got \[\]"),
    ({"curves": {}}, r"`curves` must hold at least one method; got none"),
    ({"curves": []}, r"`curves` must be an object; got \[\]"),
    ({"curves/fast": []}, r"`curves\['fast'\]`: the curves must be an object; got \[\]"),
    ({"curves/fast/steps": []}, r"`steps` must be whole numbers >= 1 that grow"),
    ({"curves/fast/steps": [2, 6, 4]}, r"`steps` must be whole numbers >= 1 that grow"),
    ({"curves/fast/steps": [2.5, 4, 6]}, r"`steps` must be a whole number; got 2.5"),
    ({"curves/fast/steps": [10**300, 4, 6]}, r"`steps` must be <= 2147483647; got 1000"),
    ({"curves/fast/steps": [1, 4, 6]}, r"must have the points and metrics of `curves\['sgd'\]`"),
    ({"curves/fast/loss": []}, r"`loss` must have a row for each seed"),
    ({"curves/fast/loss": [[1, 2, 3]]}, r"metrics\['error'\]` must have the shape of `loss`"),
    ({"curves/fast/loss": [[1, 2], [1], [1, 2]]}, r"rows of one length; got \[2, 1, 2\]"),
    ({"curves/fast/loss": [["1", 2, 3]] * 3}, r"`loss` must hold numbers; got '1'"),
    ({"curves/fast/loss": [[True, 2, 3]] * 3}, r"`loss` must hold numbers; got True"),
    ({"curves/fast/loss": [[10**400, 2, 3]] * 3}, r"`curves\['fast'\]`: int too large"),
    ({"curves/fast/metrics": {}}, r"must have the points and metrics of"),
    ({"curves/fast/seconds": [3, 2, 1]}, r"`seconds` must be 3 numbers >= 0 that do not fall"),
    ({"curves/fast/gradient_evaluations": [1, 2]}, r"`gradient_evaluations` must be 3 numbers"),
    ({"curves/fast/compile_seconds": "inf"}, r"`compile_seconds` must be finite; got inf"),
    ({"curves/fast/seeds_at_once": 0}, r"`seeds_at_once` must be >= 1; got 0"),
    ({"curves/fast/seconds": None}, r"the curves lacks \['seconds'\]"),
    ({"seeds": [0, 1]}, r"must have a row for each of the 2 seeds; got 3"),
    ({"seeds": [0, 1, 1]}, r"`seeds` must differ; got \(0, 1, 1\)"),
    ({"seeds": [0, 1, -1]}, r"`seeds` must be >= 0; got -1"),
    ({"seeds": 3}, r"`seeds` must be a list; got 3"),
    ({"complete": 1}, r"`complete` must be True or False; got 1"),
    ({"device": None}, r"the file lacks \['device'\]"),
    ({"device": 3}, r"`device` must be a string; got 3"),
    ({"steps": 3}, r"the file has \['steps'\], which is unknown"),
  ],
)
def test_a_forged_file_is_refused_by_its_name(raced, tmp_path, changes, message):
  path = tmp_path / "race.json"
  changed_file(path, raced, changes)
  with pytest.raises(
    ValueError, match=rf"needs a file that RaceResult.save wrote; got .*race\.json: .*{message}"
  ):
    RaceResult.load(path)


def test_a_truncated_or_other_file_is_refused_by_its_name(raced, tmp_path):
  path = tmp_path / "race.json"
  raced.save(path)
  text = path.read_text()
  for other in (text[: len(text) // 2], text[:-4], "", "no json", "[1]", "{}", "[" * 100_000):
    path.write_text(other)
    with pytest.raises(ValueError, match=r"race\.json"):
      RaceResult.load(path)
  path.write_bytes(b"\xff\xfe")
  with pytest.raises(ValueError, match=r"race\.json is not valid UTF-8"):
    RaceResult.load(path)
  with pytest.raises(ValueError, match=r"`path` must be a JSON file; got the directory"):
    RaceResult.load(tmp_path)
  with pytest.raises(FileNotFoundError, match=r"none\.json"):
    RaceResult.load(tmp_path / "none.json")
  with pytest.raises(TypeError, match=r"`path` must be a path, as str or os.PathLike; got 3"):
    raced.save(3)


def test_a_file_without_a_version_is_of_the_first(raced, tmp_path):
  changed_file(tmp_path / "race.json", raced, {"version": None})
  equal(raced, RaceResult.load(tmp_path / "race.json"))


def test_the_picture_has_three_panels_with_a_line_for_each_method(raced, tmp_path):
  figure = raced.plot(tmp_path / "race.PNG")
  assert (tmp_path / "race.PNG").read_bytes().startswith(b"\x89PNG")
  assert [axes.get_xlabel().split()[0] for axes in figure.axes] == [
    "training",
    "gradient",
    "seconds",
  ]
  labels = [line.get_label() for line in figure.axes[0].get_lines()]
  assert labels == ["sgd", "fast", "wild (diverged)"]
  curve = figure.axes[0].get_lines()[1].get_data()
  np.testing.assert_allclose(curve[1], raced.rows("fast", "error").mean(0))
  both = raced.plot(quantities=raced.quantities, against=["steps"])
  assert [axes.get_title(loc="left") for axes in both.axes] == [
    "error", "training loss (logarithmic)",
  ]  # fmt: skip
  with pytest.raises(ValueError, match=r"`quantities` must be one of 'error', .*; got 'x'"):
    raced.plot(quantities=["x"])


def test_names_are_shown_as_they_are(raced, tmp_path):
  odd = dict(zip(["$\\frac$", "a$b", "_c"], raced.curves.values(), strict=True))
  figure = dataclasses.replace(raced, curves=odd, baseline="a$b").plot(tmp_path / "race.png")
  shown = [text.get_text().split()[0] for text in figure.axes[0].texts]
  assert sorted(shown) == sorted(odd)


def test_without_matplotlib_it_says_what_to_install(raced, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  with pytest.raises(ImportError, match=r'needs matplotlib. .*`pip install "\.\[race\]"` in a'):
    raced.plot()


def interrupting(monkeypatch, after):
  """Ctrl-C in the block after so many."""
  advance, made = _run._Training.advance, []

  def interrupted(self, *args):
    if len(made) == after:
      raise KeyboardInterrupt
    made.append(1)
    return advance(self, *args)

  monkeypatch.setattr(_run._Training, "advance", interrupted)


METHODS = {"sgd": optax.sgd(0.05), "fast": optax.sgd(0.1)}
WARM_UP = 2 * len(METHODS)


def test_interrupted_in_the_first_seed_it_returns_the_points_that_all_have(monkeypatch):
  whole = small(METHODS, seeds=2, evaluate=error, seeds_at_once=1)
  interrupting(monkeypatch, WARM_UP + 5)
  result = small(METHODS, seeds=2, evaluate=error, seeds_at_once=1)
  assert not result.complete
  assert result.seeds == (0,)
  for name in METHODS:
    assert result.curves[name].steps.tolist() == [2, 4]
    np.testing.assert_array_equal(result.curves[name].loss, whole.curves[name].loss[:1, :2])
    assert np.isfinite(result.curves[name].seconds).all()
  assert "Interrupted: 1 seed of 4 steps is all there is." in result.table()


def test_interrupted_later_it_returns_the_seeds_that_all_have_finished(monkeypatch):
  interrupting(monkeypatch, WARM_UP + 2 * 6 + 3)
  result = small(METHODS, seeds=3, seeds_at_once=1)
  assert (result.seeds, result.complete) == ((0, 1), False)
  assert "Interrupted: 2 seeds of 6 steps" in result.table()


def test_interrupted_before_any_point_there_is_nothing_to_return(monkeypatch):
  interrupting(monkeypatch, WARM_UP)
  with pytest.raises(KeyboardInterrupt):
    small(METHODS)


def test_freezing_runs_alone_and_its_compilations_are_not_timed(monkeypatch):
  train, methods = _run.train, {}
  monkeypatch.setattr(_run, "train", lambda *args: methods.update(args[0]) or train(*args))

  def network(params, batch):
    h = batch["x"] @ params["a"]["kernel"] @ params["b"]["kernel"]
    return jnp.mean((h[:, 0] - batch["y"]) ** 2)

  params = {"a": {"kernel": jnp.eye(3)}, "b": {"kernel": jnp.ones((3, 1))}}
  groups = optax_boost.layer_groups(network, params, DATA, num_groups=2)
  schedule = optax_boost.progressive_freezing(2, 6, first=0.5)
  result = optax_boost.race(
    network,
    lambda key: params,
    DATA,
    {
      "sgd": optax.sgd(0.05),
      "freeze_layers": optax_boost.freeze_layers(optax.sgd(0.05), groups, schedule),
    },
    steps=6,
    seeds=2,
    points=6,
    progress=False,
  )
  curves = result.curves["freeze_layers"]
  assert curves.seeds_at_once == 1
  assert curves.gradient_evaluations.tolist() == [1, 2, 3, 4, 5, 6]
  # The step for the second depth is compiled at step 3, in the first pass alone.
  first, second = methods["freeze_layers"].passes[:2]
  assert np.isnan(first).tolist() == [False, False, False, True, False, False]
  assert np.isfinite(second).all()
  assert np.isfinite(curves.seconds).all()
  assert np.array_equal(curves.loss[:, 0], result.curves["sgd"].loss[:, 0])
  assert not np.allclose(curves.loss[:, -1], result.curves["sgd"].loss[:, -1])


def test_convolutions_run_one_seed_at_a_time_on_a_cpu():
  def convolved(w, batch):
    out = jax.lax.conv(batch[:, None], w[None, None], (1,), "SAME")
    return jnp.mean(out**2)

  result = optax_boost.race(
    convolved,
    lambda key: jax.random.normal(key, (3,)),
    X,
    {"sgd": optax.sgd(0.05)},
    steps=2,
    seeds=3,
    progress=False,
  )
  assert result.curves["sgd"].seeds_at_once == 1


def test_data_may_be_a_function_from_the_seed_to_batches():
  asked = []

  def data(seed):
    asked.append(seed)
    return (jax.tree.map(lambda leaf, i=i: leaf[i : i + 8] + seed, DATA) for i in (0, 8))

  result = optax_boost.race(
    loss_fn, init_fn, data, {"sgd": optax.sgd(0.0)}, steps=4, seeds=[5, 3], progress=False
  )
  assert result.seeds == (5, 3)
  assert set(asked) == {5, 3}
  for row, seed in enumerate(result.seeds):
    batches = list(data(seed))
    w = init_fn(jax.random.key(seed))
    expected = [float(loss_fn(w, batches[i % 2])) for i in range(4)]
    np.testing.assert_allclose(result.curves["sgd"].loss[row], expected, rtol=1e-5)


def test_an_iterator_that_methods_would_share_is_refused():
  endless = itertools.repeat(DATA)
  with pytest.raises(ValueError, match="returned the same iterator twice"):
    optax_boost.race(
      loss_fn, init_fn, lambda seed: endless, {"sgd": optax.sgd(0.1)}, steps=2, progress=False
    )


def test_keys_may_be_among_the_data():
  def noisy(w, batch):
    noise = jax.vmap(jax.random.normal)(batch["key"])
    return loss_fn(w, batch) + 0 * jnp.sum(noise)

  keys = jax.random.split(jax.random.key(0), len(X))
  result = optax_boost.race(
    *(noisy, init_fn, DATA | {"key": keys}, {"sgd": optax.sgd(0.1)}),
    **{"steps": 2, "batch_size": 4, "seeds": 3, "seeds_at_once": 2, "progress": False},
  )
  assert np.all(np.isfinite(result.curves["sgd"].loss))


def test_metrics_that_come_and_go_are_refused_when_they_do():
  turns = itertools.count()

  def evaluate(w):
    return {"error": 0.0, "precision": 0.0} if next(turns) else {"error": 0.0}

  with pytest.raises(ValueError, match=r"same metrics each time; got \['error', 'precision'\]"):
    optax_boost.race(
      *(loss_fn, init_fn, DATA, {"sgd": optax.sgd(0.1)}),
      **{"steps": 3, "seeds": 1, "evaluate": evaluate, "jit_evaluate": False, "progress": False},
    )


def test_a_metric_that_is_not_finite_on_some_seeds_is_said():
  def evaluate(w):
    return jnp.where(jnp.sum(w) < middle, jnp.nan, 1.0)

  middle = np.median([jnp.sum(init_fn(jax.random.key(seed))) for seed in range(4)])
  result = optax_boost.race(
    *(loss_fn, init_fn, DATA, {"still": optax.sgd(0.0), "sgd": optax.sgd(0.0)}),
    **{"steps": 2, "seeds": 4, "evaluate": evaluate, "progress": False},
  )
  lost = int(np.isnan(result.values("sgd", "evaluation", "steps")).sum())
  assert 0 < lost < 4
  assert f"not finite on {lost} of 4 seeds" in result.verdict("sgd", "evaluation")
  assert f"not finite: {lost} |" in result.table()
  assert "not finite" not in result.verdict("sgd", result.quantities[-1])


def shapes_by_seed(seed):
  for _ in range(4):
    yield jax.tree.map(lambda leaf: leaf[: 4 + seed], DATA)


def never_vectorized(w, batch):
  kept = jax.ShapeDtypeStruct((), jnp.float32)
  return loss_fn(w, batch) + jax.pure_callback(np.sum, kept, jax.lax.stop_gradient(w))


@pytest.mark.parametrize(
  ("loss", "data"),
  [(loss_fn, shapes_by_seed), (never_vectorized, DATA)],
  ids=["shapes", "callback"],
)
def test_seeds_that_cannot_be_trained_at_once_are_trained_one_at_a_time(monkeypatch, loss, data):
  monkeypatch.setattr(_run.Method, "_time_to_compile", lambda *_: 0.0)
  result = optax_boost.race(
    loss, init_fn, data, {"sgd": optax.sgd(0.1)}, steps=3, seeds=4, progress=False
  )
  assert result.curves["sgd"].seeds_at_once == 1
  assert np.all(np.isfinite(result.curves["sgd"].loss))


def test_shapes_of_seeds_are_compared_where_they_are_to_be_trained_at_once():
  with pytest.raises(ValueError, match=r"the same shapes; got arrays of .* Pass seeds_at_once=1"):
    optax_boost.race(
      *(loss_fn, init_fn, shapes_by_seed, {"sgd": optax.sgd(0.1)}),
      **{"steps": 3, "seeds": 3, "seeds_at_once": 2, "progress": False},
    )


def test_the_time_to_compile_is_that_of_all_first_programs(monkeypatch):
  times = iter([5.0, 4.0, 1.0, 1.0])
  monkeypatch.setattr(_run._Training, "advance", lambda *_: (np.zeros(1), next(times)))
  sizes = iter([0, 1, 1, 2, 2, 2])
  method = types.SimpleNamespace(_plain=types.SimpleNamespace(cache_size=lambda: next(sizes)))
  training = _run._Training(None, None, None, None)
  assert _run.Method._time_to_compile(method, training) == 7.0


def test_statistics_are_carried_and_evaluated():
  def loss(w, stats, batch):
    return loss_fn(w, batch), stats + 1

  result = optax_boost.race(
    loss,
    lambda key: (init_fn(key), jnp.zeros([])),
    DATA,
    {"sgd": optax.sgd(0.05)},
    steps=3,
    has_model_state=True,
    evaluate=lambda w, stats: stats,
    progress=False,
  )
  assert result.rows("sgd", "evaluation").tolist() == [[1, 2, 3]] * 3


class Network(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(3, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.head = nnx.Linear(3, 1, rngs=rngs)

  def __call__(self, x):
    return self.head(self.dropout(self.norm(x)))[:, 0]


def test_nnx_models_train_as_with_the_nnx_train_step():
  def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

  def held_out(model):
    return {"error": loss(model, DATA)}

  result = optax_boost.nnx.race(
    loss,
    lambda seed: Network(nnx.Rngs(seed)),
    DATA,
    {"sgd": optax.sgd(0.05)},
    steps=3,
    seeds=[4, 7],
    evaluate=held_out,
    progress=False,
  )
  model = Network(nnx.Rngs(7))
  optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(loss)
  rng = np.random.default_rng(7)
  for i in range(3):
    order = rng.permutation(24)
    batch = jax.tree.map(lambda leaf, order=order: leaf[order], DATA)
    value = step(model, optimizer, batch)["loss"]
    np.testing.assert_allclose(result.curves["sgd"].loss[1, i], value, rtol=1e-5)
  model.eval()
  np.testing.assert_allclose(
    result.rows("sgd", "error")[1, -1], held_out(model)["error"], rtol=1e-5
  )


def test_nnx_models_must_have_one_structure():
  with pytest.raises(ValueError, match="models of one structure; that of seed 1 differs"):
    optax_boost.nnx.race(
      lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
      lambda seed: nnx.Linear(3, seed + 1, rngs=nnx.Rngs(seed)),
      DATA,
      {"sgd": optax.sgd(0.05)},
      steps=1,
      seeds=2,
      progress=False,
    )


def test_nnx_models_must_create_their_variables_before_the_race():
  class Lazy(Network):
    def __call__(self, x):
      self.mean = nnx.BatchStat(jnp.mean(x, 0))
      return super().__call__(x)

  with pytest.raises(ValueError, match=r"removes \['batch_stats/mean'\]. Create variables in"):
    optax_boost.nnx.race(
      lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
      lambda seed: Lazy(nnx.Rngs(seed)),
      DATA,
      {"sgd": optax.sgd(0.05)},
      steps=1,
      progress=False,
    )


class Module(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    x = nn.BatchNorm(use_running_average=not train)(x)
    return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))[:, 0]


def test_linen_modules_train_as_with_the_linen_train_step():
  module = Module()

  def loss(model, batch):
    return jnp.mean((model(batch["x"], train=True) - batch["y"]) ** 2)

  def held_out(model):
    return jnp.mean((model(X, train=False) - DATA["y"]) ** 2)

  def init(key):
    return module.init(key, X, train=False)

  result = optax_boost.linen.race(
    module,
    loss,
    init,
    DATA,
    {"sgd": optax.sgd(0.05)},
    steps=2,
    seeds=[4, 7],
    evaluate=held_out,
    progress=False,
  )
  step = optax_boost.linen.make_train_step(module, loss, optax.sgd(0.05))
  state = step.init(init(jax.random.key(7)))
  rng, key = np.random.default_rng(7), jax.random.fold_in(jax.random.key(7), 1)
  for i in range(2):
    order = rng.permutation(24)
    batch = jax.tree.map(lambda leaf, order=order: leaf[order], DATA)
    state, metrics = step(state, batch, key)
    np.testing.assert_allclose(result.curves["sgd"].loss[1, i], metrics["loss"], rtol=1e-5)
  variables = optax_boost.linen.variables(state)
  expected = jnp.mean((module.apply(variables, X, train=False) - DATA["y"]) ** 2)
  np.testing.assert_allclose(result.rows("sgd", "evaluation")[1, -1], expected, rtol=1e-5)


@pytest.mark.parametrize(
  ("changed", "error", "text"),
  [
    ({"transformations": {}}, ValueError, "at least one transformation; got an empty one"),
    ({"transformations": [optax.sgd(1.0)]}, TypeError, "must be a dictionary from names"),
    ({"transformations": {"sgd": optax.sgd}}, TypeError, r"\['sgd'\].* pass the factory instead"),
    ({"transformations": {1: optax.sgd(1.0)}}, TypeError, "strings as names; got 1"),
    ({"baseline": "adam"}, ValueError, "`baseline` must be one of 'sgd'; got 'adam'"),
    ({"steps": 0}, ValueError, "`steps` must be >= 1; got 0"),
    ({"steps": 1.5}, TypeError, "`steps` must be a whole number; got 1.5"),
    ({"points": 0}, ValueError, "`points` must be >= 1"),
    ({"seeds": 0}, ValueError, "`seeds` must be >= 1"),
    ({"seeds": []}, ValueError, "`seeds` must be a number of seeds or a sequence of them"),
    ({"seeds": [1, 1]}, ValueError, r"`seeds` must differ; got \[1, 1\]"),
    ({"seeds": "abc"}, TypeError, "`seeds` must be a whole number"),
    ({"seeds_at_once": 0}, ValueError, "`seeds_at_once` must be >= 1"),
    ({"batch_size": 25}, ValueError, "at most the number of examples, 24; got 25"),
    ({"batch_size": 0}, ValueError, "`batch_size` must be >= 1"),
    ({"data": {}}, ValueError, "got an empty tree"),
    ({"data": {"x": X, "n": 3.0}}, ValueError, "leading axis of examples; got a scalar"),
    (
      {"data": {"x": X, "y": X[:5]}},
      ValueError,
      r"one leading axis of examples; got the lengths \{'x': 24, 'y': 5\}",
    ),
    ({"data": lambda seed: [DATA], "batch_size": 3}, ValueError, "data that is a tree of arrays"),
    ({"data": lambda seed: []}, ValueError, r"data\(0\) gave none"),
    ({"loss_fn": None}, TypeError, "`loss_fn` must be callable, .*; got None"),
    ({"init_fn": 3}, TypeError, "`init_fn` must be callable, .*; got 3"),
    ({"evaluate": 3}, TypeError, "`evaluate` must be callable, .*; got 3"),
    ({"evaluate": lambda w: w}, TypeError, r"scalar or a dictionary of scalars; .* shape \(3,\)"),
    ({"evaluate": lambda w: {"a": "b"}}, TypeError, "for 'a'"),
    ({"evaluate": lambda w: {"training loss": w[0]}}, ValueError, "measures that itself"),
    ({"evaluate": lambda w: {1: w[0]}}, TypeError, "under names that are strings; got 1"),
    ({"evaluate": lambda w: 10**400}, ValueError, "integers that int32 holds; got 1000"),
    ({"evaluate": lambda w: 1j * w[0]}, TypeError, "real numbers; got a complex one for 'eval"),
    ({"init_fn": lambda key: "w.npz"}, TypeError, "`race` needs arrays as leaves; .* 'w.npz'"),
    ({"init_fn": lambda key: None}, ValueError, "needs params to train; .* none for seed 0"),
    ({"init_fn": lambda key: np.arange(3)}, TypeError, "`race` needs floating-point leaves"),
    ({"full_grad_fn": 3}, TypeError, "`full_grad_fn` must be callable; got 3"),
    ({"has_model_state": 1}, TypeError, "`has_model_state` must be True or False; got 1"),
    ({"jit_evaluate": "no"}, TypeError, "`jit_evaluate` must be True or False; got 'no'"),
    ({"progress": None}, TypeError, "`progress` must be True or False; got None"),
    ({"steps": True}, TypeError, "`steps` must be a whole number; got True"),
    ({"steps": 10**400}, ValueError, "`steps` must be <= 2147483647; got 1000"),
    ({"points": float("nan")}, TypeError, "`points` must be a whole number; got nan"),
    ({"seeds": [0.5]}, TypeError, "`seeds` must be a whole number; got 0.5"),
    ({"baseline": []}, TypeError, "`baseline` must be one of 'sgd'; got"),
    ({"data": "train.npz"}, TypeError, "arrays of numbers; got 'train.npz' at ''"),
    ({"data": iter([DATA])}, TypeError, "function from the seed to an iterable of batches.* Pass"),
    (
      {"data": {"x": X, "y": np.array(["a"] * 24)}},
      TypeError,
      "got array(.|\\n)* at 'y'",
    ),
    ({"data": lambda seed: 3}, TypeError, r"data\(0\) returned 3"),
    ({"has_model_state": True}, TypeError, r"must return \(params, model_state\)"),
    ({"loss_fn": lambda w, batch: batch["x"] @ w}, TypeError, "with a scalar loss"),
    ({"loss_fn": lambda w, batch: (w.sum(), w)}, TypeError, "tuple .* `race` takes no aux"),
  ],
)
def test_bad_input_is_refused(changed, error, text):
  arguments = {
    "loss_fn": loss_fn,
    "init_fn": init_fn,
    "data": DATA,
    "transformations": {"sgd": optax.sgd(0.05)},
    "steps": 1,
    "seeds": 1,
    "progress": False,
  }
  with pytest.raises(error, match=text):
    optax_boost.race(**arguments | changed)


def test_an_error_tells_the_method_that_was_trained():
  def update(updates, state, params=None):
    raise RuntimeError("inside bad")

  bad = optax.GradientTransformation(lambda params: (), update)
  with pytest.raises(RuntimeError, match="inside bad") as raised:
    small({"sgd": optax.sgd(0.1), "bad": bad})
  assert "`race` was training with the method 'bad'." in raised.value.__notes__

  def data(seed):
    yield from [DATA] * 4
    raise RuntimeError("the fifth batch")

  with pytest.raises(RuntimeError, match="the fifth batch") as raised:
    optax_boost.race(loss_fn, init_fn, data, {"sgd": optax.sgd(0.1)}, steps=6, progress=False)
  assert raised.value.__notes__ == ["`race` was training with the method 'sgd'."]


def test_seeds_may_be_an_array_of_either_kind():
  for seeds in (np.array([5, 3]), jnp.array([5, 3])):
    assert small({"sgd": optax.sgd(0.1)}, seeds=seeds).seeds == (5, 3)
  with pytest.raises(TypeError, match=r"`seeds` must be a whole number; got 0.5"):
    small({"sgd": optax.sgd(0.1)}, seeds=jnp.array([0.5]))


def test_the_forms_for_flax_refuse_bad_input_by_its_name():
  sgd = {"sgd": optax.sgd(0.1)}
  for make_model, message in (
    (None, "`make_model` must be callable, called as"),
    (lambda seed: 3, r"make_model\(0\) returned 3"),
    (nnx.Linear(3, 1, rngs=nnx.Rngs(0)), r"a function from the seed .*; got a model, Linear"),
  ):
    with pytest.raises(TypeError, match=message):
      optax_boost.nnx.race(loss_fn, make_model, DATA, sgd, steps=1, progress=False)
  with pytest.raises(TypeError, match=r"`wrt` must be an NNX filter, as nnx.Param; got 3"):
    optax_boost.nnx.race(loss_fn, Network, DATA, sgd, steps=1, wrt=3)
  module = Module()
  for changed, error, message in (
    ({"module": 3}, TypeError, "`module` must be a Linen module; got 3"),
    ({"rngs": "dropout"}, TypeError, "`rngs` must be a sequence of names .*; got 'dropout'"),
    ({"init_fn": lambda key: 3}, TypeError, r"`init_fn\(key\)` must be a dict of collections"),
    ({"init_fn": lambda key: {}}, ValueError, r"with a collection 'params'.*; got the keys \[\]"),
  ):
    arguments = {"module": module, "loss_fn": loss_fn, "init_fn": init_fn, "data": DATA}
    with pytest.raises(error, match=message):
      optax_boost.linen.race(
        **arguments | {"transformations": sgd, "steps": 1, "progress": False} | changed
      )


def test_questions_about_unknown_names_are_refused(raced):
  with pytest.raises(TypeError, match=r"`name` must be one of .*; got \['sgd'\]"):
    raced.rows(["sgd"], "error")
  with pytest.raises(TypeError, match="`against` must be a list of names; got 'steps'"):
    raced.plot(against="steps")
  with pytest.raises(ValueError, match=r"`against` must hold at least one of steps, .*; got none"):
    raced.plot(against=[])
  with pytest.raises(ValueError, match=r"`path's suffix` must be one of .*'png'.*; got 'xyz'"):
    raced.plot("race.xyz")
  with pytest.raises(ValueError, match="`name` must be one of 'sgd', 'fast', 'wild'; got 'x'"):
    raced.verdict("x")
  with pytest.raises(ValueError, match="`of` must be one of 'steps', 'gradient_evaluations', 'sec"):
    raced.budget("epochs")
  with pytest.raises(
    ValueError, match="`quantity` must be one of 'error', 'training loss'; got 'loss'"
  ):
    raced.values("sgd", "loss")


@pytest.mark.parametrize(
  ("loss", "expected"),
  [
    (lambda params, batch: 0, False),
    (lambda params, batch, key: 0, True),
    (lambda params, batch, rng=None: 0, True),
    (lambda params, batch, weight=0.5: 0, False),
    (lambda *args: 0, False),
    (functools.partial(lambda params, batch, key: 0), True),
  ],
)
def test_a_loss_is_given_a_key_if_it_asks_for_one(loss, expected):
  assert _api._takes_rng(loss, 2) == expected


def test_the_progress_bar_counts_every_step_of_every_seed(monkeypatch):
  train, made = _run.train, []

  def counted(*args):
    for activity, steps in train(*args):
      made.append((activity, steps))
      yield activity, steps

  monkeypatch.setattr(_run, "train", counted)
  small(METHODS, seeds=3)
  assert sum(steps for _, steps in made) == 2 * 3 * 6
  assert {"compiling sgd", "compiling fast", "seed 0"} <= {activity for activity, _ in made}


def test_the_progress_bar_is_shown_and_closed(monkeypatch, capsys):
  small({"sgd": optax.sgd(0.05)}, seeds=1, progress=True)
  printed = capsys.readouterr().err
  assert "6/6" in printed
  assert "seed 0" in printed or "timing" in printed


def test_times_that_are_not_known_are_filled_in():
  nan, between = math.nan, functools.partial(_run.seconds_per_block, steady=False)
  passes = [[nan, 2.0, 9.0], [1.0, 4.0, nan]]
  np.testing.assert_allclose(between(passes, [], [1, 1, 1]), [1, 3, 9])
  assert between(passes, [], [1, 1, 1, 2])[-1] == pytest.approx(2 * 13 / 3)
  np.testing.assert_allclose(between([[1.0, nan]], [7.0, 8.0], [1, 1]), [1, 8])
  np.testing.assert_allclose(between([[1.0, 5.0]], [], [1, 2], steady=True), [2, 4])
  assert np.isnan(between([], [], [1, 1])).all()
