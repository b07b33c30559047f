"""The demo's command line on a tiny transformer, and what it says of given results."""

import math
import re
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# A rate at which so few steps show.
SIZES = {"LAYERS": 2, "LENGTH": 16, "HELD_OUT": 2, "RATE": 0.012}


@pytest.fixture(scope="module")
def examples(import_example):
  names = ("demo", "_demo_report", "_transformer", "_transformer_training", "_memory")
  return {name: import_example(name) for name in names}


@pytest.fixture
def demo(examples, monkeypatch):
  for name, value in SIZES.items():
    monkeypatch.setattr(examples["demo"], name, value)
  for name, value in {"WIDTH": 8, "HEADS": 2}.items():
    monkeypatch.setattr(examples["_transformer"], name, value)
  return examples["demo"]


@pytest.fixture
def tiny(tmp_path):
  return [f"--out={tmp_path / 'pictures' / 'demo.png'}", "--steps=16", "--tuning-steps=8"]


def files(folder):
  return [path.name for path in folder.rglob("*") if path.is_file()]


def test_it_prints_a_table_and_saves_a_picture(demo, tiny, tmp_path, capsys):
  assert demo.main(tiny) == 0
  captured = capsys.readouterr()
  rows = [line.split() for line in captured.out.splitlines()]
  (plain,) = (row for row in rows if row[:3] == ["from", "scratch", "O0"])
  assert plain[4:7] == ["s", "=", "1.00"]
  assert float(plain[7]) < math.log(128)
  (boosted,) = (row for row in rows if row[:1] == ["O1"] and len(row) == 4)
  assert float(boosted[3]) == pytest.approx(1, abs=0.1)  # the memory of a whole sequence
  (half,) = (row for row in rows if row[:2] == ["last", "half"] and len(row) == 5)
  assert float(half[4]) < 0.95
  (parts,) = (row for row in rows if row[:2] == ["8", "micro-batches"])
  assert float(parts[2]) < 0.5
  (inside,) = (row for row in rows if row[:3] == ["inside", "of", "it"] and len(row) == 4)
  assert float(inside[3]) < 1
  # Which of the two depends on the machine's rounding.
  assert len(re.findall("O1 (got|did not get) to O0's loss", captured.out)) == 1
  assert "Measured on this device, a step takes " in captured.out
  assert "chosen for 600 steps" in captured.out
  assert "memory of a large batch: 100%" in captured.err
  assert files(tmp_path) == ["demo.png"]
  assert (tmp_path / "pictures" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_in_training_leaves_nothing_and_says_so_in_one_line(
  demo, examples, tiny, tmp_path, capsys, monkeypatch
):
  def interrupted(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(examples["_transformer_training"], "train", interrupted)
  assert demo.main(tiny) == 130
  captured = capsys.readouterr()
  assert captured.err.splitlines()[-1] == "demo: interrupted; no picture was written."
  assert "micro-batches" not in captured.out
  assert files(tmp_path) == []


@pytest.mark.parametrize(
  ("argument", "cause"),
  [
    ("--steps=15", "--steps must be at least 16 and below 2**31; got 15"),
    ("--tuning-steps=0", "--tuning-steps must be at least 8"),
    ("--seed=-1", "--seed must be at least 0"),
    ("--seed=one", "argument --seed: invalid int value: 'one'"),
    ("--step=16", "unrecognized arguments: --step=16"),
    ("--out={}/a.jpg", "must end in .png, .pdf, .svg"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(demo, tiny, tmp_path, capsys, argument, cause):
  assert demo.main([*tiny, argument.format(tmp_path)]) == 2
  captured = capsys.readouterr()
  (line,) = captured.err.splitlines()
  assert line.startswith("demo: error: ")
  assert cause in line
  assert captured.out == ""
  assert files(tmp_path) == []


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--misspelt", 2)])
def test_the_search_for_rates_starts_nothing_for_help_or_a_wrong_argument(
  import_example, argument, status
):
  with pytest.raises(SystemExit) as ended:
    import_example("tune_demo").main([argument])
  assert ended.value.code == status


def test_the_rates_are_points_of_the_grids_that_were_searched(import_example, examples):
  demo, tune = examples["demo"], import_example("tune_demo")
  assert demo.RATE in tune.RATES
  assert demo.BATCH_SIZE in tune.SIZES
  assert demo.TUNING_RATES.keys() == demo.WAYS.keys()
  assert set(demo.TUNING_RATES.values()) <= set(tune.TUNING_RATES)


def results(examples, boosted, kept=(16, 256)):
  """Made-up results; `boosted` are the losses of O1, which trained on the lengths `kept`."""
  report = examples["_demo_report"]

  def run(seconds, losses, programs=1, memory=40e6):
    times = seconds * np.arange(1, 5) / 4
    return report.Run(times, times + 2.0 * programs, np.array(losses), programs, memory)

  plain = [3.0, 2.5, 2.2, 2.0]
  return report.Results(
    {"O0": run(20.0, plain), "O1": run(16.0, boosted, programs=4)},
    3.0,
    {
      "all layers": run(5.0, plain),
      "last half": run(2.0, [3.0, 2.5, 2.2, 2.1], memory=30e6),
      "layer-wise decay": run(5.1, [3.0, 2.5, 2.1, 1.95]),
    },
    {"at once": 300e6, "8 micro-batches": 60e6},
    {report.AFTER: report.Memory(50e6, 20e6), report.INSIDE: report.Memory(36e6, 6e6)},
    {16: 0.305, 64: 0.9, 256: 1.0},
    kept,
  )


def titles(figure):
  return " ".join(text.get_text() for axes in figure.axes for text in axes.texts).split("\n")


def test_the_sentences_and_the_picture_say_what_the_curves_say(examples):
  report = examples["_demo_report"]
  found = results(examples, [3.0, 2.4, 2.1, 1.9])
  # Half of the way from 12 to 16 seconds, over 20; by the clock 22 over 22.
  assert report.speedup(found) == pytest.approx(0.7)
  text = report.report(found)
  assert "O1 got to O0's loss of 2.000 in 0.70 of O0's time." in text
  assert "By the clock, with compiling (O0: 1 program, O1: 4) and measuring, in 1.00; a" in text
  assert "a step takes 0.30 on 16 and 0.90 on 64 of its time on 256 characters: O1" in text
  assert "O1\ntrained on sequences of 16, 256." in text
  assert "frozen in 0.40 of the time and\n0.75 of the memory" in text
  assert "to a loss 0.100 higher" in text
  assert "with layer-wise decay to one\n0.050 lower" in text
  assert "8 micro-batches takes 0.20 of the memory" in text
  assert "inside of the backward pass takes 0.30 of the temporary memory" in text
  drawn = titles(report.picture(found))
  assert "in 0.70 of the time" in " ".join(drawn)
  assert "0.20 of the memory" in " ".join(drawn)


def test_the_report_says_so_if_a_level_gains_no_time(examples):
  report = examples["_demo_report"]
  found = results(examples, [3.0, 2.4, 2.1, 2.01], kept=(256,))
  assert report.speedup(found) is None
  text = report.report(found)
  assert "O1 did not get to O0's loss of 2.000: it ended at 2.010, after 0.80 of O0's time" in text
  assert "O1 got" not in text
  assert "O1\nkept sequences whole, as O0 does." in text
  assert "no time on this device" in " ".join(titles(report.picture(found)))
  found = results(examples, [3.0, 2.4, 2.1, 2.01])
  assert "never the same loss" in " ".join(titles(report.picture(found)))


class Clock:
  """In the place of the module `time`: stands still but for what is spent."""

  seconds = 0.0

  def process_time(self):
    return self.seconds

  perf_counter = process_time


class State(NamedTuple):
  params: jax.Array
  opt_state: tuple = ()


class FakeStep:
  """A train step that takes 0.01 seconds, and 0.2 more for each new shape of a batch."""

  def __init__(self, clock):
    self.clock, self.compiled = clock, set()

  def init(self, params):
    return State(params)

  def __call__(self, state, batch):
    if batch.shape not in self.compiled:
      self.clock.seconds += 0.2
      self.compiled.add(batch.shape)
    self.clock.seconds += 0.01
    return state, {}

  def lower(self, state, batch):
    return self

  def compile(self):
    return self

  def memory_analysis(self):
    class Sizes:
      argument_size_in_bytes, output_size_in_bytes, alias_size_in_bytes = 7, 5, 4
      temp_size_in_bytes = 10

    return Sizes


def test_compiling_is_kept_apart_from_the_time_of_the_steps(examples, monkeypatch):
  training, clock = examples["_transformer_training"], Clock()
  monkeypatch.setattr(training, "time", clock)
  monkeypatch.setattr(training, "evaluate", lambda params, held_out: jnp.ones(()))
  feed = [jnp.zeros(1), jnp.zeros(2), jnp.zeros(1), jnp.zeros(2)]
  step = FakeStep(clock)

  def prepare(step, state):
    clock.seconds += 1.0

  _, run = training.train(step, jnp.zeros(1), iter(feed), None, [2, 4], prepare=prepare)
  assert run.programs == 2
  np.testing.assert_allclose(run.seconds, [0.02, 0.04])
  np.testing.assert_allclose(run.clock, [1.42, 1.44])
  assert run.memory == 18
  assert training.step_memory(step) == (18, 10)
  assert len(run.losses) == 2


def test_rotated_queries_and_keys_meet_by_their_distance_alone(examples):
  rng = np.random.default_rng(0)
  q, k = (np.tile(rng.normal(size=(1, 1, 1, 8)), (1, 12, 1, 1)).astype(np.float32) for _ in "qk")
  q, k = examples["_transformer"]._rotate(q), examples["_transformer"]._rotate(k)
  products = np.einsum("bqhs,bkhs->qk", q, k)
  for distance in range(-11, 12):
    diagonal = np.diagonal(products, distance)
    np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)
  assert np.ptp(products[0]) > 0.1


KEEPS = """
import resource, sys
import numpy as np
sys.path.insert(0, "examples")
import _memory
_memory.keep_freed_memory()
def faults():
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def touch():
  np.ones(5_000_000)
touch()
before = faults()
for _ in range(5):
  touch()
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_kept():
  done = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True, check=True)
  # Without, 5 * 40 MB / 4 kB = 50,000.
  assert int(done.stdout) < 500
