"""The commands of `mrl`, one file each. `add` registers a command's arguments and the function that runs it.

This is the highest layer: it may import every package, and none imports it. Packages below do the work. Here are
arguments, output and exit codes.
"""
