"""What stands around the trainer, for people before, beside and after a run. A reader who wants the trainer opens
none of it.

`import_verl` turns a script into an `Import`, whose YAML is a configuration of ours; `torch_dist` reads and writes
files of that format; `rehearse` runs a configuration in small before a cluster is rented; `report` makes pages of run
directories; `doctor` judges a host; `search` finds layouts that fit, and `first_config` writes one. May import every
room but `cli`; no room but `cli` may import it.
"""
