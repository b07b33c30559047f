"""The fine-tuning example runs each of its ways, and draws what it found."""

import pathlib
import platform

import numpy as np
import pytest


@pytest.fixture
def example(import_example, monkeypatch, tmp_path):
  """The example with a tiny transformer, on texts that don't depend on the Python that runs."""
  example = import_example("finetune")
  sizes = {"LAYERS": 4, "WIDTH": 8, "HEADS": 2, "LENGTH": 8}
  for name, value in sizes.items():
    monkeypatch.setattr(example._transformer, name, value)
  text = (pathlib.Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
  library = tmp_path / "library"
  library.mkdir()
  for number in range(3):
    module = f'"""Module {number}."""\ndef f():\n  """{5 * text}"""\nclass C: pass\n'
    (library / f"module{number}.py").write_text(module)
  monkeypatch.setattr(example._texts.sysconfig, "get_path", {"stdlib": str(library)}.get)
  monkeypatch.setattr(example._texts, "language_reference", lambda: text)
  return example


# `make demo-finetune` trains all ways, too; the guide's programs run in `make test`.
@pytest.mark.slow
def test_every_way_trains_and_the_table_and_picture_show_it(example, tmp_path, capsys):
  text = example._texts.split("".join(example._texts.docstrings()))
  assert min(map(len, text)) > 10_000
  assert max(map(np.max, text)) < example._transformer.VOCABULARY
  out = tmp_path / "picture.png"
  arguments = ["--steps=8", "--base-steps=8", "--seeds=1", f"--out={out}"]
  assert example.main(arguments) == 0
  printed = capsys.readouterr().out
  assert f"the language reference of Python {platform.python_version()}, " in printed
  assert "About three minutes" in printed
  before = float(printed.split("Before fine-tuning: ")[1].split()[0])
  rows = [line.split("|") for line in printed.splitlines() if "±" in line]
  assert [row[1].strip() for row in rows] == list(example.WAYS)
  assert all(float(row[2].split()[0]) < before for row in rows)
  assert [float(row[4]) for row in rows] == [example.RATE] * len(example.WAYS)
  assert out.stat().st_size > 10_000


def test_tuning_takes_the_rate_of_the_least_validation_loss(example, monkeypatch):
  losses = dict(zip(example.RATES, (2.0, 1.0, np.nan), strict=True))
  monkeypatch.setattr(example, "make_step", lambda name, rate, *_: rate)

  class Run:
    def __init__(self, rate, *_, seed):
      self.losses = [losses[rate]]

  monkeypatch.setattr(example, "fine_tune", Run)
  text = example._texts.split("a" * 1000)
  with example.tqdm(disable=True) as bar:
    assert example.choose_rate("full", None, text, 8, bar) == example.RATES[1]


@pytest.mark.parametrize(
  ("argument", "cause"),
  [
    ("--steps=7", "--steps must be at least 8 and below 2**31; got 7"),
    ("--base-steps=7", "--base-steps must be at least 8"),
    ("--seeds=0", "--seeds must be at least 1"),
    ("--out=a.txt", "--out a.txt must end in .png, .pdf, .svg"),
  ],
)
def test_a_wrong_argument_is_one_line_before_anything_is_trained(example, capsys, argument, cause):
  assert example.main([argument]) == 2
  captured = capsys.readouterr()
  (line,) = captured.err.splitlines()
  assert line.startswith(f"finetune: error: {cause}")
  assert captured.out == ""
