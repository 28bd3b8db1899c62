"""Reads rows of files and makes prompts of them in an order. Holds what travels between the phases of a step.

`PromptDataset` holds validated, tokenised `Prompt`s, and `PromptStream` gives batches of them at a `DataCursor`.
Responses are rows of `Samples`. A `TrainBatch` is a step's samples with the inputs of the loss. `prepare` turns public
data sets into verl's schema.

numpy and pyarrow only, no torch. May import `errors`.
"""
