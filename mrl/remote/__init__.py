"""What every caller of Ray's processes needs: deadlines, names of who is lost, their logs.

`gather` (calls.py) waits for answers and names who failed.
"""
