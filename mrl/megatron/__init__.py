"""One rank of the trained model on Megatron-core: built, loaded, forward and backward, optimizer, what is on the device and what is not.

`MegatronActor` is the rank: `Splitter` cuts a batch into micro-batches, `MicroArrays` are one of them as the model takes it, `Residence`
knows what is on the device, `Routing` which experts were chosen. `bridge` reads and writes Hugging Face weights.
Imports `config`, `model`, `algo`, `data` and `platforms`, and alone knows mbridge.
"""
