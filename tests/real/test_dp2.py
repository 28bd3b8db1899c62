"""Two data-parallel ranks of one engine, on CPU, for real: what works and what does not with vLLM 0.32.

Both ranks start and hold their weights. Generation of an MoE ends with `NotImplementedError`: the layer spreads tokens over the ranks with
`all_gatherv`, which vLLM's CPU communicator does not have. When this test fails because generation works, take the check in
mrl/doctor/engine.py and the row of mrl/config/capabilities.py away.
"""

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from world import make_world, overrides

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def run(folder: Path, rank: int, port: int) -> None:
    """One data-parallel rank behind a front end of its own, as mrl.rollout.launch says."""
    from mrl.config.load import load_config
    from mrl.errors import Interrupted
    from mrl.platforms.hosting import get_hosting
    from mrl.rollout.engine import VllmEngine
    from mrl.rollout.launch import engine_launches
    from mrl.rollout.settings import engine_settings
    from mrl.rollout.types import Request, Sampling

    preset = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
    settings = overrides(folder / "world", cluster__n_gpus_per_node=4)[1::2]
    launch = engine_launches(load_config(preset, None, [*settings, "rollout.data_parallel_size=2"]).config)[rank]
    assert launch.data_rank == rank and launch.bundles == (1,)
    alone = engine_settings(load_config(preset, None, settings).config, 0, folder / f"rank-{rank}")
    arguments = alone.arguments | launch.at("127.0.0.1", port).arguments
    os.environ.update(get_hosting("cpu").engine_environment(0, 1, 1, 1) | {"VLLM_CPU_OMP_THREADS_BIND": str(rank)})
    engine = VllmEngine(dataclasses.replace(alone, arguments=arguments, check_order=False))

    async def go() -> None:
        try:
            await engine.start()
            print("STARTED", len(await engine.fingerprints()) > 0, flush=True)
            try:
                async for _ in engine.generate([Request(0, (1, 2, 3), 0)], Sampling(1.0, 4, ())):
                    print("GENERATED", flush=True)
            except Interrupted:
                print("DIED", flush=True)
        finally:
            await engine.stop()

    asyncio.run(go())


def test_an_engine_of_two_data_parallel_ranks_loads_on_cpu_and_cannot_generate(tmp_path):
    make_world(tmp_path / "world")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    ranks = []
    for rank in range(2):
        (tmp_path / f"rank-{rank}").mkdir()
        words = [sys.executable, __file__, str(tmp_path), str(rank), str(port)]
        ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        for process in ranks:
            said, _ = process.communicate(timeout=240)
            assert "STARTED True" in said, said[-3000:]
            assert "GENERATED" not in said and "DIED" in said, said[-3000:]
            assert "all_gatherv" in said and "NotImplementedError" in said
    finally:
        for process in ranks:
            process.kill()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
