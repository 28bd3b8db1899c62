"""What every process of a run has of its own: its log, places and ports, its software, its sight of the run
directory.
"""
