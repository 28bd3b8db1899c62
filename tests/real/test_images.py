"""Rows with images have transformers' log-probs and gradients on the ranks in every layout: with none, one and two
images of different sizes in one batch. The tower is transformers' own.
"""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from mrl.model import model_spec
from mrl.model.registry import family_of, known_hf_config, own_config
from mrl.rank.family_reference import compute
from mrl.tools.family.check import GRADIENTS, LOG_PROBS, run_config
from mrl.tools.family.drawn import small_config
from mrl.tools.rehearse.small_tower import whole_config

pytestmark = pytest.mark.real

TP, PP, CP, EP = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size",
)  # fmt: skip
# a model of each family whose text model it is
MODELS = {"vl-moe": "Qwen3-30B-A3B", "vl": "Qwen3-0.6B", "2.5-vl": "Qwen2.5-0.5B", "3.5": "Qwen3.5-27B",
          "3.5-moe": "Qwen3.5-35B-A3B"}  # fmt: skip
PADDED = {"use_remove_padding": False}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# name -> (model, ranks, degrees, the actor's settings, overrides of Megatron's); the tower is trained where the name
# says so
CASES = {
    "moe": ("vl-moe", 1, {}, {}, {}),
    "moe-padded": ("vl-moe", 1, {}, PADDED, {}),
    "moe-recomputed": ("vl-moe", 1, {}, {"ppo_micro_batch_size_per_gpu": 2}, RECOMPUTED),
    "dense": ("vl", 1, {}, {}, {}),
    "2.5": ("2.5-vl", 1, {}, {}, {}),
    "3.5": ("3.5", 1, {}, {}, {}),
    "3.5-moe": ("3.5-moe", 1, {}, {}, {}),
    "moe-tp2": ("vl-moe", 2, {TP: 2}, {}, {}),
    "moe-tp2-padded": ("vl-moe", 2, {TP: 2}, PADDED, {}),
    "moe-pp2": ("vl-moe", 2, {PP: 2}, {}, {}),
    "moe-pp2-recomputed": ("vl-moe", 2, {PP: 2}, {"ppo_micro_batch_size_per_gpu": 2}, RECOMPUTED),
    "moe-ep2": ("vl-moe", 2, {EP: 2}, {}, {}),
    "moe-cp2": ("vl-moe", 2, {CP: 2}, {}, {}),
    "dense-dp2": ("vl", 2, {}, {}, {}),
    "dense-tp2": ("vl", 2, {TP: 2}, {}, {}),
    "2.5-tp2": ("2.5-vl", 2, {TP: 2}, {}, {}),
    "2.5-cp2": ("2.5-vl", 2, {CP: 2}, {}, {}),
    "3.5-moe-tp2": ("3.5-moe", 2, {TP: 2}, {}, {}),
    "3.5-moe-pp2": ("3.5-moe", 2, {PP: 2}, {}, {}),
    "moe-tp2-pp2-ep2": ("vl-moe", 4, {TP: 2, PP: 2, EP: 2}, {}, {}),
    "moe-tp2-cp2": ("vl-moe", 4, {TP: 2, CP: 2}, {}, {}),
    "moe-pp2-cp2": ("vl-moe", 4, {PP: 2, CP: 2}, {}, {}),
    "moe-trained": ("vl-moe", 1, {}, {}, {}),
    "moe-projector": ("vl-moe", 1, {}, PADDED, {}),
    "moe-recomputed-trained": ("vl-moe", 1, {}, {"ppo_micro_batch_size_per_gpu": 2}, RECOMPUTED),
    "dense-trained": ("vl", 1, {}, {}, {}),
    "2.5-trained": ("2.5-vl", 1, {}, {}, {}),
    "2.5-projector": ("2.5-vl", 1, {}, {}, {}),
    "3.5-trained": ("3.5", 1, {}, {}, {}),
    "3.5-moe-trained": ("3.5-moe", 1, {}, {}, {}),
    "moe-tp2-trained": ("vl-moe", 2, {TP: 2}, {}, {}),
    "dense-tp2-trained": ("vl", 2, {TP: 2}, {}, {}),
    "dense-tp2-whole-trained": ("vl", 2, {TP: 2, "sequence_parallel": False}, {}, {}),
    "moe-pp2-trained": ("vl-moe", 2, {PP: 2}, {}, {}),
    "moe-pp2-recomputed-projector": ("vl-moe", 2, {PP: 2}, {"ppo_micro_batch_size_per_gpu": 2}, RECOMPUTED),
    "moe-ep2-trained": ("vl-moe", 2, {EP: 2}, {}, {}),
    "moe-cp2-trained": ("vl-moe", 2, {CP: 2}, {}, {}),
    "dense-dp2-trained": ("vl", 2, {}, {}, {}),
    "2.5-tp2-trained": ("2.5-vl", 2, {TP: 2}, {}, {}),
    "2.5-cp2-trained": ("2.5-vl", 2, {CP: 2}, {}, {}),
    "3.5-moe-tp2-trained": ("3.5-moe", 2, {TP: 2}, {}, {}),
    "3.5-moe-pp2-trained": ("3.5-moe", 2, {PP: 2}, {}, {}),
    "moe-tp2-pp2-ep2-trained": ("vl-moe", 4, {TP: 2, PP: 2, EP: 2}, {}, {}),
    "moe-tp2-cp2-trained": ("vl-moe", 4, {TP: 2, CP: 2}, {}, {}),
}
IMAGES = 4  # different ones in the rows
ALWAYS = ("moe", "moe-padded", "moe-recomputed", "moe-recomputed-trained")  # the others are long


class Ranks:
    """Models by name, made once, and what ranks found of the cases that are wanted."""

    def __init__(self, work: Path):
        self.work = work
        self.wholes: dict[str, dict] = {}

    def model(self, name: str) -> Path:
        folder = self.work / name
        if name not in self.wholes:
            torch.set_num_threads(1)
            plain = small_config(known_hf_config(MODELS[name]))
            if "moe_intermediate_size" in plain:
                plain["moe_intermediate_size"] = 48  # so that no side of an expert's matrix is as long as the other
            self.wholes[name] = whole_config(plain, family_of(model_spec(plain)))
            compute(self.wholes[name], folder)
        return folder

    def words(self, name: str) -> int:
        return own_config(self.wholes[name])["vocab_size"]

    def found(self, world: int, cases: list[dict]) -> dict[str, list[dict]]:
        """Case -> what each rank found."""
        out = self.work / "-".join([str(world), *(case["name"] for case in cases)])[:80]
        out.mkdir()
        file = out / "cases.json"
        file.write_text(json.dumps(cases))
        run_ranks(Path(__file__).with_name("images_worker.py"), world, out, [str(file)])
        return {
            case["name"]: [json.loads((out / f"{case['name']}-{rank}.json").read_text()) for rank in range(world)]
            for case in cases
        }

    def case(self, name: str, model: str, world: int, degrees: dict, actor: dict, overrides: dict, **more) -> dict:
        folder = more.pop("folder", None) or self.model(model)
        config = run_config(str(folder), {"world_size": world} | degrees)
        config["actor"] |= actor
        vision = next((kind for kind in ("trained", "projector") if name.endswith(kind)), "frozen")
        config["model"] |= {"override_transformer_config": overrides, "vision": vision}
        return {"name": name, "config": config, "words": self.words(model), **more}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("images"))


def check(found: dict[str, list[dict]]) -> None:
    for name, of_ranks in found.items():
        assert any("log_probs" in each for each in of_ranks), name
        for each in of_ranks:
            assert each["parameters"] == each["names"] == each["bits"] == [], name
            assert each.get("log_probs", 0.0) < LOG_PROBS, name
            assert max(each.get("gradients", {"": 0.0}).values(), default=0.0) < GRADIENTS, name


def test_rows_with_images_are_transformers_packed_padded_and_recomputed(ranks):
    check(ranks.found(1, [ranks.case(name, *CASES[name]) for name in ALWAYS]))


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_with_images_are_transformers_in_every_layout(ranks, world):
    names = [name for name, case in CASES.items() if case[1] == world and name not in ALWAYS]
    check(ranks.found(world, [ranks.case(name, *CASES[name]) for name in names]))


def test_without_each_part_rows_with_images_are_another_models_and_the_others_are_not(ranks):
    (found,) = ranks.found(1, [ranks.case("traps", *CASES["moe"])])["traps"]
    assert "vision tower" in found["refused"]
    gaps = found["gaps"]
    assert max(gaps.pop("none")) < LOG_PROBS
    for trap, (sees, blind) in gaps.items():
        assert sees > 1000 * LOG_PROBS, trap
        assert blind < LOG_PROBS, trap


@pytest.mark.long
@pytest.mark.parametrize("name", ["moe-tp2", "moe-cp2", "moe-pp2", "dense-dp2"])
def test_each_image_is_looked_at_once_a_step_by_one_rank_of_a_replica(ranks, name):
    found = ranks.found(2, [ranks.case(f"looked at {name}", *CASES[name])])[f"looked at {name}"]
    for step in range(2):
        of_ranks = [each["steps"][step] for each in found]
        if name == "dense-dp2":  # each replica looks at the images of its own rows
            assert all(len(names) == len(set(names)) for names in of_ranks)
            assert len(set(of_ranks[0] + of_ranks[1])) == IMAGES
            continue
        assert sorted(map(len, of_ranks)) == [0, 4] if name == "moe-pp2" else [2, 2]
        assert len(set(of_ranks[0] + of_ranks[1])) == IMAGES


# name -> (model, ranks, degrees): a part of the tower is trained
UPDATED = {
    "moe-trained": ("vl-moe", 1, {}),
    "2.5-projector": ("2.5-vl", 1, {}),
    "dense-tp2-whole-trained": ("vl", 2, {TP: 2, "sequence_parallel": False}),
    "moe-cp2-trained": ("vl-moe", 2, {CP: 2}),
    "dense-dp2-projector": ("vl", 2, {}),
    "moe-tp2-pp2-ep2-trained": ("vl-moe", 4, {TP: 2, PP: 2, EP: 2}),
}
OPTIM = {"optim": {"lr": 1e-2, "vision_lr": 3e-3, "eps": 1e-2, "clip_grad": 0.5}}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_an_update_is_adams_by_one_norm_and_goes_on_from_a_checkpoint_with_the_same_bits(ranks, world):
    names = [name for name, case in UPDATED.items() if case[1] == world]
    cases = []
    for name in names:
        for kind in ("saved", "resumed"):
            checkpoint = str(ranks.work / f"checkpoint {name}")
            cases.append(ranks.case(f"{kind}-{name}", *UPDATED[name], OPTIM, {}, checkpoint=checkpoint))
    found = ranks.found(world, cases)
    for name in names:
        saved, resumed = found[f"saved-{name}"], found[f"resumed-{name}"]
        (norm,) = [each["grad_norm"] for each in saved if "grad_norm" in each]
        assert norm == pytest.approx(saved[0]["norm"], rel=1e-5), name
        assert saved[0]["off"] < 1e-3, name
        assert saved[0]["moved"] == [] and bool(saved[0]["frozen"]) == name.endswith("projector")
        assert [each["bits"] for each in saved] == [each["bits"] for each in resumed], name


SECOND = {
    "moe": ("vl-moe", 1, {}),
    "2.5": ("2.5-vl", 1, {}),
    "moe-pp2": ("vl-moe", 2, {PP: 2}),
    "moe-tp2": ("vl-moe", 2, {TP: 2}),
    "moe-cp2": ("vl-moe", 2, {CP: 2}),
}


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_a_critic_and_a_teacher_see_what_transformers_sees(ranks, world):
    """In the actor's layout and, of two ranks, in one of their own: tensor parallelism, or none of it."""
    cases = []
    for name, (model, size, degrees) in SECOND.items():
        if size != world:
            continue
        case = ranks.case(f"second models {name}", model, size, degrees, {}, {})
        other = {"world_size": size} | dict.fromkeys((TP, PP, CP, EP), 1)  # what is left out is the actor's
        other |= {} if TP in degrees else {TP: size}
        case["config"]["algorithm"] |= {"adv_estimator": "gae", "policy_loss": {"loss_mode": "vanilla"}}
        case["config"]["critic"] = {"layout": other if size > 1 else None}
        teacher = {"model_path": case["config"]["model"]["path"], "layout": other if size > 1 else None}
        case["config"]["distillation"] = {"enabled": True, "teacher_model": teacher}
        cases.append(case)
    for name, of_ranks in ranks.found(world, cases).items():
        for part in ("critic", "teacher"):
            gaps = [each[part] for each in of_ranks if part in each]
            assert gaps and max(gaps) < LOG_PROBS, (name, part, gaps)
        gradients = {tensor: gap for each in of_ranks for tensor, gap in each["gradients"].items()}
        assert "model.embed_tokens.weight" in gradients and "score.weight" in gradients, name
        assert max(gap for each in of_ranks for gap in each["gradients"].values()) < GRADIENTS, (name, gradients)


def test_an_image_token_that_the_model_has_said_is_a_word(ranks):
    """A second word with the same embedding and output row, for which nobody could look, has the same log-prob."""
    folder, twin = with_twin(ranks.model("vl-moe"), ranks.work / "twin", ranks.wholes["vl-moe"])
    case = ranks.case("sampled", *CASES["moe"], folder=folder, twin=twin)
    (found,) = ranks.found(1, [case])["sampled"]
    assert found["gap"] < 1e-6


def test_experts_that_are_stored_turned_as_in_official_folders_are_read(ranks):
    plain = ranks.model("vl-moe")
    folder = ranks.work / "turned"
    copy(plain, folder, {k: t.mT.contiguous() if ".mlp.experts." in k else t for k, t in tensors(plain).items()})
    (ranks.work / "turned-reference").symlink_to(ranks.work / "vl-moe-reference")
    case = ranks.case("turned", *CASES["moe"], folder=folder)
    (found,) = ranks.found(1, [case])["turned"]
    assert found["log_probs"] < LOG_PROBS


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def copy(folder: Path, to: Path, stored: dict[str, torch.Tensor]) -> None:
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    save_file(stored, to / "model.safetensors", {"format": "pt"})


def with_twin(folder: Path, to: Path, whole: dict) -> tuple[Path, int]:
    stored = tensors(folder)
    image, twin = whole["image_token_id"], whole["image_token_id"] + 5
    for name in ("model.language_model.embed_tokens.weight", "lm_head.weight"):
        stored[name][twin] = stored[name][image]
    copy(folder, to, stored)
    return to, twin
