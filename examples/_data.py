"""The images that large_batch.py trains on: scikit-learn's digits, or an npz file of one's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
import zipfile
import zlib

import numpy as np
from sklearn.datasets import load_digits

# Digits: 1,797 images, shuffled with this seed, then cut. The first 1,024 train. The validation
# part is for the choice of learning rates (tune.py) alone, the test part for the examples alone.
SPLIT_SEED = 0
TRAIN_IMAGES, VALIDATION_IMAGES = 1024, 373

KEYS = ("train_images", "train_labels", "test_images", "test_labels")


class Part(NamedTuple):
  """Images ``(n, h, w, c)``, float32, and their class numbers ``(n,)``, int32."""

  images: np.ndarray
  labels: np.ndarray


class Data(NamedTuple):
  """A classification problem, its images scaled by the mean and spread of the training pixels."""

  name: str
  classes: int
  train: Part
  test: Part


def digits(test_on: str = "test") -> Data:
  """Loads scikit-learn's digits.

  Args:
    test_on: which part to give out as the test part: ``"test"`` or ``"validation"``.

  Returns:
    The data.
  """
  bunch = load_digits()
  order = np.random.default_rng(SPLIT_SEED).permutation(len(bunch.target))
  train, validation, test = np.split(order, [TRAIN_IMAGES, TRAIN_IMAGES + VALIDATION_IMAGES])
  held_out = {"validation": validation, "test": test}[test_on]
  images, labels = bunch.images[..., None], bunch.target
  return _scaled("digits", images[train], labels[train], images[held_out], labels[held_out])


def batches(part: Part, batch_size: int, epochs: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
  """Shuffles the images again for each epoch and cuts them into batches.

  Args:
    part: the images.
    batch_size: images in a batch. What is left over sits out that epoch: a smaller batch would be
      compiled and weighted differently.
    epochs: passes over the images.
    seed: seeds the shuffling.

  Yields:
    Batches with the keys ``images`` and ``labels``.
  """
  rng = np.random.default_rng(seed)
  for _ in range(epochs):
    order = rng.permutation(len(part.labels))
    for start in range(0, len(order) - batch_size + 1, batch_size):
      chosen = order[start : start + batch_size]
      yield {"images": part.images[chosen], "labels": part.labels[chosen]}


def from_npz(path: str) -> Data:
  """Loads and checks an npz file.

  Args:
    path: a file with the arrays named in `KEYS`: images ``(n, h, w)`` or ``(n, h, w, c)`` of
      integers or floats, labels ``(n,)`` of integers from 0.

  Returns:
    The data.

  Raises:
    OSError: the file can't be read.
    ValueError: it is not an npz file, or its arrays are not as described.
  """
  try:
    with zipfile.ZipFile(path) as archive:
      names = {name.removesuffix(".npy") for name in archive.namelist()}
    missing = [key for key in KEYS if key not in names]
    if not missing:
      with np.load(path, allow_pickle=False) as loaded:
        arrays = {key: np.asarray(loaded[key]) for key in KEYS}
  except (ValueError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
    raise ValueError(f"{path} is not a readable npz file: {error}") from error
  if missing:
    raise ValueError(f"{path} lacks {', '.join(missing)}; it must hold {', '.join(KEYS)}")

  for part in ("train", "test"):
    images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
    _check_images(images, f"{part}_images")
    _check_labels(labels, f"{part}_labels")
    if len(images) != len(labels):
      raise ValueError(f"there are {len(images)} {part}_images but {len(labels)} {part}_labels")
    arrays[f"{part}_images"] = images if images.ndim == 4 else images[..., None]

  train, test = arrays["train_images"], arrays["test_images"]
  if train.shape[1:] != test.shape[1:]:
    raise ValueError(
      f"train_images are of shape {train.shape[1:]} but test_images of {test.shape[1:]}"
    )
  largest = int(arrays["train_labels"].max())
  if not 1 <= largest < len(train):
    raise ValueError(
      "train_labels must number the classes 0, 1, ..., at least two and no more than there are"
      f" images; the largest of {len(train)} labels is {largest}"
    )
  if arrays["test_labels"].max() > largest:
    raise ValueError(
      f"test_labels has the class {arrays['test_labels'].max()}, train_labels none above {largest}"
    )
  return _scaled(Path(path).name, train, arrays["train_labels"], test, arrays["test_labels"])


def _check_images(images: np.ndarray, key: str) -> None:
  if images.ndim not in (3, 4) or images.size == 0:
    raise ValueError(
      f"{key} must be of shape (n, h, w) or (n, h, w, c), not empty; got {images.shape}"
    )
  if images.dtype.kind not in "uif":
    raise ValueError(f"{key} must be integers or floats; got {images.dtype}")
  if not np.isfinite(images).all():
    raise ValueError(f"{key} has pixels that are not finite")


def _check_labels(labels: np.ndarray, key: str) -> None:
  if labels.ndim != 1:
    raise ValueError(f"{key} must be of shape (n,); got {labels.shape}")
  if labels.dtype.kind not in "ui":
    raise ValueError(f"{key} must be integers; got {labels.dtype}")
  if labels.size and labels.min() < 0:
    raise ValueError(f"{key} must not be negative; got {labels.min()}")


def _scaled(
  name: str,
  train_images: np.ndarray,
  train_labels: np.ndarray,
  test_images: np.ndarray,
  test_labels: np.ndarray,
) -> Data:
  with np.errstate(over="ignore", invalid="ignore"):
    mean = np.mean(train_images, dtype=np.float64)
    spread = np.std(train_images, dtype=np.float64)
  if not 0 < spread < np.inf:
    raise ValueError(
      f"the pixels of train_images must differ; their standard deviation is {spread}"
    )

  def part(images: np.ndarray, labels: np.ndarray) -> Part:
    scaled = (images.astype(np.float32) - np.float32(mean)) / np.float32(spread)
    return Part(scaled, labels.astype(np.int32))

  classes = int(train_labels.max()) + 1
  return Data(name, classes, part(train_images, train_labels), part(test_images, test_labels))
