"""One rank of the trained model, in its own process: the rows of a step, and the model on Megatron-core.

`ActorWorker` is the Ray actor. `RankStep` is a step in its order, `RankBatch` has the rank's rows of it, and
`MegatronActor` the model: forward and backward, optimizer, offload. `Exchange` brings numbers a row of all ranks
together. `Splitter` cuts a batch into micro-batches, and `MicroBatch` is one of them as the model takes it. `Residence`
tracks what is on the device, and `Routing` which experts were chosen. `bridge` reads and writes Hugging Face weights. A
rank writes its part of a checkpoint with `rank_save` and reads it with `rank_load`. No other package imports Megatron
or mbridge. May import store, process, checkpoint, reshard and lower layers. Inside this package `import megatron` means
the upstream package. balance.py, cut.py, packing.py and row_results.py are numpy alone: the driver cuts a step by them.
"""
