"""Rules of structure: imports point down, light packages stay light, only platforms knows devices.

Modules are found, not listed.
"""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from plain_words import odd_words

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
house = importlib.util.module_from_spec(_spec)
sys.modules["house"] = house
_spec.loader.exec_module(house)
LAYER_OF, package_of = house.LAYER_OF, house.package_of


@cache
def the_house() -> house.House:
    return house.House.of_folder(ROOT)


def modules() -> dict[str, ast.Module]:
    return the_house().modules


# arrows between packages of one layer: importing package -> imported modules, and why
SIDEWAYS = {
    "plain_files": ({"mrl.errors"}, "an output that is refused is said as users see it"),
    "crash_points": ({"mrl.errors"}, "a variable that names no point is refused as users see it"),
    "record": (
        {"mrl.data.samples", "mrl.data.routes"},
        "metrics and files are made of the rows of a step and of their routes",
    ),
    "schedule": (
        {"mrl.data.samples", "mrl.data.routes"},
        "what several requests made of a response is joined in the columns of samples",
    ),
}
# What `mrl plan`, `validate`, `doctor`, `convert` and `import-verl` load: no torch, no Ray, no Megatron, no vLLM.
LIGHT = (
    "acting/**/*.py",
    "model/*.py",
    "config/**/*.py",
    "plan/**/*.py",
    "tools/*/*.py",
    *(f"tools/{part}.py" for part in ("compare_runs", "first_config", "own_command", "search", "search_report")),
    "schedule/*.py",
    "algo/spec.py",
    "record/spec.py",
    *(f"checkpoint/{part}.py" for part in ("check_output", "convert", "convert_job", "manifest", "open_checkpoint")),
    *(f"checkpoint/{part}.py" for part in ("disk_space", "planned_file", "safetensors_file")),
    *(f"checkpoint/{part}.py" for part in ("hf_folder", "step_folders", "stored_boxes", "tensor_names")),
    *(f"cluster/{part}.py" for part in ("job", "prerequisites")),
    *(f"process/{part}.py" for part in ("free_ports", "own", "same_software", "shared_folder")),
    *(f"platforms/{part}.py" for part in ("hosting", "inventory", "npu_mindspeed", "patching", "versions")),
    *(f"driver/{part}.py" for part in ("advice", "preflight", "resume")),
    "engine/requests.py",
    *(
        f"reshard/{part}.py"
        for part in ("faults", "messages", "plan", "proof", "schedule", "setup", "streams", "sync_report")
    ),
)
HEAVY = ("torch", "ray", "megatron", "mbridge", "vllm")
# names that vLLM and verl give, and call
NAMED_BY_OTHERS = ["mrl.acting.verl_base_tool:rollout_trace_op", "mrl.engine.cpu_fp8:create_weights"]


def with_parents(module: str) -> set[str]:
    """A module and the packages whose __init__ runs before it."""
    parts = module.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts) + 1)}


def loaded_by(module: str) -> set[str]:
    """Every module name that importing `module` asks for, through mrl's own modules."""
    seen: set[str] = set()
    todo = with_parents(module)
    while todo:
        name = todo.pop()
        seen.add(name)
        if name in modules():
            todo |= {
                part for wanted in the_house().imports_at_import_time(name) for part in with_parents(wanted)
            } - seen
    return seen


def test_every_module_has_a_package():
    assert {package_of(m) for m in modules()} - {None} <= set(LAYER_OF)


def inside(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def test_imports_point_down():
    wrong = []
    for module in modules():
        here = package_of(module)
        allowed, _ = SIDEWAYS.get(here, (set(), ""))
        for name in the_house().imports[module]:
            there = package_of(name) if name.split(".")[0] == "mrl" else None
            if here and there and there != here and LAYER_OF[there] >= LAYER_OF[here] and not inside(name, allowed):
                wrong.append(f"{module} (layer {LAYER_OF[here]}) imports {name} (layer {LAYER_OF[there]})")
    assert not wrong, "\n".join(wrong)


def test_sideways_arrows_stay_on_their_layer_form_no_circle_and_are_used():
    packages = {here: {package_of(name) for name in names} for here, (names, _) in SIDEWAYS.items()}
    for here, targets in packages.items():
        assert {LAYER_OF[there] for there in targets} == {LAYER_OF[here]}
        assert not any(here in packages.get(there, ()) for there in targets)
        used = {name for module in modules() if package_of(module) == here for name in the_house().imports[module]}
        assert all(any(inside(name, {wanted}) for name in used) for wanted in SIDEWAYS[here][0])


def test_nobody_uses_a_neighbours_private_parts():
    wrong = []
    for module, nodes in the_house().nodes.items():
        for node in nodes:
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith("mrl")
                and package_of(node.module) != package_of(module)
            ):
                wrong += [
                    f"{module}: {node.module}.{a.name}"
                    for a in node.names
                    if a.name.startswith("_") or "._" in node.module
                ]
    assert not wrong, "\n".join(wrong)


def test_messages_have_the_fields_words_and_none_of_our_own():
    """Every text of a module that is no docstring and has more than one word may be printed."""
    odd = []
    for module, nodes in the_house().nodes.items():
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        for node in texts:
            if " " in node.value and id(node) not in docstrings and (found := odd_words(node.value)):
                odd.append(f"{module}:{node.lineno}: {found}")
    assert not odd, "\n".join([*odd, "tests/unit/plain_words.py says what to write instead"])


def test_modules_do_not_import_each_other_in_circles():
    """Imports inside functions count."""
    assert not house.circles(the_house().graph)


def light_modules() -> list[str]:
    """Names that a pattern of LIGHT stands for."""
    matched = {pattern: sorted((ROOT / "mrl").glob(pattern)) for pattern in LIGHT}
    assert all(matched.values()), "a pattern of LIGHT matches no file"
    files = [p.relative_to(ROOT).with_suffix("") for paths in matched.values() for p in paths]
    return [".".join(f.parts).removesuffix(".__init__") for f in files]


# Of one name in several packages: a command of `mrl` beside what it calls, and what concerns one thing on two layers.
COMMANDS = {
    "convert", "doctor", "explain", "family", "import_verl", "plan", "prepare", "rehearse", "report", "samples",
    "versions",
}  # fmt: skip
ON_TWO_LAYERS = {
    "routes": "of experts: as data, and as ranks fetch them",
    "samples": "of a step, as data, in the report and for `mrl samples`",
    "scoring": "by workers of a cluster, and as a rehearsal does instead of them",
    "shown_rows": "as a file, and what a step writes into it",
    "spec": "tables: of estimators and losses, and of metrics",
}
OF_EACH_GENERATION = ["Adapter", "TransferEngine", "UpdateInfo", "WorkerExtension"]  # of vLLM's worker, a file each


def test_a_name_means_one_thing():
    counted = house.measure(the_house())
    assert counted["class_names_defined_twice"] == OF_EACH_GENERATION
    assert counted["basenames_in_several_packages"].keys() <= COMMANDS | ON_TWO_LAYERS.keys()


def test_light_packages_load_nothing_heavy():
    modules_to_import = light_modules()
    assert {"mrl.model.layout", "mrl.model.megatron_shards", "mrl.config.schema"} <= set(modules_to_import)
    program = (
        "import importlib, sys\n"
        f"for name in {modules_to_import!r}:\n"
        "    importlib.import_module(name)\n"
        f"    found = [h for h in {HEAVY!r} if h in sys.modules]\n"
        "    if found: sys.exit(f'importing {name} loads {found}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_light_packages_do_not_import_heavy_packages_inside_functions_either():
    wrong = [f"{m}: {n}" for m in light_modules() for n in the_house().imports[m] if n.split(".")[0] in HEAVY]
    assert not wrong, "\n".join(wrong)


def test_a_driver_and_its_writers_do_without_what_takes_seconds_to_import():
    loaded = loaded_by("mrl.driver.loop") | loaded_by("mrl.driver.sample_writer") | loaded_by("mrl.cluster.scoring")
    assert not [n for n in loaded if n.split(".")[0] in ("torch", "transformers", "megatron", "mbridge", "vllm")]


def test_the_receiving_side_can_be_imported_in_an_engine_process():
    loaded = loaded_by("mrl.engine.receive")
    assert not [
        n for n in loaded if n.split(".")[0] in ("ray", "megatron", "mbridge", "vllm") or n.startswith("mrl.config")
    ]


# tools and environments, conversations and the chat endpoint; what is plain data for other processes is none of them
FOR_TURNS = ("mrl.acting", "mrl.engine.agents", "mrl.engine.conversations", "mrl.engine.endpoint")
PLAIN = {"mrl.acting", "mrl.acting.tool", "mrl.acting.offer"}


def test_what_turns_need_is_loaded_by_the_line_that_reads_their_key():
    starts = (
        "mrl.driver.loop",
        "mrl.rank.rank_worker",
        "mrl.engine.engine_worker",
        "mrl.engine.vllm_engine",
        "mrl.rank.rank_batch",
        "mrl.cluster.scoring",
    )
    loaded = set().union(*map(loaded_by, starts))
    assert not [name for name in loaded - PLAIN if name.startswith(FOR_TURNS)]


DEVICE_WORDS = ("nccl", "hccl", "cuda", "npu")  # as whole strings
DEVICE_PREFIXES = ("cuda:", "npu:", "CUDA_", "NCCL_", "ASCEND_", "HCCL_", "torch_npu", "mindspeed")
# the configuration must be able to say which device, and the reshard target whose weight layout it describes; they do
# nothing with it
MAY_SAY_DEVICE = ("mrl.platforms", "mrl.config", "mrl.tools.import_verl", "mrl.model.vllm_parameters")


def device_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Places where code asks for a particular device: attributes of torch, imports, and string constants
    (docstrings are prose).
    """
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("cuda", "npu")
            and ast.unparse(node) in ("torch.cuda", "torch.npu")
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            text = ast.unparse(node)
            if any(word in text for word in ("torch.cuda", "torch_npu", "mindspeed")):
                yield f"line {node.lineno}: {text}"
        text = (
            node.value
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
            else ""
        )
        if text in DEVICE_WORDS or text.startswith(DEVICE_PREFIXES):
            yield f"line {node.lineno}: {text!r}"


def test_only_platforms_knows_devices():
    wrong = [
        f"{m} {what}"
        for m, nodes in the_house().nodes.items()
        if not m.startswith(MAY_SAY_DEVICE)
        for what in device_names(nodes)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_unsafe_is_called():
    """No pickle of strangers, no remote code, no object collectives, no unsafe YAML."""
    wrong = []
    for module, nodes in the_house().nodes.items():
        for node in nodes:
            text = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if text.endswith(("pickle.load", "pickle.loads", "yaml.load", "_object", "_object_list")) or text in (
                "eval",
                "exec",
            ):
                wrong.append(f"{module}:{node.lineno} {text}")
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
                wrong.append(f"{module}:{node.value.lineno} trust_remote_code")
    assert not wrong, "\n".join(wrong)


def test_nothing_public_is_for_tests_alone():
    assert house.names_for_tests_alone(the_house()) == NAMED_BY_OTHERS


def house_of(tests: str = "", scripts: str = "", **texts: str) -> house.House:
    """The structure of modules that keywords name, with a file of tests and one of scripts beside it."""
    sources = {f"mrl.{name}": text for name, text in texts.items()}
    return house.House({name: ast.parse(text) for name, text in sources.items()}, sources, (tests,), (scripts,))


def test_the_picture_shows_the_imports_that_there_are():
    made = house.svg(the_house())
    assert (ROOT / "docs" / "house.svg").read_text(encoding="utf-8") == made, (
        "python scripts/house.py --svg docs/house.svg"
    )


def test_public_names_of_tests_alone_are_found():
    """An import is no use, a docstring neither; a script's own function of the name is another."""
    names = ("tested", "_private", "called", "unused", "scripted", "looked_up", "told", "other")
    text = "".join(f"def {name}(): 1\n" for name in names) + "class A:\n    def method(self): 1\n"
    tests = "tested(_private, called, scripted, looked_up, other)\nA().method()\n'told'\n"
    used = "from mrl.a import tested\ncalled()\ngetattr(a, 'looked_up')\n'tested'\n"
    small = house_of(tests, "scripted()\ndef other(): other()", a=text, b=used)
    assert house.names_for_tests_alone(small) == ["mrl.a:tested", "mrl.a:other", "mrl.a:method"]


# What few runs need, and who may import it: the line that reads its key, and what then runs.
DOORS = {
    "mrl.acting": (
        *(
            f"mrl.engine.{part}"
            for part in ("agents", "call_reader", "conversations", "endpoint", "partners", "requests", "spoken")
        ),
        *(f"mrl.driver.{part}" for part in ("assemble_data", "first_look", "preflight")),
        *(f"mrl.config.{part}" for part in ("endpoint_rules", "rollout_rules", "schema_rollout")),
        *(f"mrl.tools.{part}" for part in ("doctor", "explain.asked_tools", "import_verl", "rehearse")),
    ),
    "mrl.acting.sandboxes": (
        *(f"mrl.acting.{part}" for part in ("environment_worker", "named", "offer")),
        "mrl.tools.doctor",
    ),
    "mrl.engine.conversations": ("mrl.engine.engine_worker",),
    "mrl.engine.agents": ("mrl.engine.conversations",),
    "mrl.engine.spoken": ("mrl.engine.agents",),
    "mrl.engine.endpoint": ("mrl.engine.agents",),
    "mrl.engine.ascend_wake": ("mrl.engine.v0_23",),
    "mrl.rank.vision": ("mrl.rank.actor", "mrl.rank.critic", "mrl.rank.teacher"),
    "mrl.engine.seeing_models": (),
    "mrl.engine.image_inputs": ("mrl.engine.seeing_models", "mrl.engine.v0_common", "mrl.engine.vllm_engine"),
    "mrl.data.image_reader": (
        *(
            f"mrl.{part}"
            for part in (
                "engine.engine_worker",
                "engine.image_inputs",
                "data.dataset",
                "driver.assemble_data",
                "driver.first_look",
                "rank.actor",
            )
        ),
    ),
    "mrl.tools.import_verl": ("mrl.cli.config_arguments", "mrl.cli.import_verl"),
    "mrl.tools.report": tuple(f"mrl.cli.{part}" for part in ("compare", "report", "samples", "train", "watch")),
    "mrl.tools.report.pictures": ("mrl.tools.report.sections",),
    "mrl.platforms.cpu_patches": ("mrl.platforms.torch_platforms",),
    "mrl.platforms.npu_mindspeed": (
        "mrl.platforms",
        *(f"mrl.config.{part}" for part in ("distillation_rules", "override_fields", "override_rules")),
    ),
    "mrl.rank.critic": ("mrl.rank.actor",),
    "mrl.rank.second_rows": ("mrl.rank.rank_worker",),
    "mrl.rank.teacher": ("mrl.rank.actor",),
    "mrl.reshard.quantise": ("mrl.rank.rank_worker", "mrl.reshard.execute"),
}


def test_what_few_runs_need_is_imported_by_few():
    for narrow, allowed in DOORS.items():
        importers = {
            module
            for module, names in the_house().graph.items()
            if not inside(module, {narrow}) and any(inside(name, {narrow}) for name in names)
        }
        wrong = sorted(module for module in importers if not inside(module, set(allowed)))
        assert not wrong, f"{narrow} is imported by {', '.join(wrong)}"
        unused = [door for door in allowed if not any(inside(module, {door}) for module in importers)]
        assert not unused, f"{narrow} is not imported by {', '.join(unused)}"
