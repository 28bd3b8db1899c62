"""vllm-ascend is built for one type of chip, which the doctor compares as each worker of an engine does.

Numbers and names: vllm_ascend/utils.py and setup.py of v0.23.0.
"""

import pytest

from mrl.errors import EnvironmentFault
from mrl.platforms.ascend_build import built_for, check_build, device_type


def test_the_wheel_for_a2_is_refused_on_a3_with_the_command_that_builds_it(tmp_path):
    (tmp_path / "_build_info.py").write_text("# Auto-generated file\n__device_type__ = 'A2'\n")
    built = built_for(tmp_path)
    assert check_build(built, 223) == "A2"
    with pytest.raises(EnvironmentFault, match=r"built for A2 and the device is A3.*ascend910_9392.*--no-binary"):
        check_build(built, 253)


@pytest.mark.parametrize(("soc", "kind"), [(220, "A2"), (225, "A2"), (250, "A3"), (255, "A3"), (202, "_310P")])
def test_each_chip_has_its_type(soc, kind):
    assert device_type(soc) == kind


def test_an_unknown_chip_is_said(tmp_path):
    with pytest.raises(EnvironmentFault, match=r"SoC version 240, which vllm-ascend 0.23 does not know"):
        check_build("A3", 240)


def test_a_build_that_does_not_say_for_which_is_said(tmp_path):
    (tmp_path / "_build_info.py").write_text("__soc_version__ = 'ASCEND910B1'\n")
    with pytest.raises(EnvironmentFault, match=r"does not say __device_type__"):
        built_for(tmp_path)
