"""Snapshots of the params from a directory of Orbax checkpoints, read one at a time."""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
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
      over: folders are steps if one of the same name, but for the number, is a checkpoint. Those
      that are numbers alone go before others, such as ``best_100``.
    like: a tree of arrays or of ``jax.ShapeDtypeStruct`` that gives snapshots their structure,
      dtypes and sharding; saved leaves that it lacks are not read, such as the BatchNorm statistics
      of a whole NNX state. None: nested dicts and lists of NumPy arrays.
    subtree: the keys that lead from the checkpoint's root to the params, joined by ``/``:
      ``"params"`` if a train state was saved, ``"opt_state/0/mu"`` where numbers count the entries
      of a list or tuple. ``""``: the checkpoint is the params.
    item: the name of the item that was saved with ``ocp.args.Composite``. None: the only tree.
    progress: whether iterating shows a progress bar; needs ``tqdm``, and is nothing without it.

  Returns:
    A :class:`CheckpointSnapshots`.

  Raises:
    ImportError: ``orbax-checkpoint`` is not installed.
    FileNotFoundError: there is no such directory.
    TypeError: an argument is of the wrong kind.
    ValueError: the directory holds no checkpoint, several series of them, or not such an item;
      when read: there is no such subtree, or it lacks leaves of `like` or has them in other shapes.

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
    _base.check_type(argument, value, str, "a string")
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
  series = {
    prefix: alike
    for prefix, alike in numbered.items()
    if any(_holds_tree(path) for _, path in alike)
  }
  if "" in series:
    series = {"": series[""]}
  if len(series) > 1:
    raise ValueError(
      "`checkpoint_snapshots` needs one series of checkpoints, whose folders have the same name but"
      f" for the step; {folder} holds those of {sorted(series)}. Move others elsewhere."
    )
  steps = [step for alike in series.values() for step in alike]
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
    tree = getattr(metadata, "item_metadata", metadata)
    part = tree = getattr(tree, "tree", tree)
    keys: list[Any] = []
    for name in subtree:
      children = dict(enumerate(part)) if isinstance(part, list | tuple) else part
      by_name = {str(key): key for key in children} if isinstance(children, dict) else {}
      if name not in by_name:
        raise ValueError(
          f"`checkpoint_snapshots` needs the subtree {'/'.join(subtree)!r} in each checkpoint;"
          f" {path} has no {name!r}, but {sorted(by_name) or type(part).__name__}. Pass the"
          " `subtree` that leads to the params."
        )
      keys.append(by_name[name])
      part = part[keys[-1]]
    targets = _subspace.leaves_like(like)
    saved, structure = jax.tree.flatten(part)
    names = _tree.paths_among(targets, part)
    if like is not None:
      _subspace.check_shapes(
        {n: tuple(x.shape) for n, x in zip(names, saved, strict=True) if n in targets},
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

    def with_part(leaves: Any, elsewhere: Any) -> Any:
      """The whole tree, with these leaves in the part."""
      own = jax.tree.unflatten(structure, leaves)
      return jax.tree.map(
        lambda x: own if x is part else elsewhere, tree, is_leaf=lambda x: x is part
      )

    # Leaves with a placeholder are not read.
    marks = [0 if like is None or name in targets else ocp.PLACEHOLDER for name in names]
    item = with_part(marks, ocp.PLACEHOLDER)
    arguments = with_part(map(how, names), ocp.RestoreArgs())
    read = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item, arguments))
  for key in keys:
    read = read[key]
  if like is None:
    return read
  arrays = dict(zip(_tree.paths_among(targets, read), jax.tree.leaves(read), strict=True))
  ordered = [arrays[name].astype(x.dtype) for name, x in targets.items()]
  return jax.tree.unflatten(jax.tree.structure(like), ordered)
