"""The race: fair to every method, counted rightly, and honest about what went wrong."""

import dataclasses
import functools
import itertools
import math
import re
import sys

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import optax_boost
from optax_boost import RaceResult
from optax_boost._race import _result, _training
import optax_boost.nnx

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype(np.float32)
DATA = {"x": X, "y": X @ np.array([1.0, -2.0, 0.5], np.float32)}
LOSS = "training loss"
USED_UP = iter(())


def loss_fn(w, batch):
  return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def noisy_loss(w, batch, rng):
  return loss_fn(w + 0.1 * jax.random.normal(rng, w.shape), batch)


def init_fn(key):
  return jax.random.normal(key, (3,))


def error(w):
  return {"error": jnp.mean((X @ w - DATA["y"]) ** 2)}


def small(transformations, loss=loss_fn, **changed):
  options = {"data": DATA, "steps": 6, "batch_size": 8, "seeds": 2, "points": 3, "progress": False}
  return optax_boost.race(loss, init_fn, transformations=transformations, **options | changed)


@pytest.fixture(scope="module")
def raced():
  """SGD, twice as fast SGD, and one that diverges."""
  methods = {"sgd": optax.sgd(0.05), "fast": optax.sgd(0.1), "wild": optax.sgd(1e20)}
  return small(methods, noisy_loss, seeds=3, evaluate=error)


def by_hand(rate, seed, steps=6):
  """SGD in a plain loop: the losses, and the params after each step."""
  w, losses, path = init_fn(jax.random.key(seed)), [], []
  gradient = jax.jit(jax.value_and_grad(noisy_loss))
  rng, key = np.random.default_rng(seed), jax.random.fold_in(jax.random.key(seed), 1)
  order = []
  for t in range(steps):
    if not len(order):
      order = rng.permutation(24)
    chosen, order = order[:8], order[8:]
    batch = jax.tree.map(lambda leaf, chosen=chosen: leaf[chosen], DATA)
    loss, grad = gradient(w, batch, jax.random.fold_in(key, t))
    w = w - rate * grad
    losses.append(float(loss))
    path.append(w)
  return np.array(losses), path


def test_curves_equal_the_curves_of_a_plain_loop_with_the_same_seeds(raced):
  for name, rate in (("sgd", 0.05), ("fast", 0.1)):
    assert raced.spent[name]["steps"].tolist() == [2, 4, 6]
    for row, seed in enumerate(raced.seeds):
      losses, path = by_hand(rate, seed)
      np.testing.assert_allclose(
        raced.curves[name][LOSS][row], losses.reshape(3, 2).mean(1), rtol=1e-5
      )
      expected = [float(error(path[step - 1])["error"]) for step in (2, 4, 6)]
      np.testing.assert_allclose(raced.curves[name]["error"][row], expected, rtol=1e-5)
    assert np.isfinite(raced.spent[name]["seconds"]).all()


def test_a_method_that_diverges_is_reported_and_left_out_of_means(raced):
  assert raced.diverged("wild").all()
  assert not raced.diverged("sgd").any()
  table = raced.table()
  assert table.count("diverged: 3 of 3") == len(raced.quantities)
  assert "nan" not in table
  assert np.isnan(raced.values("wild", "error")).all()
  assert math.isnan(raced.difference("wild", "error")[0])


def test_vmapped_seeds_give_the_curves_of_separate_runs():
  methods = {"sgd": optax.sgd(0.05), "adam": optax.adam(0.1)}
  alone, at_once = (
    small(methods, noisy_loss, seeds=[5, 3, 7], evaluate=error, vmap_seeds=vmap)
    for vmap in (False, True)
  )
  assert at_once.seeds == (5, 3, 7)
  # Trained at once, no seed has a time of its own.
  assert "nan" not in at_once.table()
  assert "equal time" not in at_once.conclusion()
  assert "equal time" in alone.conclusion()
  for name in methods:
    for quantity in (LOSS, "error"):
      np.testing.assert_allclose(
        at_once.curves[name][quantity], alone.curves[name][quantity], rtol=1e-4, atol=1e-6
      )


def test_gradient_evaluations_are_counted():
  batches = jax.tree.map(lambda leaf: leaf.reshape(3, 8, *leaf.shape[1:]), DATA)
  methods = {
    "sgd": optax.sgd(0.05),
    "svrg": optax.chain(optax_boost.svrg(None), optax.sgd(0.05)),
    "refreshed": optax.chain(optax_boost.svrg(refresh_every=3), optax.sgd(0.05)),
    "scaled": optax_boost.dynamic_loss_scale(optax.sgd(0.05)),
    "search": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
  }
  full_grad_fn = functools.partial(optax_boost.full_gradient, stacked=True, batches=batches)
  spent = small(methods, seeds=1, full_grad_fn=full_grad_fn).spent
  counts = {name: spent[name]["gradient_evaluations"].tolist() for name in methods}
  assert counts["sgd"] == counts["scaled"] == [2, 4, 6]
  assert counts["svrg"] == [4, 8, 12]
  # Two at each step; three more, the full pass, on steps 0 and 3.
  assert counts["refreshed"] == [7, 14, 18]
  # A gradient and at least one trial of a third at each step.
  assert (np.diff(counts["search"], prepend=0) >= 2 + 2 / 3 - 1e-9).all()


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
  spent = small({"search": tx}, parabola, seeds=1, steps=2, points=2).spent["search"]
  # 1 and 0.5 fail (0.5 lowers the loss by too little), 0.25 succeeds; the loss is known from there.
  np.testing.assert_allclose(
    spent["gradient_evaluations"], [1 + trials / 3, 2 + 2 * trials / 3], rtol=1e-12
  )


def result_of(complete=True, **methods):
  """A result of curves by hand: the loss, and the budgets spent."""
  curves, spent = {}, {}
  for name, (loss, *budgets) in methods.items():
    curves[name] = {LOSS: np.array(loss, float)}
    evaluations, seconds = [*budgets, (1, 2, 3), (1, 2, 3)][:2]
    spent[name] = {
      "steps": np.array([1, 2, 3]),
      "gradient_evaluations": np.array(evaluations, float),
      "seconds": np.array(seconds, float),
    }
  seeds = tuple(range(len(curves[name][LOSS])))
  return RaceResult(seeds, curves, spent, complete)


def test_the_cheaper_of_a_pair_sets_the_budgets_at_which_curves_are_interpolated():
  result = result_of(
    cheap=([[9, 8, 7], [9, 6, 5]],),
    dear=([[6, 4, 2], [4, 3, 1]], (2, 4, 6), (1.5, 3.5, 5.0)),
  )
  for of in ("steps", "gradient_evaluations", "seconds"):
    assert result.budget("dear", of) == result.budget("cheap", of) == 3
  np.testing.assert_allclose(result.values("cheap", LOSS, "seconds"), [7, 5])
  np.testing.assert_allclose(result.values("dear", LOSS, "steps"), [2, 1])
  # 3 evaluations lie midway between the points at 2 and 4; 3 s three quarters from 1.5 to 3.5.
  np.testing.assert_allclose(result.values("dear", LOSS, "gradient_evaluations"), [5, 3.5])
  np.testing.assert_allclose(result.values("dear", LOSS, "seconds"), [4.5, 3.25])
  mean, half = result.difference("dear", LOSS, "gradient_evaluations")
  # Differences -2 and -1.5; Student's t for one degree of freedom is 12.706.
  assert mean == -1.75
  assert half == pytest.approx(12.706 * 0.25, rel=1e-4)


SLOW, QUICK = ([[9, 8, 7], [9, 6, 5], [9, 7, 6]],), ([[8, 7, 6], [8, 5, 3], [8, 6, 5]],)
CHEAP = ([[9, 8, 9], [9, 8, 8], [9, 9, 9]], (1, 2, 3), (0.5, 1, 1.5))


def test_a_third_method_does_not_change_the_comparison_of_a_pair():
  pair, three = result_of(sgd=SLOW, adam=QUICK), result_of(sgd=SLOW, adam=QUICK, cheap=CHEAP)
  for of in ("steps", "gradient_evaluations", "seconds"):
    assert three.difference("adam", LOSS, of) == pair.difference("adam", LOSS, of)
    np.testing.assert_array_equal(three.values("adam", LOSS, of), pair.values("adam", LOSS, of))
  # At 3 s, where both end, and not at the third's 1.5 s.
  assert three.budget("adam", "seconds") == 3
  assert three.difference("adam", LOSS, "seconds")[0] == pytest.approx(-4 / 3)
  assert three.budget("cheap", "seconds") == 1.5
  # At 1.5 s SGD is midway between its points at 1 s and 2 s.
  expected = np.subtract([9, 8, 9], [8.5, 7.5, 8]).mean()
  assert three.difference("cheap", LOSS, "seconds")[0] == pytest.approx(expected)
  (adam,) = pair.conclusion().splitlines()
  assert three.conclusion().splitlines()[0].split(" (")[0] == adam.split(" (")[0]


def test_a_table_says_at_which_budget_a_pair_is_compared_if_pairs_differ():
  table = result_of(sgd=SLOW, adam=QUICK, cheap=CHEAP).table()
  header, _, sgd, adam, cheap = (
    [cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:7]
  )
  assert header == [
    "method",
    "3 steps",
    "3 gradient evaluations",
    "seconds on one seed",
    "seeds",
  ]
  assert [row[3].partition(" at ")[2] for row in (sgd, adam, cheap)] == ["3", "3", "1.5"]
  assert " at " not in sgd[1] + adam[1] + cheap[1]


def smallest_level(p_values, i):
  """The smallest level at which Holm's step-down procedure rejects a hypothesis, by trying."""

  def rejects(level):
    rejected, order = set(), sorted(range(len(p_values)), key=lambda k: p_values[k])
    for step, k in enumerate(order):
      if p_values[k] > level / (len(p_values) - step) * (1 + 1e-12):
        break
      rejected.add(k)
    return i in rejected

  levels = sorted({min(1.0, n * p) for p in p_values for n in range(1, len(p_values) + 1)} | {1.0})
  return next(level for level in levels if level == 1 or rejects(level))


def test_corrected_p_values_are_the_smallest_levels_at_which_holms_procedure_rejects():
  rng = np.random.default_rng(0)
  cases = [rng.uniform(size=n) ** 3 for n in (1, 2, 3, 5, 8)]
  cases += [[], [0.02, 0.02, 0.02], [0.04, 0.01], [0.0, 1.0, 0.5], [0.03, 0.04]]
  for p_values in cases:
    expected = [smallest_level(p_values, i) for i in range(len(p_values))]
    np.testing.assert_allclose(_result.holm(p_values), expected, rtol=1e-12)


def test_p_values_equal_students_t_test():
  rng = np.random.default_rng(0)
  for n in (2, 3, 10):
    differences = rng.normal(0.5, size=n)
    expected = stats.ttest_1samp(differences, 0).pvalue
    assert _result.p_value(differences) == pytest.approx(expected, rel=1e-10)
  assert _result.p_value(np.zeros(2)) == 1


def test_the_p_value_of_equal_differences_is_the_sign_tests():
  right = np.array([[50, 51], [140, 141], [231, 232], [352, 353]], np.float32)
  percent = np.float32(100) * right / 360
  differences = np.diff(percent.astype(float))[:, 0]
  assert np.ptp(differences[:2]) > 0
  for n in (2, 4):
    expected = stats.binomtest(n, n).pvalue
    assert _result.p_value(differences[:n]) == pytest.approx(expected)
  result = result_of(sgd=([[3, 2, x] for x in (1, 2, 4)],), worse=([[3, 2, x] for x in (2, 3, 5)],))
  assert result.difference("worse", LOSS) == (1, None)
  assert "these 3 seeds can't tell (difference +1, the same in each)" in result.conclusion()


def test_the_conclusion_corrects_for_the_number_of_comparisons_and_says_so():
  rng = np.random.default_rng(1)
  base = [[3, 2, x] for x in rng.normal(size=6)]
  shift = np.array([0.1, 0.6, 0.9, 1.1, 0.2, 0.4])

  def lower_by(differences):
    return ([[3, 2, row[2] - d] for row, d in zip(base, differences, strict=True)],)

  weak = lower_by(shift)
  noise = [lower_by([0.3, -0.3, 0.2, -0.1, 0.4, -0.4][k:] + [0.1] * k) for k in range(3)]
  raw = stats.ttest_1samp(shift, 0).pvalue
  assert 0.0125 < raw < 0.05
  alone = result_of(sgd=(base,), weak=weak)
  assert alone.conclusion().startswith("`weak` against `sgd`, training loss: better by 0.55 (95 %")
  assert "Holm" not in alone.conclusion()
  assert alone.p_values(LOSS)["weak"]["steps"] == pytest.approx(raw)
  methods = {"weak": weak} | {f"noise {k}": rows for k, rows in enumerate(noise)}
  several = result_of(sgd=(base,), **methods)
  first, *others = several.conclusion().splitlines()
  # The smallest of four.
  assert f"p = {4 * raw:.2g} after Holm's correction for 4 comparisons" in first
  assert "these 6 seeds can't tell (difference -0.55, 95 % interval" in first
  assert all("after Holm's correction for 4 comparisons" in line for line in others)
  assert several.p_values(LOSS)["weak"]["seconds"] == pytest.approx(4 * raw)
  # The same differences at all three budgets are one comparison; a dearer method has two.
  dear = result_of(sgd=(base,), weak=(*weak, (1, 2, 3), (2, 4, 6)))
  assert "after Holm's correction for 2 comparisons" in dear.conclusion()
  found = dear.p_values(LOSS)["weak"]
  at_time = dear.values("weak", LOSS, "seconds") - np.array(base)[:, 2]
  late = stats.ttest_1samp(at_time, 0).pvalue
  expected = np.array([smallest_level([raw, late], i) for i in (0, 0, 1)])
  np.testing.assert_allclose(list(found.values()), expected, rtol=1e-9)
  assert dear.p_values(LOSS, ["steps"])["weak"] == {"steps": pytest.approx(raw)}


def test_there_is_no_p_value_of_one_seed_or_of_identical_curves():
  one = result_of(sgd=(HIGH[:1],), adam=(LOW[:1],))
  assert np.isnan(list(one.p_values(LOSS)["adam"].values())).all()
  result = result_of(sgd=(HIGH,), adam=(LOW,), same=(HIGH,))
  assert np.isnan(list(result.p_values(LOSS)["same"].values())).all()
  # An identical method is no comparison by chance, so nothing is corrected for it.
  assert "Holm" not in result.conclusion()


def test_identical_curves_count_as_a_comparison_of_a_method_whose_times_differ():
  # An optimizer against itself, whose clock is late in each seed.
  late = (HIGH, (1, 2, 3), [(2, 3, 4), (1.5, 3, 5), (1.2, 2.5, 3.5)])
  found = result_of(sgd=(HIGH, (1, 2, 3), [(1, 2, 3)] * 3), same=late)
  at_time = found.values("same", LOSS, "seconds") - np.array(HIGH, float)[:, 2]
  late_alone = stats.ttest_1samp(at_time, 0).pvalue
  p_values = found.p_values(LOSS)["same"]
  assert np.isnan([p_values["steps"], p_values["gradient_evaluations"]]).all()
  assert p_values["seconds"] == pytest.approx(min(2 * late_alone, 1))
  assert p_values["seconds"] < 1
  assert found.p_values(LOSS, ["seconds"])["same"]["seconds"] == pytest.approx(late_alone)


def test_a_table_compares_at_each_budget():
  result = result_of(
    sgd=([[9, 8, 7], [9, 6, 5]],), **{"a|b": ([[6, 4, 2], [4, 3, 1]], (2, 4, 6), (2, 4, 6))}
  )
  loss, costs, brackets, conclusion = re.split(r"\n\nCosts:\n\n|\n\n(?=±|`)", result.table())
  title, _, *rows = loss.splitlines()
  assert title == "Training loss, with equal budgets:"
  cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
  assert cells[0] == [
    "method",
    "3 steps",
    "3 gradient evaluations",
    "3 seconds on one seed",
    "seeds",
  ]
  assert cells[2] == ["sgd", *["6 ± 1.4"] * 3, "2"]
  assert cells[3][:3] == [r"a\|b", "1.5 ± 0.71 (-4.5 ± 6.4)", "4.25 ± 1.1 (-1.75 ± 3.2)"]
  assert len({len(row) for row in rows}) == 1
  assert [row.split("|")[-2].strip() for row in costs.splitlines()[2:]] == ["1000 ± 0", "2000 ± 0"]
  assert "the difference to `sgd`, seed by seed, ± half of its 95 % interval" in brackets
  assert conclusion == result.conclusion()


def race_of_times(losses, times):
  """A race of methods with the same `losses` ``(n, m)``, whose steps took `times` ``(n, m)``."""
  steps = np.arange(1, losses.shape[1] + 1)
  spent = {
    name: {"steps": steps, "gradient_evaluations": steps, "seconds": seconds.cumsum(1)}
    for name, seconds in times.items()
  }
  curves = {name: {LOSS: losses} for name in times}
  return RaceResult(tuple(range(len(losses))), curves, spent)


@pytest.mark.parametrize(("seeds", "deviation"), [(2, 0.01), (2, 1.0), (3, 0.3), (5, 1.0)])
def test_an_optimizer_against_itself_is_called_different_in_one_of_twenty_races(seeds, deviation):
  """Two hundred races; another process on the machine makes each block of steps late."""
  rng, different, races = np.random.default_rng(seeds), 0, 200
  for _ in range(races):
    losses = np.geomspace(1, 0.1, 4) * rng.normal(1.0, 0.1, (seeds, 1))
    times = {name: rng.lognormal(0.0, deviation, (seeds, 4)) for name in ("a", "b")}
    conclusion = race_of_times(losses, times).conclusion()
    assert f"identical in all {seeds} seeds at equal steps" in conclusion
    different += "can't tell" not in conclusion
  # At a rate of one in twenty, a binomial count is larger in one of a thousand tests.
  assert different <= stats.binom.isf(1e-3, races, 0.05)


def test_each_seed_of_each_method_has_a_time_of_its_own(monkeypatch):
  ticks = itertools.count()
  monkeypatch.setattr(_training.time, "perf_counter", lambda: float(next(ticks) ** 2))
  result = small({"a": optax.sgd(0.05), "b": optax.sgd(0.05)}, seeds=3)
  seconds = np.concatenate([result.totals(name, "seconds") for name in ("a", "b")])
  assert seconds.shape == (6, 3)
  assert len(set(seconds[:, 0])) == 6


def test_the_error_of_the_clock_hides_no_large_difference():
  rng = np.random.default_rng(0)
  times = {name: mean * rng.normal(1.0, 0.05, (5, 40)) for name, mean in (("a", 1), ("b", 2))}
  losses = np.geomspace(1, 0.1, 40) * rng.normal(1.0, 0.05, (5, 1))
  expected = "identical in all 5 seeds at equal steps and gradient evaluations; worse by"
  assert expected in race_of_times(losses, times).conclusion()


def test_each_seed_is_compared_at_the_smaller_of_its_own_times():
  curves = {"a": [[9, 8, 7], [9, 6, 5]], "b": [[8, 6, 4], [8, 5, 2]]}
  curves = {name: {LOSS: np.array(rows, float)} for name, rows in curves.items()}
  times = {"a": [[1, 2, 3], [2, 4, 6]], "b": [[2, 3, 4], [1, 2, 4]]}
  steps = np.array([1, 2, 3])
  spent = {
    name: {"steps": steps, "gradient_evaluations": steps, "seconds": np.array(rows, float)}
    for name, rows in times.items()
  }
  result = RaceResult((0, 1), curves, spent)
  assert result.ends("b", "seconds").tolist() == [3, 4]
  assert result.budget("b", "seconds") == 3.5
  np.testing.assert_array_equal(result.values("b", LOSS, "seconds"), [6, 2])
  assert result.difference("b", LOSS, "seconds")[0] == ((6 - 7) + (2 - 6)) / 2
  columns = result.to_dict()
  assert columns["seconds"] == [1, 2, 3, 2, 4, 6, 2, 3, 4, 1, 2, 4]


def test_batches_of_several_shapes_put_no_compiling_on_the_clock(monkeypatch):
  """The time of a step is counted in traces of the loss: none is made between two readings."""
  traces = []

  def loss(w, batch):
    traces.append(batch["x"].shape)
    return loss_fn(w, batch)

  def data(seed):
    for size in (8, 6, 8, 4 + seed):
      yield jax.tree.map(lambda leaf, size=size: leaf[:size], DATA)

  monkeypatch.setattr(_training.time, "perf_counter", lambda: float(len(traces)))
  result = small({"sgd": optax.sgd(0.05)}, loss, data=data, batch_size=None, steps=8)
  assert len(set(traces)) == 4
  assert not result.spent["sgd"]["seconds"].any()
  # The steps that compile change no curve.
  for row, seed in enumerate(result.seeds):
    w, losses = init_fn(jax.random.key(seed)), []
    for batch in (*data(seed), *data(seed)):
      value, grad = jax.value_and_grad(loss_fn)(w, batch)
      w, losses = w - 0.05 * grad, [*losses, value]
    np.testing.assert_allclose(result.curves["sgd"][LOSS][row, 0], np.mean(losses[:3]), rtol=1e-5)
    np.testing.assert_allclose(result.curves["sgd"][LOSS][row, -1], np.mean(losses[6:]), rtol=1e-5)


@pytest.mark.parametrize("batch_size", [None, 24])
def test_seeds_that_repeat_a_training_count_once(batch_size):
  """Whole batches in another order, from one start: the losses differ by rounding."""
  methods = {"a": optax.sgd(0.1), "b": optax.sgd(0.101)}
  with pytest.warns(optax_boost.NoEffectWarning, match="3 seeds give only 1 different trainings"):
    result = optax_boost.race(
      loss_fn,
      lambda key: jnp.zeros(3),
      DATA,
      methods,
      **{"steps": 8, "seeds": 3, "batch_size": batch_size, "progress": False},
    )
  assert result.seeds == (0,)
  assert "one seed can't tell" in result.conclusion()


def test_a_method_may_train_with_batches_of_its_own():
  """Batches that a function cuts to the size that it chooses for each step."""
  sizes = (2, 2, 4, 4, 8, 8)

  def first_rows(batch, step):
    return jax.tree.map(lambda leaf: leaf[: sizes[step]], batch)

  result = small({"whole": optax.sgd(0.05), "cut": (optax.sgd(0.05), first_rows)}, points=6)
  for row, seed in enumerate(result.seeds):
    for name, rows in (("whole", [8] * 6), ("cut", sizes)):
      w, rng, losses = init_fn(jax.random.key(seed)), np.random.default_rng(seed), []
      order = np.concatenate([rng.permutation(24) for _ in range(2)])
      for step, size in enumerate(rows):
        chosen = order[8 * step : 8 * step + size]
        batch = jax.tree.map(lambda leaf, chosen=chosen: leaf[chosen], DATA)
        value, grad = jax.value_and_grad(loss_fn)(w, batch)
        w, losses = w - 0.05 * grad, [*losses, value]
      np.testing.assert_allclose(result.curves[name][LOSS][row], losses, rtol=1e-5)


def test_a_level_for_tokens_races_with_the_batches_that_it_cuts():
  tokens = np.random.default_rng(0).integers(0, 8, (16, 65)).astype(np.int32)

  def loss(params, batch):
    # Each token sees those before it in its window.
    x = jnp.cumsum(params["table"][batch[:, :-1]], axis=1)
    logits = jax.nn.standardize(x) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

  def init(key):
    table, out = jax.random.split(key)
    return {"table": jax.random.normal(table, (8, 4)), "out": jax.random.normal(out, (4, 8))}

  steps = 12
  boost = optax_boost.auto_boost("O1", steps, sequence_length=64)
  tx = boost.optimizer(optax.adam(0.1), loss, init(jax.random.key(0)), tokens[:4])
  result = optax_boost.race(
    loss,
    init,
    tokens,
    {"O0": optax.adam(0.1), "O1": (tx, boost.batch)},
    **{"steps": steps, "batch_size": 4, "seeds": 2, "points": steps, "progress": False},
  )
  assert "identical" not in result.conclusion()
  rng, order = np.random.default_rng(1), []
  state, params = tx.init(init(jax.random.key(1))), init(jax.random.key(1))
  for step in range(steps):
    if not len(order):
      order = rng.permutation(16)
    chosen, order = order[:4], order[4:]
    batch = boost.batch(tokens[chosen], step)
    value, grad = jax.value_and_grad(loss)(params, batch)
    updates, state = tx.update(grad, state, params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(result.curves["O1"][LOSS][1, step], value, rtol=1e-4)
  assert boost.batch(tokens[:4], 0).shape[1] < 65


LOW, HIGH = [[3, 2, 1.0], [3, 2, 1.1], [3, 2, 0.9]], [[3, 2, 2.0], [3, 2, 2.1], [3, 2, 2.0]]


def test_the_conclusion_says_which_method_is_better_and_by_how_much():
  better, worse = result_of(sgd=(HIGH,), adam=(LOW,)), result_of(sgd=(LOW,), adam=(HIGH,))
  assert better.conclusion() == (
    "`adam` against `sgd`, training loss: better by 1.03 (95 % interval -1.18 to -0.89 over 3"
    " seeds) at equal steps and gradient evaluations and time."
  )
  assert "worse by 1.03 (95 % interval +0.89 to +1.18 over 3 seeds)" in worse.conclusion()
  # A name that tells no direction gets none.
  curves = {name: {"test score": rows[LOSS], **rows} for name, rows in worse.curves.items()}
  assert "test score: higher by 1.03" in RaceResult((0, 1, 2), curves, worse.spent).conclusion()
  curves = {name: {"test accuracy": rows[LOSS], **rows} for name, rows in worse.curves.items()}
  assert "test accuracy: better by" in RaceResult((0, 1, 2), curves, worse.spent).conclusion()


def test_the_conclusion_says_if_the_seeds_can_not_tell():
  mixed = [[3, 2, 1.0], [3, 2, 2.6], [3, 2, 2.0]]
  slower = ((1, 2, 3), (2, 4, 6))
  result = result_of(sgd=(HIGH,), adam=(mixed, *slower))
  assert "these 3 seeds can't tell (difference -0.167, 95 % interval" in result.conclusion()
  one = result_of(sgd=(HIGH[:1],), adam=(LOW[:1], *slower)).conclusion()
  assert one == (
    "`adam` against `sgd`, training loss: one seed can't tell (difference -1) at equal steps and"
    " gradient evaluations; one seed can't tell (difference +0.5) at equal time."
  )
  assert not result_of(sgd=(HIGH,)).conclusion()


def test_the_conclusion_says_that_curves_are_identical():
  slower = ((1, 2, 3), (2, 4, 6))
  result = result_of(sgd=(HIGH,), same=(HIGH,), slow=(HIGH, *slower))
  same, slow = result.conclusion().splitlines()
  assert same == (
    "`same` against `sgd`, training loss: identical in all 3 seeds at equal steps and gradient"
    " evaluations and time."
  )
  assert "identical in all 3 seeds at equal steps and gradient evaluations; worse by" in slow
  one = result_of(sgd=(HIGH[:1],), same=(HIGH[:1],)).conclusion()
  assert "identical in the one seed at equal steps" in one
  # The same value at the end of other curves is not the same training.
  late = [[4, row[1], row[2]] for row in HIGH]
  assert "can't tell (difference +0," in result_of(sgd=(HIGH,), late=(late,)).conclusion()


def test_the_conclusion_compares_nothing_with_a_method_that_diverged(raced):
  lines = raced.conclusion().splitlines()
  assert len(lines) == 2
  assert lines[1] == (
    "`wild` against `sgd`, error: no comparison, since `wild` diverged on every seed."
  )


def test_a_budget_spent_before_the_first_point_has_no_value():
  result = result_of(cheap=([[9, 8, 7]],), dear=([[1, 1, 1]], (10, 20, 30)))
  assert np.isnan(result.values("dear", LOSS, "gradient_evaluations")).all()
  row = next(line for line in result.table().splitlines() if "dear" in line)
  assert row.split()[1:] == ["dear", "|", "1", "(-6)", "|", "-", "|", "1", "(-6)", "|", "1", "|"]


def test_some_diverged_seeds_are_left_out_of_pairs():
  gap, bad = [9, np.nan, 7], [9, np.inf, np.inf]
  result = result_of(a=([gap, [9, 8, 6], [9, 8, 5]],), b=([[8, 7, 6]] * 2 + [bad],))
  assert result.diverged("a").tolist() == [False] * 3
  assert result.diverged("b").tolist() == [False, False, True]
  assert result.difference("b", LOSS)[0] == -0.5
  assert "diverged: 1 of 3" in result.table()
  lost = [9, 9, np.nan]
  result = result_of(
    a=([[3, 2, 1]] * 2, (1, 2, 3), (2, 4, 6)), b=([lost] * 2, (1, 2, 3), (1, 2, 3))
  )
  # A method that always diverged sets no budget.
  assert result.budget("b", "seconds") == 6
  assert result_of(a=([lost],)).budget("a", "seconds") == 3
  # A seed that diverged has no values even where its curve is finite.
  late = ([[3, 2, np.nan], [3, 2, 1]], (1, 2, 3), (2, 4, 6))
  result = result_of(a=([[3, 2, 1]] * 2, (1, 2, 3), (1, 2, 2.5)), b=late)
  np.testing.assert_allclose(result.values("b", LOSS, "seconds"), [np.nan, 2.75])


def test_columns_have_a_row_for_each_method_seed_and_point(raced):
  columns = raced.to_dict()
  assert list(columns) == [
    *("method", "seed", "steps", "gradient_evaluations", "seconds"),
    *("error", LOSS),
  ]
  assert {len(column) for column in columns.values()} == {3 * 3 * 3}
  rows = list(zip(*columns.values(), strict=True))
  place = rows.index(next(row for row in rows if row[:3] == ("fast", 2, 4)))
  assert columns["error"][place] == raced.curves["fast"]["error"][2, 1]


def test_the_picture_has_a_panel_for_each_quantity_and_budget(raced):
  figure = raced.plot()
  labels = [axes.get_xlabel() for axes in figure.axes]
  assert labels == ["steps = gradient evaluations", "seconds on one seed"]
  names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
  assert names == ["sgd", "fast", "wild (diverged)"]
  curve = figure.axes[0].get_lines()[1].get_data()
  np.testing.assert_allclose(curve[1], raced.curves["fast"]["error"].mean(0))
  both = raced.plot(quantities=raced.quantities, against=["steps"])
  titles = [axes.get_title(loc="left") for axes in both.axes]
  assert titles == ["error", "training loss (logarithmic)"]


def test_only_budgets_that_differ_for_a_method_have_panels_of_their_own():
  dear = ([[6, 4, 2], [4, 3, 1], [4, 3, 1]], (2, 4, 6), (1.5, 3.5, 5.0))
  labels = [axes.get_xlabel() for axes in result_of(sgd=SLOW, dear=dear).plot().axes]
  assert labels == ["steps", "gradient evaluations", "seconds on one seed"]


def test_the_legend_says_what_shades_and_dotted_lines_are():
  def marks(result, **kwargs):
    return [t.get_text() for legend in result.plot(**kwargs).legends for t in legend.get_texts()]

  raced = result_of(sgd=SLOW, cheap=CHEAP)
  shade, dotted = marks(raced)
  assert shade == "one standard deviation over seeds"
  assert dotted == "here a method is compared with the first: the cheaper of them ends"
  assert marks(raced, against=["steps"]) == [shade]
  alone = {"sgd": (SLOW[0][:1],), "adam": (QUICK[0][:1],)}
  assert marks(result_of(**alone), against=["steps"]) == []


def test_dotted_lines_mark_where_the_cheaper_of_each_pair_ends():
  axes = result_of(sgd=SLOW, adam=QUICK, cheap=CHEAP).plot().figure.axes[1]
  curves = {line.get_label(): line.get_color() for line in axes.get_lines()}
  dotted = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
  ends = {line.get_xdata()[0]: line.get_color() for line in dotted}
  assert ends == {3: curves["sgd"], 1.5: curves["cheap"]}


@pytest.mark.parametrize("last", [1e-8, 0.01, 0.4])
def test_the_labels_of_a_logarithmic_loss_are_not_crowded(raced, last):
  from matplotlib.backends.backend_agg import FigureCanvasAgg

  loss = np.geomspace(0.5, last, 8)[None]
  curves = {name: {"loss": loss, "training loss": loss} for name in raced.curves}
  spent = {of: np.linspace(1, 40_000, 8) for of in ("steps", "gradient_evaluations", "seconds")}
  figure = dataclasses.replace(raced, curves=curves, spent=dict.fromkeys(curves, spent)).plot()
  FigureCanvasAgg(figure).draw()
  for axes in figure.axes:
    low, high = axes.get_ylim()
    labels = [label for label in axes.get_yticklabels(which="both") if label.get_text()]
    labels = [label for label in labels if low <= label.get_position()[1] <= high]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert len(boxes) >= 2
    assert all(box.y1 + box.height / 2 < above.y0 for box, above in itertools.pairwise(boxes))


def test_an_error_without_matplotlib_names_the_package_to_install(raced, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  with pytest.raises(ImportError, match=r'needs matplotlib. .*`pip install "\.\[race\]"` in a'):
    raced.plot()


AVERAGING = {
  "start": optax_boost.average_params(optax.sgd(0.1), start=2),
  "inside": optax_boost.accumulate(optax_boost.average_params(optax.sgd(0.1), decay=0.5), 2),
  "schedule-free": optax.contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.5),
}


@functools.cache
def trained(name):
  """The states of three seeds after six steps on all of the data."""
  step = optax_boost.make_train_step(loss_fn, {"sgd": optax.sgd(0.1), **AVERAGING}[name])
  states = [step.init(init_fn(jax.random.key(seed))) for seed in range(3)]
  for _ in range(6):
    states = [step(state, DATA)[0] for state in states]
  return states


@pytest.mark.parametrize("vmap", [False, True])
def test_a_method_that_keeps_an_average_is_evaluated_at_it(vmap):
  methods = {"sgd": optax.sgd(0.1), **AVERAGING}
  result = small(methods, batch_size=None, seeds=3, evaluate=error, vmap_seeds=vmap)
  assert result.averaged == tuple(AVERAGING)
  assert "not at the last ones: `start`, `inside`, `schedule-free`." in result.table()
  for name in methods:
    for seed, state in enumerate(trained(name)):
      expected = state.params
      if name == "schedule-free":
        expected = optax.contrib.schedule_free_eval_params(state.opt_state, state.params)
      elif name != "sgd":
        expected = optax_boost.averaged_params(state.opt_state, state.params)
        assert not np.allclose(error(expected)["error"], error(state.params)["error"], rtol=1e-2)
      np.testing.assert_allclose(
        result.curves[name]["error"][seed, -1], error(expected)["error"], rtol=1e-4
      )
  # The training loss is of the params that train.
  losses = {name: curves[LOSS] for name, curves in result.curves.items()}
  np.testing.assert_allclose(losses["start"], losses["sgd"], rtol=1e-5)
  unmeasured = small({"sgd": optax.sgd(0.1), "start": AVERAGING["start"]}, seeds=1)
  assert not unmeasured.averaged
  assert "identical in the one seed at equal steps" in unmeasured.conclusion()


METHODS = {"sgd": optax.sgd(0.05), "fast": optax.sgd(0.1)}


def interrupted_in(evaluation):
  """Ctrl-C in an evaluation; there are three for a seed of a method."""
  turns = itertools.count()

  def evaluate(w):
    if next(turns) == evaluation:
      raise KeyboardInterrupt
    return error(w)

  return small(METHODS, seeds=3, evaluate=evaluate, vmap_seeds=False)


def test_an_interrupted_race_returns_the_seeds_that_all_methods_finished():
  result = interrupted_in(2 * 3 + 2 * 3 + 4)
  assert (result.seeds, result.complete) == ((0, 1), False)
  assert "Interrupted: of the seeds only (0, 1) are there." in result.table()
  # Before all have finished a seed there is nothing to return.
  with pytest.raises(KeyboardInterrupt):
    interrupted_in(2 * 3 - 1)


@pytest.mark.parametrize("vmap", [False, True])
def test_methods_that_freeze_layers_train_one_seed_at_a_time(vmap):
  def network(params, batch):
    h = batch["x"] @ params["a"]["kernel"] @ params["b"]["kernel"]
    return jnp.mean((h[:, 0] - batch["y"]) ** 2)

  params = {"a": {"kernel": jnp.eye(3)}, "b": {"kernel": jnp.ones((3, 1))}}
  groups = optax_boost.layer_groups(params, ["a", "b"])
  schedule = optax_boost.progressive_freezing(2, 6, first=0.5)
  frozen = optax_boost.freeze_layers(optax.sgd(0.05), groups, schedule)
  result = optax_boost.race(
    network,
    lambda key: params,
    DATA,
    {"sgd": optax.sgd(0.05), "freeze_layers": frozen},
    batch_size=8,
    vmap_seeds=vmap,
    **{"steps": 6, "seeds": 2, "points": 6, "progress": False},
  )
  spent = result.spent["freeze_layers"]
  assert spent["gradient_evaluations"].tolist() == [1, 2, 3, 4, 5, 6]
  assert np.isnan(spent["seconds"]).all() == vmap
  losses = {name: curves[LOSS] for name, curves in result.curves.items()}
  np.testing.assert_allclose(losses["freeze_layers"][:, 0], losses["sgd"][:, 0], rtol=1e-6)
  assert not np.allclose(losses["freeze_layers"][:, -1], losses["sgd"][:, -1])


def test_data_may_be_a_function_from_the_seed_to_batches():
  def data(seed):
    return (jax.tree.map(lambda leaf, i=i: leaf[i : i + 8] + seed, DATA) for i in (0, 8))

  still = {"still": optax.sgd(0.0)}
  result = small(still, data=data, batch_size=None, steps=4, points=4, seeds=np.array([5, 3]))
  assert result.seeds == (5, 3)
  for row, seed in enumerate(result.seeds):
    batches = list(data(seed))
    w = init_fn(jax.random.key(seed))
    expected = [float(loss_fn(w, batches[i % 2])) for i in range(4)]
    np.testing.assert_allclose(result.curves["still"][LOSS][row], expected, rtol=1e-5)


class Network(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(3, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.head = nnx.Linear(3, 1, rngs=rngs)

  def __call__(self, x):
    return self.head(self.dropout(self.norm(x)))[:, 0]


def model_loss(model, batch):
  return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def held_out(model, batch):
  model.eval()
  return model_loss(model, batch)


def test_the_pure_loss_of_a_model_trains_as_its_train_step():
  def make(key):
    return Network(nnx.Rngs(key))

  loss, *_ = optax_boost.nnx.split_loss(model_loss, make(0))
  measure, *_ = optax_boost.nnx.split_loss(held_out, make(0))
  result = optax_boost.race(
    loss,
    lambda key: optax_boost.nnx.split_loss(model_loss, make(key))[1:],
    DATA,
    {"sgd": optax.sgd(0.05)},
    **{"steps": 2, "seeds": [4, 7], "has_model_state": True, "progress": False},
    evaluate=lambda params, state: measure(params, state, DATA)[0],
  )
  rng = np.random.default_rng(7)
  model = make(jax.random.key(7))
  optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(model_loss)
  losses = []
  for _ in range(2):
    order = rng.permutation(24)
    batch = jax.tree.map(lambda leaf, order=order: leaf[order], DATA)
    losses.append(step(model, optimizer, batch)["loss"])
  np.testing.assert_allclose(result.curves["sgd"][LOSS][1], losses, rtol=1e-5)
  expected = held_out(model, DATA)
  np.testing.assert_allclose(result.curves["sgd"]["evaluation"][1, -1], expected, rtol=1e-5)


def test_an_evaluation_may_estimate_the_statistics_of_an_average():
  def make(key):
    return Network(nnx.Rngs(key))

  def estimated(model, batch):
    model = optax_boost.nnx.estimate_batch_stats(model, [DATA["x"]])
    return held_out(model, batch)

  loss, *_ = optax_boost.nnx.split_loss(model_loss, make(0))
  measure, *_ = optax_boost.nnx.split_loss(estimated, make(0))
  tx = optax_boost.average_params(optax.sgd(0.1), start=1)
  result = optax_boost.race(
    loss,
    lambda key: optax_boost.nnx.split_loss(model_loss, make(key))[1:],
    DATA,
    {"average": tx},
    **{"steps": 4, "seeds": [4], "has_model_state": True, "progress": False},
    evaluate=lambda params, state: measure(params, state, DATA)[0],
  )
  model = make(jax.random.key(4))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(model_loss)
  rng = np.random.default_rng(4)
  for _ in range(4):
    order = rng.permutation(24)
    step(model, optimizer, jax.tree.map(lambda leaf, order=order: leaf[order], DATA))
  average = optax_boost.nnx.averaged_model(optimizer, model)
  expected, stale = estimated(average, DATA), held_out(average, DATA)
  assert not np.allclose(expected, stale, rtol=1e-2)
  np.testing.assert_allclose(result.curves["average"]["evaluation"][0, -1], expected, rtol=1e-4)


@pytest.mark.parametrize("vmap", [False, True])
def test_statistics_that_an_optimizer_averages_are_evaluated_as_averages(vmap):
  def loss(params, statistics, batch):
    return loss_fn(params, batch), {"sum": statistics["sum"] + 1}

  statistics = {"sum": jnp.zeros([])}
  average = {"params": optax_boost.average_params(optax.sgd(0.1), start=0)}
  average["both"] = optax_boost.average_params(optax.sgd(0.1), start=0, model_state=statistics)
  result = optax_boost.race(
    loss,
    lambda key: (init_fn(key), statistics),
    DATA,
    average,
    **{"steps": 4, "seeds": 3, "has_model_state": True, "progress": False, "points": 1},
    evaluate=lambda params, model_state: model_state["sum"],
    vmap_seeds=vmap,
  )
  ends = {name: curves["evaluation"][:, -1].tolist() for name, curves in result.curves.items()}
  assert ends == {"params": [4.0] * 3, "both": [(1 + 2 + 3 + 4) / 4] * 3}


def test_the_pure_loss_of_an_nnx_model_keeps_its_variables():
  class Lazy(Network):
    def __call__(self, x):
      self.mean = nnx.BatchStat(jnp.mean(x, 0))
      return super().__call__(x)

  loss, *state = optax_boost.nnx.split_loss(lambda model, x: jnp.mean(model(x)), Lazy(nnx.Rngs(0)))
  with pytest.raises(ValueError, match=r"removes \['batch_stats/mean'\]. Create variables in"):
    loss(*state, X)


def metrics_that_change():
  turns = itertools.count()
  return lambda w: {"error": 0.0} | ({"precision": 0.0} if next(turns) else {})


@pytest.mark.parametrize(
  ("changed", "error", "text"),
  [
    ({"transformations": {}}, TypeError, r"names to transformations, at least one; got \{\}"),
    ({"transformations": {"O1": (optax.sgd(0.1), 3)}}, TypeError, r"\['O1'\]\[1\]` .*batch, step"),
    ({"transformations": {"sgd": optax.sgd}}, TypeError, r"\['sgd'\].* pass the factory instead"),
    ({"seeds": [1, 1]}, ValueError, r"`seeds` must be different numbers, .*; got \[1, 1\]"),
    ({"seeds": [0.5]}, TypeError, "`seeds` must be a whole number; got 0.5"),
    ({"batch_size": 25}, ValueError, "at most the number of examples, 24; got 25"),
    ({"data": {"x": X, "n": 3.0}}, ValueError, r"got arrays of the shapes \[\(\), \(24, 3\)\]"),
    ({"data": {"x": X, "y": X[:5]}}, ValueError, r"shapes \[\(24, 3\), \(5, 3\)\]"),
    ({"data": iter([DATA])}, ValueError, r"function from the seed to an iterable.*loader"),
    ({"data": lambda seed: [DATA], "batch_size": 3}, ValueError, "None if `data` is a function"),
    (
      {"data": lambda seed: DATA},
      TypeError,
      r"`data\(0\)` must be an iterable of batches; got \{",
    ),
    ({"data": lambda seed: X}, TypeError, r"`data\(0\)` must be .* an array of shape \(24, 3\)"),
    ({"data": lambda seed: [DATA | {"id": "a"}]}, TypeError, "`batch` must hold .*'id' is 'a'"),
    ({"data": lambda seed: USED_UP}, ValueError, r"data\(0\) gave none"),
    (
      {"evaluate": metrics_that_change()},
      ValueError,
      r"same metrics each time; got \['error', 'pre",
    ),
    ({"evaluate": lambda w: w}, TypeError, r"a real number or a dictionary of them.*Take the mean"),
    ({"evaluate": lambda w: {LOSS: w[0]}}, ValueError, "'training loss'.* Call it 'test training"),
    ({"evaluate": lambda w: {"steps": w[0]}}, ValueError, "name a metric 'steps'.*'gradient_eval"),
    ({"evaluate": lambda w: {"method": 1.0}}, ValueError, "name a metric 'method'.* are columns"),
    ({"evaluate": lambda w: 1j * w[0]}, TypeError, "for 'evaluation'"),
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
  }
  with pytest.raises(error, match=text):
    optax_boost.race(**arguments | {"steps": 2, "seeds": 1, "progress": False} | changed)


def test_an_error_names_the_method_that_was_trained():
  def update(updates, state, params=None):
    raise RuntimeError("inside bad")

  bad = optax.GradientTransformation(lambda params: (), update)
  with pytest.raises(RuntimeError, match="inside bad") as raised:
    small({"sgd": optax.sgd(0.1), "bad": bad})
  assert "`race` was training with the method 'bad'." in raised.value.__notes__


def test_questions_about_unknown_names_are_refused(raced):
  for ask in (
    lambda: raced.values("x", LOSS),
    lambda: raced.budget("x", "steps"),
    lambda: raced.budget("sgd", "x"),
    lambda: raced.p_values("x"),
    lambda: raced.p_values(LOSS, ["x"]),
    lambda: raced.values("sgd", "x"),
    lambda: raced.plot(quantities=["x"]),
  ):
    with pytest.raises(
      ValueError, match=r"`(name|of|budgets|quantit\w+)` must be one of '.*; got 'x'"
    ):
      ask()


def test_the_progress_bar_counts_the_parts(capsys):
  small({"sgd": optax.sgd(0.05)}, seeds=2, progress=True)
  assert "4/4" in capsys.readouterr().err
