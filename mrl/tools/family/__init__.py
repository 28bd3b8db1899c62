"""Checks that a model family is right: `mrl family check`."""
