"""What every caller of Ray's processes needs: deadlines, names of lost processes, their logs.

`gather` (calls.py) waits for answers and names the process that failed.
"""
