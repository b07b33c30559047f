"""`python -m benchmarks.gpu` runs to its end on a CPU, and loses no row of a process given up."""

import re
import runpy
import types

import numpy as np
import pytest

from benchmarks import _process, gpu
from benchmarks.gpu import __main__ as command, parts, trainings
from tests.house import failing


@pytest.mark.parametrize(
  ("failure", "text"),
  [
    ("raises", "ValueError: no more"),
    ("dies", "the process ended with 3"),
    ("hangs", "not done within 1 s"),
  ],
)
def test_items_before_a_failure_come(failure, text):
  found = []
  limit = {"each": 1.0} if failure == "hangs" else {}

  def collect():
    for item in _process.items(failing.two_items, failure, environment={"ITEM": "two"}, **limit):
      found.append(item)

  with pytest.raises(_process.GivenUp, match=text):
    collect()
  # To start takes longer than a second on a busy machine.
  assert found == [1, "two"] or (failure == "hangs" and found == [1, "two"][: len(found)])


ROWS = {
  "frozen": [
    "blocks written out: AdamW",
    "blocks written out: half frozen, freeze_layers",
    "blocks written out: half frozen, optax.partition",
    "in a scan: AdamW",
    "in a scan: half frozen, freeze_layers",
    "in a scan: half frozen, updates set to zero",
  ],
  "backward": ["AdamW, update_in_backward", "AdamW"],
  "windows": ['accumulate(AdamW, 4), "restart"', 'accumulate(AdamW, 4), "drop"'],
  "wrappers": [
    "optax.adam",
    "accumulate(adam, 4)",
    "optax.MultiSteps(adam, 4)",
    "dynamic_loss_scale(adam)",
    "optax.apply_if_finite(adam)",
    "average_params(adam)",
    "adam, then optax.incremental_update",
    "master_weights(adam)",
    "adam in float32, params cast to bfloat16",
  ],
  "lars": ["optax.sgd", "lars", "optax.lars"],
  "sequences": [
    "width 16: 1 sequences of 64, L / 6d 0.67",
    "width 16: 4 sequences of 16, L / 6d 0.17",
  ],
  "resnet50": [
    "O0",
    "first half frozen",
    "O1's and O2's first steps: fewer BatchNorms, centralized",
    "their last steps: the same, first half frozen",
    "O1: the mean of a training, from these",
    "O2: the mean of a training, from these",
  ],
  "dim_reduce": ["1,000 params: optax.sgd", "1,000 params: dim_reduce"],
  "adasum": ["4 replicas of 1,000 params: jnp.mean", "4 replicas of 1,000 params: adasum_reduce"],
  "sgperm": ["optax.adam", "pairs", "laperm(adam)", "rank", "exact, on the device"],
}


def test_all_parts_fit_nine_minutes():
  assert list(gpu.SECONDS) == list(parts.PARTS) == list(ROWS)
  assert sum(gpu.SECONDS.values()) <= 540


SLOW = ("frozen", "wrappers")  # the part of sequences trains a transformer, too


@pytest.mark.parametrize(
  "part", [pytest.param(part, marks=pytest.mark.slow) if part in SLOW else part for part in ROWS]
)
def test_a_part_yields_its_rows(part):
  (_, speed), *rows = parts.run(part, small=True)
  assert [name for name, _ in rows] == ROWS[part]
  for _, record in rows:
    assert record["ms"] > 0
    # Rows of optimizers say how far they are from the time of the bytes that they must move.
    if "over" in record:
      least = record["must move, MB"] / speed["GB/s"]
      np.testing.assert_allclose(
        [record["least, ms"], record["over"] * least], [least, record["ms"]]
      )
  train_steps = ("frozen", "backward", "windows", "sequences", "resnet50")
  assert ("over" in rows[0][1]) == (part not in train_steps)


@pytest.mark.filterwarnings("ignore:'benchmarks.gpu.__main__' found in sys.modules:RuntimeWarning")
def test_the_folder_is_a_command(monkeypatch, capsys):
  monkeypatch.setattr("sys.argv", ["gpu", "--help"])
  with pytest.raises(SystemExit, match="0"):
    runpy.run_module("benchmarks.gpu", run_name="__main__")
  assert "--small" in capsys.readouterr().out


@pytest.mark.parametrize("limit", ["600", "0"])
def test_the_command_writes_its_table_and_says_which_part_was_lost(tmp_path, monkeypatch, limit):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # of the part's process
  command.main(["adasum", "--small", "--out", str(tmp_path), "--limit", limit])
  page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
  assert ("| 4 replicas of 1,000 params: adasum_reduce | " in page) == (limit == "600")
  assert ("| the others | not done within" in page) == (limit == "0")
  assert ("device cpu, a copy moves" in page) == (limit == "600")


def test_transformers_are_trained_at_levels_for_a_share_of_the_time(tmp_path, capsys):
  trainings.main(["sequences", "--small", "--out", str(tmp_path)])
  rows = dict(re.findall(r"\| (.+) \| (.+) \|", capsys.readouterr().out))
  title = "width 16, 64 tokens: "
  assert [name.removeprefix(title) for name in rows] == [
    "O0, batch 4, rate 0.001",
    "O0, batch 2, rate 0.001",
    *(f"a step of {length}" for length in (8, 16, 32, 64)),
    "O1, 0.75 of the time",
    "O2, 0.75 of the time",
    "O0, seed 1",
    "O1, 0.75 of the time, seed 1",
  ]
  # Equal tokens: a batch of half the size makes twice the steps. Losses are below a guess's.
  assert rows[f"{title}O0, batch 4, rate 0.001"].startswith("steps 4, ")
  assert rows[f"{title}O0, batch 2, rate 0.001"].startswith("steps 8, ")
  trained = [cells for name, cells in rows.items() if "a step of" not in name]
  # A level whose lengths save no time, as may be here, is O0, and isn't trained.
  losses = [float(cells.rpartition("loss ")[2]) for cells in trained if "as O0" not in cells]
  assert len(losses) >= 3
  assert all(2 < loss < np.log(256) + 0.1 for loss in losses)
  assert title in (tmp_path / "gpu_sequences.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
  ("prices", "steps"),
  [
    # Of 1,000 steps 71, 143, 286 and 500 have these lengths.
    ({8: 0.1, 16: 0.2, 32: 0.4, 64: 1.0}, 750 / (0.071 * 0.1 + 0.143 * 0.2 + 0.286 * 0.4 + 0.5)),
    ({8: 1.0, 16: 0.97, 32: 0.96, 64: 1.0}, None),
  ],
  ids=["short steps are cheap", "all cost the same"],
)
def test_a_level_gets_as_many_steps_as_its_prices_leave_it(prices, steps):
  made = types.SimpleNamespace(full=64, train=lambda *arguments: arguments)
  found = trainings.at_level(made, 4, 1e-3, 1000, prices, "O1", 0.75, 0)
  if steps is None:
    assert found == {"as O0, lengths": 1}
  else:
    *_, number, schedule = found
    assert number == pytest.approx(steps, rel=0.01)
    assert [schedule(0), schedule(number - 1)] == [8, 64]


def test_a_resnet_is_trained_at_levels_on_images_of_a_file(tmp_path, capsys):
  rng = np.random.default_rng(0)
  labels = rng.integers(0, 10, 48)
  # Each class has its own colour.
  images = np.uint8(25 * labels[:, None, None, None] + rng.integers(0, 25, (48, 8, 8, 3)))
  np.savez(
    tmp_path / "images.npz",
    train_images=images[:32],
    train_labels=labels[:32],
    test_images=images[32:],
    test_labels=labels[32:],
  )
  trainings.main(
    ["images", str(tmp_path / "images.npz"), "--small", "--epochs", "3", "--out", str(tmp_path)]
  )
  rows = dict(re.findall(r"\| (.+) \| (.+) \|", capsys.readouterr().out))
  names = list(rows)
  assert names[:2] == ["O0, rate 0.1", "O0, rate 0.05"]
  assert [name.partition(",")[0] for name in names[2:]] == ["O1", "O2"]
  assert all(cells.startswith("steps 12, seconds ") for cells in rows.values())
  assert all(name in (tmp_path / "gpu_images.md").read_text(encoding="utf-8") for name in names)


def test_augmented_images_are_crops_of_padded_images_or_their_mirrors():
  image = np.random.default_rng(0).integers(0, 256, (1, 5, 5, 3)).astype(np.uint8)
  padded = np.pad(image[0], ((4, 4), (4, 4), (0, 0))) / 127.5 - 1
  crops = [padded[i : i + 5, j : j + 5] for i in range(9) for j in range(9)]
  possible = np.array([*crops, *(crop[:, ::-1] for crop in crops)])
  found = np.concatenate(
    [trainings.augmented(image, np.zeros(16, np.int32), np.int32(seed)) for seed in range(4)]
  )
  distances = np.abs(found[:, None] - possible[None]).max((2, 3, 4))
  assert (distances.min(1) < 1e-5).all()
  assert len(set(distances.argmin(1))) > 20
