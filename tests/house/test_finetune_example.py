"""The fine-tuning example runs each of its ways, and draws what it found."""

import _pydecimal
import doctest
import shutil
import typing

import numpy as np


def test_every_way_trains_and_the_table_and_picture_show_it(import_example, monkeypatch, tmp_path):
  example = import_example("finetune")
  for name, value in {"LAYERS": 4, "WIDTH": 8, "HEADS": 2, "LENGTH": 8}.items():
    monkeypatch.setattr(example._transformer, name, value)
  # A part of the standard library, which takes seconds to parse.
  for module in (_pydecimal, doctest, typing):
    shutil.copy(module.__file__, tmp_path)
  monkeypatch.setattr(example.sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
  text = example.read_corpus()
  assert min(map(len, text)) > 10_000
  assert max(map(np.max, text)) < example._transformer.VOCABULARY
  start = example.pretrain(text.base, 8)
  runs = {
    name: [example.fine_tune(name, 1e-2, start, text, text.test, 8, seed=0)]
    for name in example.WAYS
  }
  base = example.evaluate(start, text.test)
  assert all(run.losses[-1] < base for own in runs.values() for run in own)
  table = example.table(runs, dict.fromkeys(runs, 1e-2), base)
  assert table.count("±") == len(example.WAYS)
  example.draw(runs, tmp_path / "picture.png")
  assert (tmp_path / "picture.png").stat().st_size > 10_000
