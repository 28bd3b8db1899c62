"""The configuration of a run: its keys, how it is composed of files, and which values go together.

`schema.RunConfig` is a whole run. Each key is declared once with its meaning, limits, advice and verl's name.
`load.load_config` returns a `ResolvedConfig` with the origin of every value. `rules.violations` lists what is wrong
with it. This package imports packages of layer 1 and no torch. It reads only configurations and, when asked to, the
files that they name.
"""
