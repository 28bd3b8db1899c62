"""mrl: reinforcement learning of large mixture-of-experts language models on Megatron."""

__version__ = "0.1.0"
