"""Tools around the trainer, for use before, beside and after a run. The trainer itself can be read without them.

`import_verl` turns a script into an `Import`, whose YAML is an mrl configuration. `torch_dist` reads and writes
files of that format. `rehearse` runs a configuration in small before a cluster is rented. `report` makes pages of run
directories. `doctor` checks a host. `search` finds layouts that fit, and `first_config` writes a configuration. May
import every room except `cli`; no room except `cli` may import it.
"""
