"""The migration page from MindSpore names all that there is to migrate."""

import pathlib
import re

import optax_boost
import optax_boost.linen
import optax_boost.nnx

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "migrating" / "mindspore.md").read_text()
# All that `mindspore.boost` exports.
REFERENCE = """
  AutoBoost OptimizerProcess ParameterProcess BoostTrainOneStepCell
  BoostTrainOneStepWithLossScaleCell LessBN GradientFreeze FreezeOpt freeze_cell
  GradientAccumulation AdaSum DimReduce GroupLossScaleManager
"""


def test_every_public_name_of_the_reference_is_in_the_table():
  first_column = [row.split("|")[1] for row in PAGE.splitlines() if row.startswith("| `")]
  missing = [n for n in REFERENCE.split() if not any(f"`boost.{n}" in c for c in first_column)]
  assert not missing


def test_every_dotted_name_of_ours_exists():
  names = set(re.findall(r"optax_boost((?:\.\w+)+)", PAGE))
  assert len(names) > 6
  for name in names:
    found = optax_boost
    for part in name.strip(".").split("."):
      found = getattr(found, part)
