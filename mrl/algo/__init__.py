"""The mathematics of the algorithm as pure functions of tensors and arrays: no Ray, no Megatron, no configuration.

`spec.py` is the torch-free table of names that configuration and docs read. Implementations bind to these names. The
main types are AdvantageInputs, LossInputs and LossOutput with PolicyLossParameters, and CorrectionParameters. Losses
and KL are in torch; what the driver computes is in numpy. May import: mrl.errors.
"""
