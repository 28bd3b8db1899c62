"""Reads rows of files and makes prompts of them in an order. Holds what travels between the phases of a step.

`PromptDataset` holds validated, tokenised `Prompt`s, and `PromptStream` gives batches of them at a `DataCursor`.
Responses are rows of `Samples`. A `TrainBatch` is a step's samples with the inputs of the loss.

`prepare` turns public data sets into verl's schema. A `Dialect` reads tool calls from token ids and writes the answers.
For chat clients, `chat_api` reads their requests and writes answers. `chat_turns` finds which part of a request is
known already, and `chat_text` makes tokens of the rest.

numpy and pyarrow only, no torch. May import `errors`.
"""
