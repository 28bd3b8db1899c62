"""`mrl explain`: finds the step at which a run broke, computes it again from what is stored, and says why.

band.py         metrics of the run --> first step that leaves the run's own band
evidence.py     what the step's stored samples say by themselves
replay.py       checkpoint before it --> ranks compute the steps again, without Ray and engines; equal bits or not.
                One rank's process is driver/replay_rank.py
experiments.py  what is changed, one thing at a time, and how much of the break each change removes
by_transformers.py  engines and ranks against transformers, and where a fresh engine's layers begin to differ
explain.py      all of it, as ordered verdicts
"""
