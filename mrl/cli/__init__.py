"""The subcommands of `mrl`, a file each: `add` registers the arguments and the function that answers.

The highest floor: may import everything, and nobody imports it. What a command does is in the rooms below; here are its
arguments, what it prints and its exit code.
"""
