"""The configuration of a run: which keys there are, how a run is composed of files, and which values go together.

`schema.RunConfig` is a whole run, each key stated once with its meaning, limits, advice and verl's name;
`load.load_config` gives a `ResolvedConfig` with the origin of every value; `rules.violations` lists what is wrong with
it. It imports rooms of floor 1 and no torch, and reads no file but configurations and, when told to, those that they
name.
"""
