"""Carries a response from the engine that made it to the gradient that comes from it.

The steps of a response, with the file of each type in brackets:

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

Only numbers a row come back. RankBatch computes them from its tokens, StepBatch puts those of all replicas into the
step's order. Tokens never pass through the driver. Files are written where the responses are stored, too
(sample_writer.py, group_writer.py, generations.py).

A row is one prompt and one response. A response may have several turns (conversations.py, in the engine's process). A
column then says which tokens were sampled and which are context. Context counts in nothing that is computed from
tokens. The model talks with partners (partners.py): tools and environments, or an agent (agents.py) that talks to it
over HTTP (endpoint.py).

This room may import vllm, megatron, checkpoint, remote, config and rooms below them. It must not import cluster, which
uses it.
"""
