"""The reshard engine: every weight from the trainer's source shards straight into the engines' target parameters.

Planning half, without torch: `ReshardPlan` (plan.py) of `Copy` and `Message` (messages.py), checked by faults.py.
Wire half: `Sender` and `Receiver` (execute.py) over a `SendingEnd` and a `ReceivingEnd` (transport.py).
May import config, model, record, platforms and errors. Knows boxes and names, not what the names stand for.
"""
