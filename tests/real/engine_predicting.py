"""An engine that drafts gets an update as a plan describes it: `python engine_predicting.py FOLDER OTHER answers`.
See test_engine_drafts. With `fp8` as the third word the engine holds words and scales of what the folders have, and
with any other it answers nothing.

OTHER has the weights of the update. Prints JSON: parameters whose digests differ from the sent ones, what an update
without the predicting layer says, and answers, with what was drafted for them.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config

from mrl.checkpoint.open_checkpoint import open_hf, weight_role
from mrl.engine.drafter import ModelThatDrafts, drafting_model
from mrl.engine.engine_state import AWAITED
from mrl.engine.handshake import check_engine
from mrl.engine.load_layout import LayerwiseWriter, layers_of
from mrl.engine.read_back import held_digests, hf_block
from mrl.engine.receive import register
from mrl.engine.v0_32 import ADAPTER
from mrl.model import load_model_spec, tensor_specs
from mrl.model.boxes import Box
from mrl.model.hf_config import QUANTIZATION
from mrl.model.layout import RolloutLayout
from mrl.model.megatron_shards import Piece
from mrl.model.quantised import engine_quantisation, quantised_tensors
from mrl.model.vllm_parameters import target_parameters
from mrl.rank.rank_load import fill
from mrl.reshard.quantise import quantised

DRAFTED = 2
FP8_BLOCK = 32


def main(folder: Path, other: Path, asked: str) -> dict:
    register()
    model = load_model_spec(folder).holding(True)
    block = FP8_BLOCK if asked == "fp8" else 0
    dtype = "bfloat16" if block else "float32"
    held_as = {}
    if block:
        held_as = {"load_format": AWAITED, "hf_overrides": {QUANTIZATION: engine_quantisation(model, block)}}
    llm = LLM(
        str(folder), dtype=dtype, **held_as, enforce_eager=True, max_model_len=128, max_num_seqs=8,
        skip_tokenizer_init=True,
        generation_config="vllm", logprobs_mode="processed_logprobs", disable_log_stats=False,
        worker_cls="mrl.engine.cpu_worker.CpuWorker", enable_prefix_caching=not model.is_hybrid,
        speculative_config={
            "method": "mtp", "num_speculative_tokens": DRAFTED,
            "draft_load_config": {"load_format": held_as.get("load_format", "auto")},
        },
    )  # fmt: skip
    worker = worker_of(llm)
    runner = worker.model_runner
    whole = ModelThatDrafts(runner.get_model(), drafting_model(runner))
    targets = target_parameters(model, RolloutLayout(1, 1), 0, "cpu", dtype, block)
    words = quantised_tensors(model) if block else ()
    tensors = {
        part: values
        for name, tensor in stored(other).items()
        for part, values in quantised(name, tensor.bfloat16() if name in words else tensor, words, block)
    }
    report = {}
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        check_engine(whole, SimpleNamespace(model=model, fp8_block=block), targets, ADAPTER)
        writer = LayerwiseWriter(whole, worker.model_config, targets, ADAPTER, by_identity(whole, targets))
        update(writer, targets, tensors)
        layers = layers_of(whole, ADAPTER)
        held = held_digests(targets, lambda t: ADAPTER.final_parts(whole, layers[t.module], t))
        report["differing"] = [name for name in held if held[name] not in (writer.received[name], writer.shown[name])]
        report["drafting"] = sum(name.startswith("drafts.") for name in held)
        policy = [target for target in targets if not target.name.startswith("drafts.")]
        stale = LayerwiseWriter(whole, worker.model_config, targets, ADAPTER)
        try:
            update(stale, policy, tensors)
        except RuntimeError as error:
            report["stale"] = str(error)
        stale.abandon()
        try:
            check_engine(whole, SimpleNamespace(model=model, fp8_block=block), policy, ADAPTER)
        except RuntimeError as error:
            report["unplanned"] = str(error)
        update(LayerwiseWriter(whole, worker.model_config, targets, ADAPTER), targets, tensors)
    return report | (answers(llm) if asked in ("answers", "fp8") else {})


def by_identity(whole, targets) -> frozenset[str]:
    layers = layers_of(whole, ADAPTER)
    return frozenset(t.name for t in targets if ADAPTER.reads_by_identity(layers[t.module], t))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, as ranks would read them."""
    source = open_hf(folder, predicting=True)
    reader = source.reader()
    tensors = {}
    for spec in tensor_specs(source.model):
        tensors[spec.name] = torch.empty(spec.shape)
        whole = Box.whole(spec.shape)
        fill(reader, weight_role(spec), [Piece(spec.name, whole, whole)], tensors[spec.name])
    reader.close()
    return tensors


def update(writer: LayerwiseWriter, targets, tensors: dict[str, torch.Tensor]) -> None:
    modules = defaultdict(list)
    for target in targets:
        modules[target.module].append(target)
    writer.begin()
    for module, own in modules.items():
        for target in own:
            into = writer.tensor(target.name)
            for piece in target.pieces:
                hf_block(into, piece).copy_(tensors[piece.hf_name][piece.hf_box.slices])
        writer.complete(module)
    writer.finish()


def answers(llm: LLM) -> dict:
    prompts = [{"prompt_token_ids": [5 + n, 7, 9, 11, 13, 20 - n]} for n in range(8)]
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=1, logprobs=0, detokenize=False, ignore_eos=True)
    found = []
    firsts = first_drafts(llm)
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        answer = output.outputs[0]
        log_probs = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
        found.append([list(output.prompt_token_ids), list(answer.token_ids), log_probs])
    counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    drafted, accepted = (counts[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    return {"answers": found, "drafted": drafted, "accepted": accepted, "firsts": firsts}


def first_drafts(llm: LLM) -> list[tuple[list[int], int]]:
    """A list that gets, for each request and step from here on, the tokens known and the first one drafted behind them.

    The tokens of a step are noted when the next one drafts.
    """
    runner = worker_of(llm).model_runner
    propose = runner.propose_draft_token_ids
    firsts = []
    drafted = {}

    def noting(*arguments, **named):
        drafts = propose(*arguments, **named)
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            known = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist()
            if name in drafted:
                firsts.append((known, drafted[name]))
            drafted[name] = int(drafts[row][0])
        return drafts

    runner.propose_draft_token_ids = noting
    return firsts


def worker_of(llm: LLM):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))
