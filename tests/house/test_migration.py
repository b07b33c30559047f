"""MindSpore's migration page: its blocks run, and it has all names, theirs and ours."""

import pathlib
import re

import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "migrating" / "mindspore.md").read_text(
  encoding="utf-8"
)
# All that `mindspore.boost` exports: arguments, public methods, and theirs.
REFERENCE = {
  "AutoBoost": """level boost_config_dict network_auto_process_train network optimizer
    network_auto_process_eval""",
  "OptimizerProcess": """opt add_grad_centralization network build_params_dict
    build_gc_params_group params_dict parameters generate_new_optimizer""",
  "ParameterProcess": """assign_parameter_group parameters split_point generate_group_params
    origin_params""",
  "BoostTrainOneStepCell": """network optimizer sens inputs gradient_freeze_process
    gradient_accumulation_process loss grads adasum_process check_adasum_enable reducer_flag""",
  "BoostTrainOneStepWithLossScaleCell": "network optimizer scale_sense overflow",
  "LessBN": "network fn_flag",
  "GradientFreeze": """param_groups freeze_type freeze_p total_steps split_parameters_groups net
    freeze_para_groups_number generate_freeze_index_sequence parameter_groups_number
    freeze_strategy freeze_generate network optimizer""",
  "FreezeOpt": "opt train_parameter_groups train_strategy",
  "freeze_cell": """reducer_flag network optimizer sens grad use_grad_accumulation mean degree
    max_accumulation_step""",
  "GradientAccumulation": "max_accumulation_step optimizer",
  "AdaSum": """rank device_number group_number parameter_tuple delta_weights parameters
    old_parameters""",
  "DimReduce": """network optimizer weight pca_mat_local n_components rho gamma alpha sigma rank
    rank_size""",
}


def test_its_blocks_run_from_top_to_bottom(capsys):
  names = {}
  for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
    exec(compile(code, "mindspore.md", "exec"), names)
  assert "less_bn                on   in level O1" in capsys.readouterr().out


@pytest.mark.parametrize("name", REFERENCE)
def test_arguments_and_methods_have_rows_and_a_class_a_pair_of_lines(name):
  section = re.search(rf"### `{name}`\n(.*?)\n##", PAGE, re.DOTALL)[1]
  first_column = re.findall(r"^\|([^|]*)\|", section, re.MULTILINE)
  assert not set(REFERENCE[name].split()) - set(re.findall(r"\w+", " ".join(first_column)))
  assert re.search(r"^# .*\n[^#`\n]", section, re.MULTILINE)


def test_every_name_of_ours_exists():
  names = set(re.findall(r"optax_boost((?:\.\w+)+)", PAGE))
  assert len(names) > 15
  for name in names:
    found = optax_boost
    for part in name.strip(".").split("."):
      found = getattr(found, part)
