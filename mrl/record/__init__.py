"""What a run records and shows: the run directory, metrics.jsonl, samples, the console and loggers.

`metrics.yaml` is the table of all metrics (name, reduction, unit, meaning, how to read it). `spec.py` reads it without
torch. Main types: RunDir, Record with its Views, MetricSpec. metrics.jsonl is the record and must be written. Each view
has a thread of its own and can neither stop nor delay training. May import mrl.errors, and mrl.data.samples for the
rows that metrics and files are made of.
"""
