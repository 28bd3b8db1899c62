"""Carries a response from the engine that made it to the gradient that it gives.

A response's way; in brackets the file that holds each type:

    engine's process      Response           columns of tokens and numbers             [data/samples.py: Samples]
         | finished rows (outbox.py), blocks by reference (request_streams.py)
    driver                FinishedResponses  what one engine finished together         [request_streams.py]
         | judged where it lies (scoring.py), waits for its group and its step
    driver                ResponseStore      blocks in object stores, numbers here     [response_store.py]
         | rows dealt to replicas from their lengths
    driver                StepBatch          the handle of a step on all ranks         [step_batch.py]
         | references; the rank fetches its rows once, its part of the routes (routes.py)
    rank                  RankBatch          tokens, and what is computed of each      [rank_batch.py]
         | packed and cut for context parallelism
    rank                  MicroBatch         what one forward pass takes               [megatron/packing.py]
         | the model's outputs, as whole sequences
    rank                  LossInputs         what a loss sees: [batch, response]       [algo/losses.py]

Back come numbers a row alone: RankBatch makes them of its tokens, StepBatch puts all replicas' into the step's order.
Tokens never pass through the driver. Files are written from where the responses lie too (sample_writer.py,
group_writer.py, generations.py).

A row is one prompt and one response. Of one that was made in several turns (conversations.py, in the engine's process)
a column says which tokens were sampled and which are context, and context counts in nothing that is made of tokens.
The model talks with partners (partners.py): tools and environments, or an agent (agents.py) that speaks to it over
HTTP (endpoint.py).

May import vllm, megatron, checkpoint, remote, config and what lies below them; never cluster, which uses this room.
"""
