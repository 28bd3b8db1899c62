"""The reshard engine moves every weight from the trainer's shards straight into the engines' parameters.

Planning half, without torch: `ReshardPlan` (plan.py) of `Copy` and `Message` (messages.py), checked by faults.py, and
the order of a sync's actions (actions.py). Wire half: `Sender` and `Receiver` (execute.py) over a `SendingEnd` and a
`ReceivingEnd` (transport.py). May import config, model, record, platforms and errors. It knows boxes and names, but not
their meaning.
"""
