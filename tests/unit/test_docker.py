"""The Dockerfile says the versions of setup.py and of the version rows, and nothing floats.

It is read here, never built.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mrl.platforms.versions import row_of

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def stages() -> dict[str, tuple[str, str]]:
    """Name -> (base, text) of each build stage."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", TEXT, flags=re.MULTILINE)[1:]
    return {name: (base, body) for base, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


def instructions() -> list[str]:
    """Instructions with continued lines joined, comments left out."""
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in TEXT.splitlines() if not line.lstrip().startswith("#")))
    return [line for line in joined.splitlines() if line.strip()]


def test_there_is_a_target_for_each_device():
    assert {"cpu", "cuda", "npu"} <= set(stages())


def test_no_base_image_floats():
    names = set(stages())
    for base, _ in stages().values():
        assert base in names or (":" in base and not base.endswith(":latest")), base


def test_whatever_pip_installs_by_name_is_pinned():
    for line in instructions():
        for command in re.findall(r"pip install ([^&]+)", line):
            words = [w for w in command.split() if not w.startswith("-")]
            floating = [w for w in words if "==" not in w and not w.startswith((".", '".', "/"))]
            assert not floating, f"{floating} in: pip install {command}"


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_pins_are_those_of_the_row(device):
    base, body = stages()[device]
    row = row_of(device)
    said = dict(re.findall(r"([a-z][a-z0-9-]+)==([0-9][0-9a-z.]+)", body))
    known = row.packages | row.loose
    assert {name: version for name, version in said.items() if name in known} == {
        name: known[name] for name in said if name in known
    }
    if device == "npu":
        assert f"cann:{row.toolkit}-" in base
        assert f"--branch v{row.packages['vllm']} https://github.com/vllm-project/vllm" in body
        assert {"torch", "torch-npu", "vllm-ascend"} <= set(said)
        (mindspeed,) = row.source_only.values()
        branch, address = mindspeed.rpartition("@")[2], mindspeed.removeprefix("git+").rpartition("@")[0]
        assert f"--branch {branch} {address}" in body
        assert 'pip install -e ".[npu]"' in body
    else:
        assert f"scripts/install.sh {device}" in body


def test_torch_is_there_before_what_is_compiled_against_it():
    _, body = stages()["npu"]
    assert (
        body.index("pip install torch==")
        < body.index("COMPILE_CUSTOM_KERNELS=1")
        < body.index('pip install -e ".[npu]"')
    )


def test_vllm_ascend_is_built_for_the_chip_and_not_taken_from_its_wheel_for_a2():
    """Whose `_build_info` says A2; a worker on A3 refuses it."""
    _, body = stages()["npu"]
    (building,) = re.findall(r"SOC_VERSION=\$\{SOC_VERSION\} \\\n\s+pip install ([^\n]*)", body)
    assert {"--no-binary=vllm-ascend", "--no-build-isolation"} <= set(building.split())
    before = body[: body.index("COMPILE_CUSTOM_KERNELS=1")]
    # of its build, and nothing brings them before (pyproject.toml and setup.py of v0.23.0)
    assert {"cmake", "pybind11", "setuptools-scm", "attrs", "decorator", "scipy"} <= set(
        re.findall(r"([a-z0-9-]+)==", before)
    )


def test_images_have_what_the_probes_of_kubernetes_call():
    for device in ("cuda", "npu"):
        assert re.search(r"apt-get install [^&]*\bwget\b", stages()[device][1])


def test_transformer_engine_is_compiled_against_the_torch_that_was_installed_before():
    script, row = (ROOT / "scripts" / "install.sh").read_text(), row_of("cuda")
    ((name, version),) = row.compiled.items()
    compiling = f"pip install --no-build-isolation {name}=={version}"
    assert (
        script.index('pip install -e ".[$extra,dev]"')
        < script.index(compiling)
        < script.index("import transformer_engine.pytorch")
    )
    assert "-devel-" in stages()["cuda"][0]  # nvcc's toolkit


def test_between_nodes_the_cuda_image_has_what_nccl_needs_and_says_how_it_is_run():
    _, body = stages()["cuda"]
    assert {"libibverbs1", "ibverbs-providers", "rdma-core"} <= set(body.split())
    (command,) = [line for line in TEXT.splitlines() if "docker run" in line and "mrl:cuda" in line]
    assert {"--gpus", "--ipc=host", "--network=host", "memlock=-1", "/dev/infiniband"} <= set(command.split())


def test_the_npu_image_says_which_devices_and_files_of_the_host_it_is_run_with():
    start = TEXT.index("# docker run", TEXT.index("AS cuda"))
    command = TEXT[start : TEXT.index("mrl:npu", start)]
    for wanted in ("davinci$i", "davinci_manager", "devmm_svm", "hisi_hdc", "/etc/hccn.conf", "npu-smi", "memlock=-1"):
        assert wanted in command


def test_every_copied_path_exists():
    for line in instructions():
        if line.startswith("COPY ") and "--from" not in line:
            assert all((ROOT / word).exists() for word in line.split()[1:-1]), line


def test_hadolint_has_nothing_to_say():
    tool = shutil.which("hadolint")
    if tool is None:
        pytest.skip("hadolint is part of the dev extra; install it to run this")
    done = subprocess.run(
        [tool, "--no-color", str(ROOT / "Dockerfile")], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
