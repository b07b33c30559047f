"""The command line of `make demo-large-batch`, in process on tiny images."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from optax_boost import RaceResult


@pytest.fixture(scope="module")
def examples(import_example):
  names = ("large_batch", "_data", "_methods", "_pictures", "_report", "_training")
  return {name: import_example(name) for name in names}


@pytest.fixture(scope="module")
def large_batch(examples):
  return examples["large_batch"]


def arrays(**replaced):
  rng = np.random.default_rng(0)
  return {
    "train_images": rng.integers(0, 256, (20, 4, 5), np.uint8),
    "train_labels": np.arange(20) % 3,
    "test_images": rng.integers(0, 256, (7, 4, 5), np.uint8),
    "test_labels": np.arange(7) % 3,
  } | replaced


@pytest.fixture
def out(tmp_path):
  return tmp_path / "pictures" / "curves.png"


@pytest.fixture
def data(tmp_path):
  path = tmp_path / "images.npz"
  np.savez(path, **arrays())
  return path


@pytest.fixture
def tiny(data, out):
  return [
    f"--data={data}", f"--out={out}", "--methods=sgd,lars", "--batch-size=8", "--epochs=2",
    "--seeds=2", "--seed=3",
  ]  # fmt: skip


def files(folder):
  return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_it_prints_a_table_and_saves_a_picture(large_batch, tiny, tmp_path, out, capsys):
  assert large_batch.main(tiny) == 0
  printed, picture = capsys.readouterr().out, out.read_bytes()
  assert "20 training and 7 test images of 4 x 5 x 1, 3 classes" in printed
  assert "4 steps (epochs: 2) in batches of 8, seeds 3 to 4" in printed
  number = r"[\d.]+ ± [\d.]+"
  assert re.search(rf"^sgd +{number} +{number}% +- +\d+ +[\d.]+ +2$", printed, re.MULTILINE)
  lars = rf"^lars +{number} +{number}% +[+-]{number} +\S+ +[\d.]+ +2$"
  assert re.search(lars, printed, re.MULTILINE)
  assert "What it bought, compared with sgd" in printed
  assert "Here others may be better" in printed
  assert picture.startswith(b"\x89PNG")
  assert len(picture) > 10_000
  assert files(tmp_path) == ["images.npz", "pictures/curves.png"]


def test_ctrl_c_in_training_leaves_nothing_and_says_so_in_one_line(
  large_batch, examples, tiny, tmp_path, capsys, monkeypatch
):
  def interrupted(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(examples["_training"], "accuracy", interrupted)
  assert large_batch.main(tiny) == 130
  captured = capsys.readouterr()
  assert captured.err.splitlines()[-1] == "large_batch: interrupted; no picture was written."
  assert "test accuracy" not in captured.out
  assert files(tmp_path) == ["images.npz"]


def test_ctrl_c_while_the_picture_is_written_leaves_the_old_one(examples, tmp_path):
  class Figure:
    def savefig(self, path, **_):
      pathlib.Path(path).write_bytes(b"half")
      raise KeyboardInterrupt

  picture = tmp_path / "curves.png"
  picture.write_bytes(b"old")
  with pytest.raises(KeyboardInterrupt):
    examples["_pictures"].save(Figure(), picture)
  assert files(tmp_path) == ["curves.png"]
  assert picture.read_bytes() == b"old"


@pytest.mark.parametrize("batch_size", [3, 7, 100])
def test_the_last_batch_of_an_evaluation_counts_by_its_images(examples, batch_size):
  class Model:
    """Answers with the first pixel."""

    def __call__(self, images):
      return jnp.eye(3)[images[:, 0, 0, 0].astype(int)]

    def eval(self):
      pass

  answers, labels = np.array([0, 1, 2, 0, 1, 2, 0]), np.array([0, 1, 2, 0, 0, 0, 0])
  part = examples["_data"].Part(answers.reshape(7, 1, 1, 1), labels)
  accuracy = examples["_training"].accuracy(Model(), part, batch_size)
  assert float(accuracy) == pytest.approx(500 / 7)


def cut_short(path):
  path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
  ("argument", "replaced", "cause"),
  [
    ("--methods=sgd,adam", {}, "unknown method 'adam'; choose from sgd, centralize, lars"),
    ("--methods=sgd,sgd", {}, "twice"),
    ("--epochs=many", {}, "--epochs: invalid int value: 'many'"),
    ("--batch-size=21", {}, "--batch-size 21 is more than the 20 training images"),
    ("--seed=9999999999", {}, "below 2**31; got 9999999999"),
    ("--sed=1", {}, "unrecognized arguments: --sed=1"),
    ("--out={}/images.npz/a.png", {}, "images.npz is not a folder"),
    (f"--out={{}}/{'x' * 300}.png", {}, "File name too long"),
    ("", {"train_images": None}, "lacks train_images; it must hold train_images, train_labels,"),
    ("", {"train_images": np.ones((0, 4, 5))}, "not empty; got (0, 4, 5)"),
    ("", {"train_images": np.full((20, 4, 5), np.nan)}, "not finite"),
    ("", {"train_images": np.ones((20, 4, 5))}, "the pixels of train_images must differ"),
    ("", {"test_images": np.ones((7, 5, 4))}, "(4, 5, 1) but test_images of (5, 4, 1)"),
    ("", {"train_labels": np.arange(19)}, "there are 20 train_images but 19 train_labels"),
    ("", {"test_labels": np.arange(7) - 1}, "test_labels must not be negative; got -1"),
    ("", {"test_labels": np.arange(7)}, "test_labels has the class 6, train_labels none above 2"),
    ("", cut_short, "is not a readable npz file"),
    ("", pathlib.Path.unlink, "images.npz: No such file or directory"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(
  large_batch, tiny, tmp_path, data, capsys, argument, replaced, cause
):
  if callable(replaced):
    replaced(data)
  else:
    kept = {key: value for key, value in arrays(**replaced).items() if value is not None}
    np.savez(data, **kept)
  before = files(tmp_path)
  assert large_batch.main([*tiny, *filter(None, [argument.format(tmp_path)])]) == 2
  captured = capsys.readouterr()
  (line,) = captured.err.splitlines()
  assert line.startswith("large_batch: error: ")
  assert cause in line
  assert captured.out == ""
  assert files(tmp_path) == before


def test_every_method_is_built_from_chosen_values_of_its_grid(examples):
  params = {"kernel": jnp.ones((2, 3))}
  for method in examples["_methods"].METHODS.values():
    assert method.chosen.keys() == method.grid.keys()
    assert all(value in method.grid[name] for name, value in method.chosen.items())
    tx = method.make(10, **method.chosen)
    tx.update(params, tx.init(params), params)


def test_colour_and_float_images_are_read(examples, tmp_path):
  rng = np.random.default_rng(0)
  train, test = rng.random((20, 4, 5, 3)), rng.random((7, 4, 5, 3))
  np.savez(tmp_path / "colour.npz", **arrays(train_images=train, test_images=test))
  data = examples["_data"].from_npz(str(tmp_path / "colour.npz"))
  assert (data.name, data.classes, data.test.images.dtype) == ("colour.npz", 3, np.float32)
  expected = (test - train.mean()) / train.std()
  np.testing.assert_allclose(data.test.images, expected, rtol=1e-4, atol=1e-5)


def test_each_epoch_is_shuffled_and_has_every_image_once(examples):
  part = examples["_data"].Part(np.zeros((10, 1, 1, 1)), np.arange(10))
  feed = [batch["labels"] for batch in examples["_data"].batches(part, 5, epochs=2, seed=0)]
  assert [len(labels) for labels in feed] == [5, 5, 5, 5]
  first, second = np.concatenate(feed[:2]), np.concatenate(feed[2:])
  assert sorted(first) == sorted(second) == list(range(10))
  assert list(first) != list(second)


def test_the_report_compares_with_the_baseline_seed_by_seed(examples):
  Report = examples["_report"].Report

  def result(**finals):
    steps = np.array([1, 2, 3])
    curves, spent = {}, {}
    for name, ends in finals.items():
      loss = np.ones((len(ends), 3))
      loss[np.isnan(ends), -1] = np.nan
      accuracy = np.array([[10, end, end] for end in ends])
      curves[name] = {"test accuracy": accuracy, "training loss": loss}
      seconds = np.ones((len(ends), 3))
      spent[name] = {"steps": steps, "gradient_evaluations": steps, "seconds": seconds}
    return RaceResult(tuple(range(len(ends))), curves, spent)

  report = Report(result(sgd=[71, 72, 73], better=[81, 83, 82]), "sgd")
  assert report.target == 70
  assert report.rows[1].gain == pytest.approx((10, 2.484), rel=1e-3)
  # By 10, 11 and 9: t = 10 sqrt(3), and of two degrees of freedom p = 1 - sqrt(t^2 / (t^2 + 2)).
  assert "better  10.0 points more accuracy (p = 0.0033); 70% after 2 steps" in report.verdicts()
  lost = Report(result(sgd=[71, 72, 73], wild=[np.nan] * 3, half=[72, 73, np.nan]), "sgd")
  assert "wild  diverged" in lost.verdicts()
  assert re.search(r"^wild +- +- +- +never +3.0 +3, 3 diverged$", lost.table(), re.MULTILINE)
  assert re.search(r"^half +1.000 .* 72.5 ± 0.7% +\+1.0 .* 3, 1 dive", lost.table(), re.MULTILINE)
