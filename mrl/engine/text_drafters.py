"""Imports vLLM 0.32's models that draft for Qwen3.5 where torchvision is not installed (see text_models.py)."""

from mrl.engine.text_models import empty_torchvision

with empty_torchvision():
    from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MoeMTP, Qwen3_5MTP

__all__ = ["Qwen3_5MTP", "Qwen3_5MoeMTP"]
