"""Responses where they were generated, and references to them: the way from the engine to the gradient.

The steps of a response, with the file of each type in brackets:

    engine's process      Response           columns of tokens and numbers             [data/samples.py: Samples]
         | finished rows (engine/outbox.py), blocks by reference (cluster/request_streams.py)
    driver                FinishedResponses  what one engine finished together         [cluster/request_streams.py]
         | judged where it lies (cluster/scoring.py), waits for its group and its step
    driver                ResponseStore      blocks in object stores, numbers here     [store/response_store.py]
         | rows dealt to replicas from their lengths
    driver                StepBatch          the handle of a step on all ranks         [driver/step_batch.py]
         | references; the rank fetches its rows once, its part of the routes (store/routes.py)
    rank                  RankBatch          tokens, and what is computed of each      [rank/rank_batch.py]
         | packed and cut for context parallelism
    rank                  MicroBatch         what one forward pass takes               [rank/packing.py]
         | the model's outputs, as whole sequences
    rank                  LossInputs         what a loss sees: [batch, response]       [algo/losses.py]

Only numbers a row come back. RankBatch computes them from its tokens, StepBatch puts those of all replicas into the
step's order. Tokens never pass through the driver. Files are written where the responses are stored, too
(driver/sample_writer.py, generate/group_writer.py, cluster/generations.py).

A row is one prompt and one response. A response may have several turns (engine/conversations.py). A column then says
which tokens were sampled and which are context. Context counts in nothing that is computed from tokens. The model talks
with partners (engine/partners.py): tools and environments, or an agent (engine/agents.py) that talks to it over HTTP.
"""
