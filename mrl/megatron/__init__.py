"""One rank of the trained model on Megatron-core: model, forward and backward, optimizer, offload.

`MegatronActor` is the rank: `Splitter` cuts a batch into micro-batches, `MicroBatch` is one of them as the model
takes it, `Residence` knows what is on the device, `Routing` which experts were chosen. `bridge` reads and writes
Hugging Face weights. Imports `config`, `model`, `algo`, `data`, `record` and `platforms`, and alone knows mbridge.
"""
