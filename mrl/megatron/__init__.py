"""One rank of the trained model on Megatron-core: model, forward and backward, optimizer, offload.

`MegatronActor` is the rank. `Splitter` cuts a batch into micro-batches, and `MicroBatch` is one of them as the model
takes it. `Residence` tracks what is on the device, and `Routing` which experts were chosen. `bridge` reads and writes
Hugging Face weights. The package imports `config`, `model`, `algo`, `data`, `record` and `platforms`. No other package
uses mbridge.
"""
