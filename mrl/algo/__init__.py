"""The mathematics of the algorithm as pure functions of tensors and arrays; no Ray, no Megatron, no configuration.

`spec.py` is the torch-free table of names that configuration and docs read; implementations bind to it. Main types:
AdvantageInputs, LossInputs and LossOutput with PolicyLossParameters, CorrectionParameters. Losses and KL are torch,
what the driver computes is numpy. May import: mrl.errors.
"""
