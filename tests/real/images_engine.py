"""One engine in this process: how far its log-probs of responses to prompts with images are from transformers', and how
often it looks at an image. See test_images_engine.

python images_engine.py MODEL_FOLDER OUT.json [trained]

If the tower is trained, a sync brings other weights of it: see `with_other_tower`.
"""

import hashlib
import json
import os
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "mrl",
    "VLLM_LOGGING_LEVEL": "WARNING", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from world import ROOT

from mrl.config.load import load_config
from mrl.data.image_reader import ImageReader
from mrl.data.samples import ImageStore
from mrl.engine.requests import Request, engine_settings
from mrl.model import load_model_spec
from mrl.model.layout import RolloutLayout
from mrl.model.trained_tower import NAMES
from mrl.model.vllm_parameters import target_parameters
from mrl.model.wrapped import VISION_TOWER
from mrl.rank.family_reference import own_names

Answer = tuple[list[int], list[float]]  # tokens and their log-probs
Answers = dict[str, Answer]  # by number of the prompt and seed
PRESET = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
ONE_RANK = [
    "actor.layout.world_size=1", "actor.layout.tensor_model_parallel_size=1",
    "actor.layout.expert_model_parallel_size=1", "actor.layout.sequence_parallel=false",
    "data.max_prompt_length=64", "data.max_response_length=8", "rollout.max_num_seqs=16",
]  # fmt: skip
# pixels of each image of a prompt, width and height
PROMPTS = (((64, 64),), (), ((96, 64), (64, 128)), ((64, 64),), ((128, 128),), ((40, 150), (96, 64)))
RESPONSES = 3  # to each prompt
TOLD = (21, 22, 23)  # what the model reads between two turns, with an image behind the first of them


def drawn(size: tuple[int, int]) -> bytes:
    numbers = np.random.default_rng(size[0]).integers(0, 256, (size[1], size[0], 3), np.uint8)
    out = BytesIO()
    Image.fromarray(numbers).save(out, "PNG")
    return out.getvalue()


def prompts_of(reader: ImageReader, config: dict, store: Path) -> list[Request]:
    rng = np.random.default_rng(0)
    begin, end = config["vision_start_token_id"], config["vision_end_token_id"]
    found = []
    for number, sizes in enumerate(PROMPTS):
        entries = [drawn(size) for size in sizes]
        known = reader.read_images(entries, store)
        reader.keep([(entries, store)], store, [image.name for image in known])
        ids = rng.integers(20, 90, 4).tolist()
        for _ in known:
            ids += [begin, reader.image_token, end, *rng.integers(20, 90, 2).tolist()]
        tokens, images = reader.expanded(ids, known)
        found.append(Request(number, tuple(tokens), number, images=images))
    return found


class Engine:
    """vLLM with mrl's arguments and the weights of the files."""

    def __init__(self, folder: Path, store: ImageStore, vision: str):
        self.spec = spec = load_model_spec(folder, vision)
        own = [f"model.path={folder}", f"model.vision={vision}", f"rollout.enable_prefix_caching={not spec.is_hybrid}"]
        config = load_config(PRESET, overrides=[*ONE_RANK, *own]).config
        arguments = dict(engine_settings(config, spec, 0, folder / "logs").arguments)
        arguments.pop("distributed_executor_backend")
        from vllm import LLM

        import mrl.engine.v0_32 as adapter
        from mrl.engine.image_inputs import WorkerImages
        from mrl.engine.receive import SlowPath, UpdateInfo
        from mrl.engine.tower import synced_part

        self.store = store
        self.engine = LLM(**arguments).llm_engine
        worker = self.engine.model_executor.driver_worker
        self.model = getattr(worker, "worker", worker).model_runner.get_model()
        self.adapter = adapter.ADAPTER
        self.synced = synced_part(self.model, self.engine.model_config)
        text = {name: tensor for name, tensor in own_names(folder).items() if not name.startswith(VISION_TOWER)}
        if spec.trained_tower is not None:
            text = own_names(folder)
        bucket = folder / "bucket"
        save_file(text, bucket)
        shapes = {name: list(tensor.shape) for name, tensor in text.items()}
        path = SlowPath(self.synced, self.engine.model_config, adapter.ADAPTER, shapes)
        path.start()
        path.receive(UpdateInfo(bucket=str(bucket), sha256=hashlib.sha256(bucket.read_bytes()).hexdigest()))
        path.finish()
        self.looked: list[int] = []  # images of each call of the tower
        images = WorkerImages(str(folder), store)
        self.model.images = self
        self._of = images.of

    def of(self, names: torch.Tensor, patches: list[int], own: list[int]) -> torch.Tensor:
        self.looked.append(len(own))
        return self._of(names, patches, own)

    def sync(self, weights: dict[str, torch.Tensor]) -> bool:
        """Writes all weights as a fast sync does. Returns whether the engine's kernels then hold what was written."""
        from mrl.engine.load_layout import LayerwiseWriter, layers_of
        from mrl.engine.loader_check import described
        from mrl.engine.read_back import held_digests

        targets = target_parameters(self.spec, RolloutLayout(), 0, "cpu", "float32")
        layers = layers_of(self.synced, self.adapter)
        identity = frozenset(t.name for t in targets if self.adapter.reads_by_identity(layers[t.module], t))
        writer = LayerwiseWriter(self.synced, self.engine.model_config, targets, self.adapter, identity)
        writer.begin()
        for module in dict.fromkeys(target.module for target in targets):
            for target in targets:
                if target.module == module:
                    writer.tensor(target.name).copy_(described(target, weights))
            writer.complete(module)
        writer.finish()
        held = held_digests(targets, lambda t: self.adapter.final_parts(self.synced, layers[t.module], t))
        return held == writer.shown

    def responses(self, requests: list[Request], seeds: int, words: list[int] | None = None) -> Answers:
        """Returns tokens and log-probs of responses. `words`: that alone may be sampled; None: all may."""
        from vllm import SamplingParams

        from mrl.engine.completions import engine_input
        from mrl.engine.image_inputs import image_input

        for request in requests:
            for seed in range(seeds):
                given = image_input(request) if request.images else engine_input(request)
                sampling = SamplingParams(
                    max_tokens=6, temperature=1.0, seed=seed, logprobs=0, detokenize=False, ignore_eos=True,
                    allowed_token_ids=words,
                )  # fmt: skip
                self.engine.add_request(f"{request.sample_id}:{seed}", given, sampling)
        found = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    answer = output.outputs[0]
                    ids = list(answer.token_ids)
                    scores = [of[token].logprob for of, token in zip(answer.logprobs, ids, strict=True)]
                    found[output.request_id.split("-")[0]] = ids, scores
        return found


def furthest(
    model: torch.nn.Module, reader: ImageReader, request: Request, answer: Answer, words: list[int] | None = None
) -> float:
    """Returns the largest difference of a response's log-probs from transformers', which takes every token of an image
    for a place of one: a word that occurs nowhere stands for those that were sampled, with their embedding.
    """
    ids, scores = answer  # of the last tokens there are scores
    token = reader.image_token
    whole = torch.tensor([[*request.prompt_ids, *ids]])
    twin = next(word for word in range(20, 100) if word not in whole)
    table = model.get_input_embeddings()
    table.weight.data[twin] = table.weight.data[token]
    kinds = torch.zeros_like(whole)
    seen = {}
    for image in request.images:
        kinds[0, image.start : image.start + image.tokens] = 1
    whole[(whole == token) & (kinds == 0)] = twin
    if request.images:
        pixels = torch.cat([torch.from_numpy(reader.pixels(image.name)) for image in request.images])
        seen = {"pixel_values": pixels, "image_grid_thw": torch.tensor([image.grid for image in request.images])}
    with torch.no_grad():
        logits = model(input_ids=whole, mm_token_type_ids=kinds, **seen).logits[0]
    if words is not None:
        others = torch.ones(logits.shape[-1], dtype=torch.bool)
        others[words] = False
        logits[:, others] = -torch.inf
    of_last = torch.tensor(ids[-len(scores) :])[:, None]
    expected = logits.log_softmax(-1)[-len(scores) - 1 : -1].gather(-1, of_last)[:, 0]
    return float((expected - torch.tensor(scores)).abs().max())


def with_other_tower(engine: Engine, requests: list[Request], folder: Path, reader: ImageReader) -> dict:
    """After a sync of a tower with other weights: log-probs of responses with the features that the engine kept, and
    with new ones.
    """
    from transformers import AutoModelForImageTextToText

    engine.responses(requests, 1)
    weights = {name: tensor.clone() for name, tensor in own_names(folder).items()}
    random = torch.Generator().manual_seed(2)
    for name, tensor in weights.items():
        if name.startswith(VISION_TOWER):
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=random))
    found = {"held": engine.sync(weights)}
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tower = reference.model.visual
    tower.load_state_dict({name: weights[NAMES + name] for name, _ in tower.named_parameters()})
    table = reference.get_input_embeddings()
    table.weight = torch.nn.Parameter(table.weight.detach().clone())  # the output layer's may be the same
    own_table = table.weight.detach().clone()

    def gaps() -> list[float]:
        engine.engine.reset_prefix_cache()
        gaps = []
        for name, answer in engine.responses(requests, 1).items():
            table.weight.data.copy_(own_table)
            gaps.append(furthest(reference, reader, requests[int(name.split(":")[0])], answer))
        return gaps

    found["stale"] = gaps()
    engine.engine.reset_encoder_cache()
    return found | {"gaps": gaps()}


def main(folder: Path, out: Path, vision: str = "frozen") -> None:
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(1)
    store = ImageStore(str(folder / "images"), 1 << 20)
    reader = ImageReader.of(str(folder), store)
    config = json.loads((folder / "config.json").read_text())
    requests = prompts_of(reader, config, Path(store.folder))
    engine = Engine(folder, store, vision)
    if vision == "trained":
        out.write_text(json.dumps(with_other_tower(engine, requests, folder, reader)))
        return
    together = engine.responses(requests, RESPONSES)
    of_images = [config[name] for name in ("image_token_id", "video_token_id", "vision_start_token_id")]
    looked = sum(engine.looked)
    alone = {}
    for request in requests:
        alone |= engine.responses([request], 1)
    sampled = engine.responses(requests, 1, of_images)
    begin, end = config["vision_start_token_id"], config["vision_end_token_id"]
    told, shown = reader.expanded([TOLD[0], begin, reader.image_token, end, *TOLD[1:]], reader.take([drawn((96, 128))]))
    behind = {name: [*ids, *told] for name, (ids, _) in sampled.items()}
    turns = []
    for request in requests:
        said = len(request.prompt_ids) + len(behind[f"{request.sample_id}:0"]) - len(told)
        images = (*request.images, *(replace(image, start=said + image.start) for image in shown))
        ids = (*request.prompt_ids, *behind[f"{request.sample_id}:0"])
        turns.append(replace(request, prompt_ids=ids, images=images))
    later = engine.responses(turns, 1)
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    table = reference.get_input_embeddings()
    table.weight = torch.nn.Parameter(table.weight.detach().clone())  # the output layer's may be the same
    own_table = table.weight.detach().clone()
    gaps = []
    for asked, answers, words in ((requests, together, None), (requests, sampled, of_images), (turns, later, None)):
        for name, answer in answers.items():
            table.weight.data.copy_(own_table)
            gaps.append(furthest(reference, reader, asked[int(name.split(":")[0])], answer, words))
    same = all(alone[name] == together[name] for name in alone)
    out.write_text(json.dumps({"gaps": gaps, "alone": same, "looked": looked}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
