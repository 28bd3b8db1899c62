"""Bytes per rank and phase, from sizes alone: parameters, gradients, optimizer, activations, engines. No torch."""
