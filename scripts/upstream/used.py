"""What mrl uses of other packages, read off its source: dotted names, how they are called, environment variables.

An import binds a name; a chain of attributes on it is one use of the whole dotted path, and a call of that path says
how many positional arguments and which keywords it is given. What is reached through an object at run time has no
import to start from: it stands in `attributes.py`, by hand.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# first part of a dotted name -> dependency
PACKAGES = {
    "vllm": "vllm", "megatron": "megatron-core", "mbridge": "mbridge", "torch": "torch", "ray": "ray",
    "vllm_ascend": "vllm-ascend",
    "torch_npu": "torch-npu", "mindspeed": "mindspeed", "transformer_engine": "transformer-engine",
}  # fmt: skip
# files that are of one generation of vLLM; all others are of both
ONLY = {
    "mrl/engine/v0_23.py": "vllm 0.23.0", "mrl/engine/v0_32.py": "vllm 0.32.0",
    "mrl/engine/cpu_parallel.py": "vllm 0.32.0",
    "mrl/engine/route_capture.py": "vllm 0.32.0", "mrl/engine/cpu_latent.py": "vllm 0.32.0",
    "mrl/engine/cpu_fp8.py": "vllm 0.32.0",
    "mrl/engine/cpu_delta.py": "vllm 0.32.0", "mrl/engine/cpu_drafts.py": "vllm 0.32.0",
    "mrl/engine/drafting_scheduler.py": "vllm 0.32.0", "mrl/engine/text_drafters.py": "vllm 0.32.0",
    "mrl/engine/inner_texts.py": "vllm 0.32.0",
    "mrl/engine/loader_check.py": "vllm 0.32.0", "mrl/engine/layer_states.py": "vllm 0.32.0",
    "mrl/engine/image_inputs.py": "vllm 0.32.0", "mrl/engine/seeing_models.py": "vllm 0.32.0",
}  # fmt: skip
VLLM = ("vllm 0.32.0", "vllm 0.23.0")
NO_NAMES = ("vllm.general_plugins",)  # a group of entry points
_VARIABLE = re.compile(r"(VLLM_ASCEND|VLLM|HCCL|P2P_HCCL|NVTE|TASK_QUEUE|PYTORCH_NPU)_[A-Z0-9_]*[A-Z0-9]")
_OWNER = {"VLLM_ASCEND": "vllm-ascend", "VLLM": "vllm", "HCCL": "torch-npu", "P2P_HCCL": "torch-npu",
          "NVTE": "transformer-engine",
          "TASK_QUEUE": "torch-npu", "PYTORCH_NPU": "torch-npu"}  # fmt: skip

# a file without any of these words names nothing of others, and need not be parsed
_PACKAGE = re.compile(rf"\b(?:{'|'.join(PACKAGES)})\b")
_OWNED = re.compile("|".join(_OWNER))


@dataclass(frozen=True, order=True)
class Call:
    """Positional arguments, and the keywords' names; `open`: more of either are given by a star."""

    positional: int
    keywords: tuple[str, ...]
    open: bool


@dataclass
class Use:
    """One dotted name: where it is used, and how it is called there."""

    places: set[str] = field(default_factory=set)
    calls: set[Call] = field(default_factory=set)


Uses = dict[str, dict[str, Use]]  # dependency (of vLLM with its generation) -> dotted name -> use


def used_names(root: Path = ROOT) -> Uses:
    """Of all modules of mrl."""
    found: Uses = defaultdict(lambda: defaultdict(Use))
    for path in sorted((root / "mrl").rglob("*.py")):
        file = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        if not _PACKAGE.search(text):
            continue
        for dotted, line, call in _uses(ast.parse(text)):
            for dependency in _dependencies(dotted, file):
                use = found[dependency][dotted]
                use.places.add(f"{file}:{line}")
                use.calls |= {call} if call else set()
    return {dependency: dict(names) for dependency, names in found.items()}


def _dependencies(dotted: str, file: str) -> tuple[str, ...]:
    owner = PACKAGES.get(dotted.partition(".")[0])
    if owner == "torch" and dotted.startswith("torch.npu"):
        return ("torch-npu",)
    if owner != "vllm":
        return (owner,) if owner else ()
    return (ONLY[file],) if file in ONLY else VLLM


def _uses(tree: ast.Module) -> Iterator[tuple[str, int, Call | None]]:
    nodes = list(ast.walk(tree))
    bound = _bound(nodes)
    inner: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.Call) and (dotted := _dotted(node.func, bound)):
            inner.update(_chain(node.func))
            yield dotted, node.lineno, _call(node)
        elif isinstance(node, ast.Attribute | ast.Name) and node not in inner and (dotted := _dotted(node, bound)):
            inner.update(_chain(node))
            yield dotted, node.lineno, None
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno, None) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_path(node.value):
            yield node.value, node.lineno, None


def _is_path(text: str) -> bool:
    """Whether a string is a dotted name of another package's, as in the table of patches."""
    parts = text.split(".")
    return (
        len(parts) > 1 and parts[0] in PACKAGES and all(part.isidentifier() for part in parts) and text not in NO_NAMES
    )


def _bound(nodes: list[ast.AST]) -> dict[str, str]:
    """Name -> dotted path, of all imports of the file, those in functions too; a name that is bound otherwise too is
    left out.
    """
    bound: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    taken = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    taken |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return {
        name: dotted for name, dotted in bound.items() if name not in taken and dotted.partition(".")[0] in PACKAGES
    }


def _chain(node: ast.AST) -> Iterator[ast.AST]:
    while isinstance(node, ast.Attribute):
        yield node
        node = node.value
    yield node


def _dotted(node: ast.AST, bound: dict[str, str]) -> str | None:
    *parts, root = _chain(node)
    if not isinstance(root, ast.Name) or root.id not in bound:
        return None
    return ".".join([bound[root.id], *(part.attr for part in reversed(parts))])


def _call(node: ast.Call) -> Call:
    is_open = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
    positional = sum(not isinstance(a, ast.Starred) for a in node.args)
    return Call(positional, tuple(sorted(k.arg for k in node.keywords if k.arg)), is_open)


def used_variables(root: Path = ROOT) -> dict[str, dict[str, set[str]]]:
    """Dependency -> environment variable -> files of mrl and launch that name it."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in [*(root / "mrl").rglob("*.py"), *(root / "launch").iterdir()]:
        if path.suffix not in (".py", ".yaml", ".sh"):
            continue
        text = path.read_text(encoding="utf-8")
        if not _OWNED.search(text):
            continue
        words = _strings(text) if path.suffix == ".py" else [text]
        for match in (m for word in words for m in _VARIABLE.finditer(word)):
            owner, file = _OWNER[match[1]], path.relative_to(root).as_posix()
            for dependency in VLLM if owner == "vllm" else (owner,):
                found[dependency][match[0]].add(file)
    return {dependency: dict(names) for dependency, names in found.items()}


def _strings(text: str) -> list[str]:
    """Whole words that are strings, no part of a sentence."""
    values = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return [value for value in values if isinstance(value, str) and _VARIABLE.fullmatch(value)]
