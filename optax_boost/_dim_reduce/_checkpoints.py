"""Snapshots of the params from a directory of Orbax checkpoints, read one at a time."""

import collections
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import itertools
import os
import pathlib
import re
from typing import Any

import jax
import numpy as np

from optax_boost import _base
from optax_boost import _files
from optax_boost import _tree
from optax_boost._dim_reduce import _subspace

# A file in every Orbax checkpoint of a tree.
_METADATA = "_METADATA"
# A part of the names of those that are still being written.
_UNFINISHED = ".orbax-checkpoint-tmp"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CheckpointSnapshots(Sequence[Any]):
  """The snapshots in a directory of checkpoints; made by :func:`checkpoint_snapshots`.

  A sequence in the order of the steps: indexing reads one snapshot from disk, and none is kept.
  Iterating shows a progress bar if `progress` was True.
  """

  _folders: Sequence[tuple[int, pathlib.Path]]
  _like: Any
  _subtree: tuple[str, ...]
  _progress: bool

  @property
  def steps(self) -> list[int]:
    """The steps of the checkpoints, ascending."""
    return [step for step, _ in self._folders]

  def __len__(self) -> int:
    return len(self._folders)

  def __getitem__(self, index: Any) -> Any:
    if isinstance(index, slice):
      return CheckpointSnapshots(self._folders[index], self._like, self._subtree, self._progress)
    return _read(self._folders[index][1], self._like, self._subtree)

  def __iter__(self) -> Iterator[Any]:
    paths = [path for _, path in self._folders]
    for path in _base.with_progress(paths, self._progress, "reading checkpoints", "checkpoint"):
      yield _read(path, self._like, self._subtree)


def checkpoint_snapshots(
  directory: str | os.PathLike[str],
  like: Any = None,
  *,
  subtree: str = "",
  item: str | None = None,
  progress: bool = False,
) -> CheckpointSnapshots:
  """Reads the params of the Orbax checkpoints in a directory, in the order of their steps.

  For :func:`fit_subspace_streamed`, which needs a few snapshots at a time, or :func:`fit_subspace`,
  which needs all. Slices are such sequences themselves: ``history[-40:]`` are the last 40.

  Args:
    directory: that of a ``CheckpointManager``, or one that holds a folder per checkpoint whose
      name ends with the step (``step_100``). Unfinished checkpoints and other entries are passed
      over: folders are steps if one of the same name, but for the number, is a checkpoint.
    like: a tree of arrays or of ``jax.ShapeDtypeStruct`` that gives snapshots their structure,
      dtypes and sharding. None: nested dicts and lists of NumPy arrays.
    subtree: the keys that lead from the checkpoint's root to the params, joined by ``/``:
      ``"params"`` if a train state was saved. ``""``: the checkpoint is the params.
    item: the name of the item that was saved with ``ocp.args.Composite``. None: the only tree.
    progress: whether iterating shows a progress bar; needs ``tqdm``, and is nothing without it.

  Returns:
    A :class:`CheckpointSnapshots`.

  Raises:
    ImportError: ``orbax-checkpoint`` is not installed.
    FileNotFoundError: there is no such directory.
    TypeError: an argument is of the wrong kind.
    ValueError: the directory holds no checkpoint, or not such an item; when read: there is no
      such subtree, or it does not fit `like`.

  Examples:
    >>> import tempfile, jax.numpy as jnp, optax_boost, orbax.checkpoint as ocp
    >>> folder = tempfile.mkdtemp()
    >>> with ocp.CheckpointManager(folder) as manager:
    ...   for step in (0, 5, 10):
    ...     state = {"params": {"w": jnp.full(2, step, jnp.float32)}, "step": step}
    ...     saved = manager.save(step, args=ocp.args.StandardSave(state))
    >>> history = optax_boost.checkpoint_snapshots(folder, subtree="params")
    >>> history.steps, history[-1]["w"].tolist()
    ([0, 5, 10], [10.0, 10.0])
  """
  _orbax()
  name = _files.check_path("directory", directory)
  for argument, value in {"subtree": subtree, "item": "" if item is None else item}.items():
    if not isinstance(value, str):
      raise TypeError(f"`{argument}` must be a string; got {_base.shorten(value)}.")
  _base.check_bool("progress", progress)
  _subspace.leaves_like(like)
  folder = pathlib.Path(name).absolute()
  # Folders by their names without the number. Not `\d`, which finds digits of other alphabets, too.
  numbered: dict[str, list[tuple[int, pathlib.Path]]] = {}
  for entry in os.scandir(name):
    number = re.search(r"[0-9]+$", entry.name)
    if entry.is_dir() and number and _UNFINISHED not in entry.name:
      alike = numbered.setdefault(entry.name[: number.start()], [])
      alike.append((int(number.group()), folder / entry.name))
  # Other folders may end with a number, too: `logs2024`.
  steps = [
    step
    for alike in numbered.values()
    if any(_holds_tree(path) for _, path in alike)
    for step in alike
  ]
  if not steps:
    raise ValueError(
      "`checkpoint_snapshots` needs a directory with a folder per checkpoint whose name ends with"
      f" the step, as Orbax's CheckpointManager makes them; found none in {folder}."
    )
  folders = [(step, _tree_folder(path, item)) for step, path in sorted(steps)]
  keys = tuple(key for key in subtree.split("/") if key)
  return CheckpointSnapshots(folders, like, keys, progress)


def _orbax() -> Any:
  try:
    import orbax.checkpoint as ocp
  except ImportError as error:
    raise ImportError(
      f"`checkpoint_snapshots` needs Orbax. {_base.install_advice('checkpoints')}"
    ) from error
  return ocp


def _holds_tree(step: pathlib.Path) -> bool:
  """Whether a folder is that of a checkpoint."""
  return (step / _METADATA).exists() or any(step.glob(f"*/{_METADATA}"))


def _tree_folder(step: pathlib.Path, item: str | None) -> pathlib.Path:
  """Where in the folder of a step the tree lies."""
  if item is None and (step / _METADATA).exists():
    return step
  items = sorted(path.parent.name for path in step.glob(f"*/{_METADATA}"))
  name = items[0] if item is None and len(items) == 1 else item
  if name not in items:
    raise ValueError(
      f"`checkpoint_snapshots` needs one item that is a tree in each checkpoint; {step.name!r} has"
      f" {items} and `item` is {item!r}. Name one of them, and remove what is no checkpoint."
    )
  return step / name


def _read(path: pathlib.Path, like: Any, subtree: tuple[str, ...]) -> Any:
  ocp = _orbax()
  with ocp.PyTreeCheckpointer() as checkpointer:
    metadata = checkpointer.metadata(path)
    part = getattr(metadata, "item_metadata", metadata)
    part = getattr(part, "tree", part)
    for key in subtree:
      if not isinstance(part, dict) or key not in part:
        has = sorted(part) if isinstance(part, dict) else type(part).__name__
        raise ValueError(
          f"`checkpoint_snapshots` needs the subtree {'/'.join(subtree)!r} in each checkpoint;"
          f" {path} has no {key!r}, but {has}. Pass the `subtree` that leads to the params."
        )
      part = part[key]
    wanted = _subspace.leaves_like(like)
    targets = dict(zip(_names(wanted), wanted.values(), strict=True))
    leaves, structure = jax.tree.flatten(part)
    names = _names(_tree.leaf_paths(part))
    if like is not None:
      _subspace.check_shapes(
        {name: tuple(x.shape) for name, x in zip(names, leaves, strict=True)},
        targets,
        "`checkpoint_snapshots` needs checkpoints of the tree and the shapes of `like`",
        str(path),
        "Pass the params of the model that was saved, and the `subtree` under which they were.",
      )

    def how(name: str) -> Any:
      target: Any = targets.get(name)
      sharding = getattr(target, "sharding", None)
      if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
      return ocp.ArrayRestoreArgs(sharding=sharding, dtype=target.dtype)

    # Structures of their own: leaves that are not named in them are not read.
    item = jax.tree.map(lambda _: 0, part)
    arguments = jax.tree.unflatten(structure, map(how, names))
    for key in reversed(subtree):
      item, arguments = {key: item}, {key: arguments}
    read = checkpointer.restore(
      path, args=ocp.args.PyTreeRestore(item, arguments, partial_restore=True)
    )
  for key in subtree:
    read = read[key]
  if like is None:
    return read
  arrays = dict(zip(_names(_tree.leaf_paths(read)), jax.tree.leaves(read), strict=True))
  ordered = [arrays[name].astype(x.dtype) for name, x in targets.items()]
  return jax.tree.unflatten(jax.tree.structure(like), ordered)


def _names(paths: Iterable[str]) -> list[str]:
  """Paths without the name of a value alone in its dict, as Orbax saves a Flax variable."""
  paths = list(paths)
  below = collections.Counter(
    module for path in paths for module in itertools.accumulate(path.split("/"), "{}/{}".format)
  )
  boxes = (re.fullmatch(r"(.+)/(?:raw_)?value", path, re.DOTALL) for path in paths)
  pairs = zip(paths, boxes, strict=True)
  return [box[1] if box and below[box[1]] == 1 else path for path, box in pairs]
