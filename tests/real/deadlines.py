"""How long a test waits. What hangs has to end; speed is not judged: a machine at a quarter of its speed passes."""

TEST_S = 1500  # a test with all it starts
RUN_S = 600.0  # a whole run, a program of ranks, or a run's way to a step
END_S = 180.0  # a run, a job or a process that was told to end; a command that starts nothing
