"""Generates what the driver trains on, in the driver's process, by a thread of its own.

`Generation` sends requests and takes responses and rewards, and the loop takes whole batches of groups. `Rollouts` has
the data of one step. `Responder` turns prompts into scored responses. Groups that are finished or under way go to
checkpoints (kept_groups.py), and to the disk for a start after a kill (spool.py). May import cluster and lower layers.
"""
