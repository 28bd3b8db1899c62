"""The subcommands of `mrl`, a file each: `add` registers the arguments and the function that answers."""
