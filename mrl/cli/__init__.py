"""The commands of `mrl`, one file each. `add` registers a command's arguments and the function that runs it.

This is the highest floor: it may import every room, and no room imports it. Rooms below do the work. Here stand
arguments, output and exit codes.
"""
