"""Text of docs/layouts.md and docs/refusals.md: the rules of `mrl validate`, and what degrees known models allow."""

import re
from collections.abc import Iterator

from mrl.algo.spec import OVER_TOP_K
from mrl.config.family_rules import cuts_context
from mrl.config.rule_row import RuleRow
from mrl.config.rules import PATH_RULES, RULES
from mrl.model import ModelSpec, known_models, planning_model_spec
from mrl.model.layout_degrees import LayoutDegrees
from mrl.model.layout_rules import TRAIN_RULES, is_legal_layout

_LARGEST = 64
_IN_GENERAL = {  # what a message fills in for one configuration -> what it is of all
    "{m.longest_sample} with rope_type {m.rotation.kind}": "what rope_type longrope or yarn allows",
    "{m.longest_sample}": "the model's longest sample",
    "with rope_type {m.rotation.kind}": "with a rope_type whose magnitude is not 1",
    "for rope_type {m.rotation.kind}": "for a rope_type other than default",
    "{c.distillation.distillation_loss.loss_mode}": " or ".join(OVER_TOP_K),
    "a model of the {m.family} family": "families that name or join projections otherwise",
    ", {m.rotation.magnitude:.4f}": "",
    "{m.vocab_size}, ": "",
    "of {m.num_layers} layers": "of num_layers layers",
    "{d.pipeline_model_parallel_size} stages x {d.virtual_pipeline}": "all stages",
}
_LAYOUTS = """# Layouts: what a model allows

`mrl validate` checks a layout and names the nearest legal values. `mrl plan --search` lists every layout that fits,
best first:

```bash
mrl validate parallel_configs/qwen3-30b-a3b/h100-4x8.yaml --set actor.layout.expert_model_parallel_size=16
mrl plan --search --model Qwen/Qwen3-30B-A3B --devices 32 --device h100-80g
```

* **Ranks** (`actor.layout`): `world_size` = TP x CP x PP x DP. Experts use the same ranks as EP x expert TP x PP x
  their own DP, so EP may exceed DP. `critic.layout` and `distillation.teacher_model.layout` have the same rules.
* **Engines** (`rollout`): `num_engines` x `tensor_model_parallel_size` x `data_parallel_size` workers.
  `expert_parallel_size` is 1 or all workers of an engine. Tensor parallelism stays inside a node.
* **Devices**: with `cluster.placement: separate` ranks and engines have their own; with `colocated` they share them.

## Degrees by model

Values up to 64 of each degree while the others are 1. PP: equal stages; for unequal ones set `pipeline_layers`.
"""
_RULE_TABLE = "## Rules of the ranks' layout\n\nKeys below `actor.layout`.\n"
_REFUSALS = """# What `mrl validate` refuses

`mrl validate CONFIG` prints all violations at once, each with its key, the rule, the reason and the nearest legal
values. `mrl train` checks the same before it starts Ray.

1. **Keys**: unknown names, types, limits: [every key](configuration.md).
2. **Rules between keys, and between a key and the model**: below, and [layouts](layouts.md).
3. **Settings of Megatron and vLLM** (`override_*`, `engine_kwargs`) that do not exist there, or that mrl sets itself.
4. **The model's folder**: an unsupported [family](adding_a_family.md#refused-families), settings of config.json
   that mrl does not implement, missing or damaged files.
5. **Files**: rows, chat template, reward, loss, advantage, tools ([frequent mistakes](tutorial/first_hour.md)).
   `--check-paths` also refuses folders that are not on this host.
6. **Engines' memory**: a `rollout.gpu_memory_utilization` that does not fit, or leaves no room for a sequence.

`mrl plan` checks whether the ranks fit (exit code 7), `mrl doctor` the machine. Exit code 2: the configuration;
3: data; 4: a folder or the machine.

## Rules

Besides the table's simple rules, these compound ones are broken most often:

* `rollout.n` must be at least 2 for estimators that compare responses.
* `actor.ppo_mini_batch_size` must divide `data.train_batch_size`; times `rollout.n` it must be a multiple of DP.
* A token budget must hold the longest sample.
* A clip range must fit its loss: 0.2 is too wide for GSPO, 3e-4 too narrow for PPO.

"""


def layouts() -> str:
    """The page about layouts."""
    rules = [f"| `{rule.field}` | {named(rule.rule)} | {rule.why} |" for rule in TRAIN_RULES]
    heads = ("model", "layers", "heads, KV heads", "experts", "TP", "PP", "CP", "EP")
    models = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *map(_model_row, known_models())]
    return "\n".join([_LAYOUTS, *models, "", _RULE_TABLE, "| key | rule | why |", "|---|---|---|", *rules, ""])


def _model_row(name: str) -> str:
    model = planning_model_spec(name)[0]
    experts = str(model.num_experts or "none")
    cells = [name, str(model.num_layers), f"{model.num_attention_heads}, {model.num_key_value_heads}", experts]
    for key in ("tensor_model", "pipeline_model", "context", "expert_model"):
        legal = list(_legal(model, f"{key}_parallel_size"))
        cells.append(_context(model) if key == "context" else ", ".join(map(str, legal)))
    return f"| {' | '.join(cells)} |"


def _legal(model: ModelSpec, key: str) -> Iterator[int]:
    for degree in range(1, _LARGEST + 1):
        if is_legal_layout(LayoutDegrees(world_size=degree, **{key: degree}), model):
            yield degree


def _context(model: ModelSpec) -> str:
    if 2 not in _legal(model, "context_parallel_size"):
        return "1"
    return "any" if cuts_context(model, "cuda") else "1, on CPUs any"


def refusals() -> str:
    """The page about what a configuration is refused for."""
    rows = {f"| `{rule.field}` | {named(rule.rule)} | {named(rule.why)} |" for rule in _rows()}
    return "\n".join([f"{_REFUSALS}| key | rule | why |", "|---|---|---|", *sorted(rows), ""])


def _rows() -> Iterator[RuleRow]:
    return (rule for rule in (*RULES, *PATH_RULES) if isinstance(rule, RuleRow))


def named(text: str) -> str:
    """A rule's text without what one configuration fills in: of `num_experts = {m.num_experts}` the name stays.

    Raises ValueError for a text that fills in something else.
    """
    text = re.sub(r" = \{[^}]*\}", "", text)
    for filled, general in _IN_GENERAL.items():
        text = text.replace(filled, general)
    if "{" in text:
        raise ValueError(f"say in _IN_GENERAL what this is of all configurations: {text}")
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
