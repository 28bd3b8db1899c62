"""Checks for which Ascend devices the installed vllm-ascend was built: each worker of an engine asserts the same at its
start (vllm_ascend/utils.py, check_ascend_device_type).

Run by python -m mrl.platforms.ascend_build, as `mrl doctor` does, where torch_npu is installed.
"""

import importlib.util
import re
import sys
from pathlib import Path

from mrl.errors import EnvironmentFault

# what torch_npu.npu.get_soc_version() returns for each type, as vllm-ascend 0.23 reads it
_SOC = {"A2": range(220, 226), "A3": range(250, 256), "_310P": range(200, 206), "A5": range(260, 261)}
# what its setup.py takes for SOC_VERSION
_BUILD_FOR = {"A2": "ascend910b1", "A3": "ascend910_9392"}


def device_type(soc: int) -> str:
    """Returns the type of a device, for example A3. Raises EnvironmentFault for one that vllm-ascend does not know."""
    for name, numbers in _SOC.items():
        if soc in numbers:
            return name
    known = ", ".join(f"{name} {numbers[0]} to {numbers[-1]}" for name, numbers in _SOC.items())
    raise EnvironmentFault(
        f"the device has SoC version {soc}, which vllm-ascend 0.23 does not know (it knows {known}); use another device"
    )


def built_for(package: Path) -> str:
    """Returns the type of device for which the vllm-ascend in this folder was built."""
    text = (package / "_build_info.py").read_text(encoding="utf-8")
    found = re.search(r"__device_type__ = '(\w+)'", text)
    if found is None:
        raise EnvironmentFault(f"{package}/_build_info.py does not say __device_type__: install vllm-ascend 0.23.0")
    return found[1]


def check_build(built: str, soc: int) -> str:
    """Returns the type of the device. Raises EnvironmentFault where vllm-ascend was built for another one."""
    here = device_type(soc)
    if built != here:
        how = f"SOC_VERSION={_BUILD_FOR.get(here, '<your chip>')} COMPILE_CUSTOM_KERNELS=1"
        raise EnvironmentFault(
            f"vllm-ascend was built for {built} and the device is {here}, so no engine would start. The wheels on PyPI "
            f"are built for A2; build it here: {how} pip install --no-build-isolation --no-binary vllm-ascend "
            "vllm-ascend==0.23.0, with the build's requirements that the Dockerfile names"
        )
    return here


def main() -> None:
    """Prints one line. Ends with status 1 and the reason if the build is not for this device."""
    import torch_npu

    (folder,) = importlib.util.find_spec("vllm_ascend").submodule_search_locations
    try:
        here = check_build(built_for(Path(folder)), torch_npu.npu.get_soc_version())
    except EnvironmentFault as fault:
        print(fault, file=sys.stderr)
        raise SystemExit(1) from None
    print(f"vllm-ascend was built for {here}, as the device is")


if __name__ == "__main__":
    main()
