"""Texts as characters; nothing is downloaded.

Plays of Shakespeare are the same on every machine. texts/ holds them as tiny Shakespeare does, a
part of Karpathy's char-rnn. They are in the public domain. Texts of Python differ by its version.
"""

import ast
from pathlib import Path
import platform
import pydoc_data.topics
import sysconfig
from typing import NamedTuple

import numpy as np


class Text(NamedTuple):
  """Characters as integers below 128.

  Attributes:
    train: to train on.
    validation: held out, for learning rates.
    test: held out, for tables and pictures.
  """

  train: np.ndarray
  validation: np.ndarray
  test: np.ndarray


def plays() -> str:
  """Coriolanus, Richard III and Richard II, one after the other."""
  return _read("plays.txt")


def comedy() -> str:
  """The Taming of the Shrew."""
  return _read("comedy.txt")


def _read(name: str) -> str:
  return (Path(__file__).parent / "texts" / name).read_text(encoding="utf-8")


PYTHON = f"Python {platform.python_version()}"


def language_reference() -> str:
  """Python's language reference: prose about the language."""
  return "\n".join(pydoc_data.topics.topics.values())


def docstrings() -> list[str]:
  """The docstrings of the standard library, in random order, so that parts of them are similar."""
  found = []
  for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
    for node in ast.walk(ast.parse(path.read_bytes())):
      if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        found.append(ast.get_docstring(node) or "")
  texts = [text for text in found if text]
  return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]


def encode(text: str) -> np.ndarray:
  """Characters as int32; those that are not in ASCII become question marks."""
  return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)


def split(text: str) -> Text:
  """Cuts 80 percent to train on from two tenths that are held out."""
  characters = encode(text)
  ends = [len(characters) * 8 // 10, len(characters) * 9 // 10]
  return Text(*np.split(characters, ends))


def windows(text: np.ndarray, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
  """Windows at random places: ``(count, length + 1)``, for inputs and targets that overlap."""
  starts = rng.integers(0, len(text) - length - 1, count)
  return text[starts[:, None] + np.arange(length + 1)]
