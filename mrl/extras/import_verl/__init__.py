"""Reading verl's launch scripts into configurations of ours. Nothing of a script is ever run."""
