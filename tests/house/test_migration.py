"""The migration page: its blocks run, and every name of ours in it exists."""

import pathlib
import re

import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "migrating" / "mindspore.md").read_text(
  encoding="utf-8"
)
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# All that `mindspore.boost` exports.
REFERENCE = """
  AutoBoost OptimizerProcess ParameterProcess BoostTrainOneStepCell
  BoostTrainOneStepWithLossScaleCell LessBN GradientFreeze FreezeOpt freeze_cell
  GradientAccumulation AdaSum DimReduce
"""


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(code, capsys):
  exec(compile(code, "migration.md", "exec"), {})
  if "explain" in code:
    printed = capsys.readouterr().out
    assert "less_bn           on   in level O1" in printed
    assert "removed 2 of 3 BatchNorms: bn1, bn2" in printed


def test_every_public_name_of_the_reference_is_in_the_table():
  first_column = [row.split("|")[1] for row in PAGE.splitlines() if row.startswith("| `")]
  missing = [name for name in REFERENCE.split() if not any(f"`{name}" in c for c in first_column)]
  assert not missing


def test_every_name_of_ours_exists():
  names = set(re.findall(r"optax_boost((?:\.\w+)+)", PAGE))
  assert len(names) > 15
  for name in names:
    found = optax_boost
    for part in name.strip(".").split("."):
      found = getattr(found, part)
