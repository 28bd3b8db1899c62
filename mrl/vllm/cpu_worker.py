"""The worker of vLLM's CPU engines (worker_cls, set by mrl.platforms.hosting)."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class CpuWorker(CPUWorker):
    """vLLM's CPU worker, and what the platform lacks."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        parallel = self.parallel_config
        if parallel.data_parallel_size > 1 or parallel.enable_expert_parallel:
            from mrl.vllm.cpu_parallel import install

            install()
