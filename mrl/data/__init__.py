"""From files of rows to prompts in an order, and what travels between the phases of a step.

`PromptDataset` holds validated, tokenised `Prompt`s; `PromptStream` gives batches of them at a `DataCursor`. Responses
are `Sample`s, and `TrainBatch` is a step's samples as arrays. `prepare` turns public data sets into verl's schema.
Plain numpy and pyarrow, no torch. May import `errors`.
"""
