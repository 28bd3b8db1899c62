"""From files of rows to prompts in an order, and what travels between the phases of a step.

`PromptDataset` holds validated, tokenised `Prompt`s; `PromptStream` gives batches of them at a `DataCursor`. Responses
are rows of `Samples`, and a `TrainBatch` is a step's samples with what a loss takes of them.
`prepare` turns public data sets into verl's schema. A `Dialect` reads calls of tools from token ids and writes answers.
Chat clients: `chat_api` reads their requests and writes answers, `chat_turns` finds what of a request is kept, and
`chat_text` makes tokens of what is new.
Plain numpy and pyarrow, no torch. May import `errors`.
"""
