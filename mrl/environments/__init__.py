"""What a model acts on while it answers: tools and environments, in processes that can be killed.

    tool.py                  a typed Python function with a docstring as a tool: its schema, arguments against it
    environment.py           Environment, which is begun for a response, acted on by calls, ended; tools as one of them
    builtin_tools.py         tools that are shipped: calculator
    search_tool.py           the shipped tool search, over an index in SQLite
    python_tool.py           the shipped tool python: a program in a process and a folder of its own, watched
    sandbox.py               that process: what it gives up before it runs the program
    system_calls.py          the system calls that are left to it
    builtin_environments.py  environments that are shipped: guess_the_number
    text_arena.py            the shipped environment textarena: games of that package for one player
    named.py                 names, of shipped ones or of a user's file, to them; that file runs in the worker alone
    verl_tools.py            what stands in for verl's modules in such a file: its decorator of tools, and
    verl_base_tool.py        its base class of tools and their schemas
    verl_tool_config.py      verl's file of tools, read
    verl_stand_ins.py        what stands in for verl's own classes of tools
    verl_environment.py      the shipped environment verl_tools: such classes, an action a tool
    environment_worker.py    the process: JSON lines in, JSON lines out
    environment_pool.py      EnvironmentPool: calls and sessions from any thread or event loop, a deadline a step
    offer.py                 what may be called in a run, and what of it one row names
    acting.py                who answers the calls of one response
    agent.py                 an agent of the user's as such a process has it, for one response

Main types: ToolsSpec, Tool, Environment, EnvironmentPool, Acting. Imports the standard library only, and may import
mrl.reward, whose processes these are.
"""
