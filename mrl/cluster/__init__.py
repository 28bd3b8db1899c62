"""The run on a Ray cluster, seen from the driver: one actor for each Megatron rank and each vLLM engine, and calls to
them.

`ActorGroup` and `RolloutGroup` are the driver's handles. `WeightSync` syncs the engines to the trainer's weights.
`RequestStreams` takes responses as they come back, `ScorerGroup` has them scored where they are stored. `gather`
(calls.py) waits for answers and names the process that failed. The actors themselves are in rank/ and engine/.
prerequisites.py and job.py import neither Ray nor torch.
"""
