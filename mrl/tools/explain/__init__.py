"""`mrl explain`: finds the step at which a run broke, computes it again from what is stored, and says why.

band.py          metrics of the run --> first step that leaves the run's own band
stored_step.py   a step's file of samples --> what ranks are given of it
replay.py        checkpoint before it --> ranks compute the steps again, without Ray and engines; equal bits or not
replay_rank.py   what one rank's process does of that, and of the experiments
experiments.py   what is changed, one thing at a time, and what to conclude of it
explain.py       all of it, as one verdict
"""
