"""The reshard engine: every weight from the source shards of the trainer straight into the target parameters of the engines.

Planning half, without torch: `ReshardPlan` (plan.py) of `Copy` and `Message` (messages.py), proved by faults.py and proof.py.
Wire half: `Sender` and `Receiver` (execute.py) over a `SendingEnd` and a `ReceivingEnd` (transport.py), checked by digest.py.
May import config, model, record, platforms and errors. Knows boxes and names; what the names stand for, `model` says.
"""
