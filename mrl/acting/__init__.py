"""Tools and environments on which a model acts while it answers, in processes that can be killed, and what it says to
them.

    tool.py                  a typed Python function with a docstring as a tool: its schema, and checks of arguments
    environment.py           Environment, which begins with a response, acts on calls, and ends; tools are one of them
    builtin.py               the built-in tool calculator and the built-in environment guess_the_number
    search_tool.py           the built-in tool search, over an index in SQLite
    mcp_tools.py             tools of MCP servers, by the protocol's own client
    python_tool.py           the built-in tool python: a watched program in its own process and folder
    sandbox.py               that process: what it gives up before it runs the program
    system_calls.py          the system calls that it may still make
    text_arena.py            the built-in environment textarena: games of that package for one player
    named.py                 resolves names to built-in tools or a user's file, which runs in the worker alone
    verl_tools.py            replaces verl's modules in such a file: its decorator of tools, and
    verl_base_tool.py        its base class of tools and their schemas
    verl_tool_config.py      reads verl's file of tools
    verl_environment.py      the built-in environment verl_tools: such classes, with one action for each tool, and
                             replacements of verl's own classes
    environment_worker.py    the process: JSON lines in, JSON lines out
    warm.py                  a process that has loaded an agent, and forks one for each response
    kept_output.py           the beginning and the end of a program's output
    sandboxes/               commands in a root of their own, by bubblewrap, Docker and others; tasks with tests
    environment_pool.py      EnvironmentPool: calls and sessions from any thread or event loop, a deadline for each step
    offer.py                 what may be called in a run, and for one row
    answering.py             answers the calls of one response
    agent.py                 a user's agent in such a process, for one response
    harnesses.py             agents of others by name: their command lines and configurations
    plain_loop.py            one of them: a program with a shell, in Python's standard library
    verifiers_loop.py        another: plays environments of verifiers, in an interpreter that has them
    dialects.py              tool calls and answers in the form of a model's family: token ids in, token ids out
    chat_api.py              requests of chat clients, and answers in their form
    chat_turns.py            which part of a request is known already
    chat_text.py             makes tokens of the rest

Main types: ToolsSpec, Tool, Environment, EnvironmentPool, Acting, Dialect. Imports the standard library, numpy,
mrl.data, and mrl.reward, whose kind of processes it uses.
"""
