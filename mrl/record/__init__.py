"""What a run leaves behind and shows: the run directory, metrics.jsonl, samples, the console and loggers.

`metrics.yaml` is the table of every metric (name, reduction, unit, meaning, how to read it), which `spec.py` reads
without torch. Main types: RunDir, Record with its Views, MetricSpec. metrics.jsonl is the record and must be written;
each view has a thread of its own and can neither stop training nor delay it. May import: mrl.errors, and
mrl.data.samples, whose rows metrics and files are read off.
"""
