"""The run on a Ray cluster: one actor for each Megatron rank and each vLLM engine, and the calls to them.

`ActorGroup` and `RolloutGroup` are the driver's handles. `WeightSync` syncs the engines to the trainer's weights.
Workers take and return small plain data. May import flow, remote, vllm, megatron, checkpoint, plan, reshard and lower
floors. prerequisites.py and job.py import neither Ray nor torch.
"""
