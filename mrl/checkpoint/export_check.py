"""Checks a Hugging Face export that any trainer wrote, alone or against the model from which training began.

Alone: names, shapes and dtypes against config.json, the index, NaN and infinity, tied embeddings, tensors that are
constant or have another's bytes, rows and columns that are zero. A tensor that took another's place keeps name and
shape, so it shows only against the origin. Training moves a tensor by a small part of its length. One that moved by
more is looked for: among the origin's tensors of its shape, transposed, and with its rows or columns in another order.

    gate_proj of the export, rows    a b c     moved by 140 % from gate_proj of the origin, and by 0.1 % from up_proj:
                                               it "holds up_proj"

A row, a column or a tensor whose step is many times that of the others is named, too: a part that was left out,
exchanged or scaled. Steps are compared, and not shares alone: a step is alike for short rows and long ones.

Tensors are read in chunks, so memory does not grow with the model.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf, prod, sqrt
from pathlib import Path
from statistics import median

import numpy as np

from mrl.checkpoint.exported_files import READABLE, ExportedFiles, Floats
from mrl.checkpoint.open_checkpoint import CODES
from mrl.errors import EnvironmentFault
from mrl.model import TensorSpec, tensor_specs
from mrl.model.hf_files import EMBEDDING, FP8, HEAD, check_checkpoint, is_spare, other_architecture, scale_of
from mrl.model.peft_files import CONFIG
from mrl.model.registry import family_of

MOVED = 0.3  # of a tensor's length; training moves far less
FAR = 8  # times the usual step, by which a tensor, a row or a column is out of the others
_FAR_TENSOR = 0.05  # of its length: a tensor that moved by less is never called out of the others
_ROW_LENGTH = 0.1  # of the usual row's: rows of rare tokens may be short, and then a step is long beside them
_ENOUGH = 3  # tensors that moved, below which none is usual
_NEAR = 0.3  # two rows or tensors that are the same one, before and after training
_SAMPLED = 16  # rows or columns by which a tensor is recognised
_RUNS = 4  # runs of rows that are listed
_EXPLAINED = 30  # faults whose tensors are looked for in the origin
_FEW = 0.5  # share of the model's names below which the files are another model's
_NORM = "norm.weight"
_LAYER = re.compile(r"\.layers\.\d+\.")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Fault:
    """Something wrong with a tensor, or with all of them if `tensor` is empty."""

    tensor: str
    what: str


@dataclass(frozen=True)
class Moved:
    """How far a tensor is from the origin's, divided by the length of that."""

    tensor: str
    share: float


@dataclass(frozen=True)
class ExportReport:
    """What was found."""

    family: str
    tensors: int  # of the model
    bytes: int
    faults: tuple[Fault, ...]
    notes: tuple[str, ...] = ()
    moved: tuple[Moved, ...] = ()  # of all tensors, the farthest first; empty without an origin

    @property
    def is_sound(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    @property
    def usual_move(self) -> float:
        """The median over tensors."""
        return median(each.share for each in self.moved) if self.moved else 0.0


@dataclass
class _Values:
    """What one pass over a tensor finds."""

    bad: int = 0  # NaN and infinity
    low: float = inf
    high: float = -inf
    length: float = 0.0  # of the origin's
    moved: float = 0.0
    digest: str = ""
    shape: tuple[int, ...] = ()
    own: float = 0.0  # length
    unexplained: float = 0.0  # of `moved`, without rows and columns that are newly zero
    is_named: bool = False
    rows: "_Lines" = field(default_factory=lambda: _Lines())  # dropped after the tensor
    columns: "_Lines" = field(default_factory=lambda: _Lines())

    @property
    def is_constant(self) -> bool:
        return self.low == self.high

    @property
    def share(self) -> float:
        if self.moved == 0:
            return 0.0
        return self.moved / self.length if self.length else inf

    @property
    def step(self) -> float:
        """The root of the mean square over elements. Adam's is alike in all tensors, whatever their values are."""
        return self.moved / sqrt(max(1, prod(self.shape)))


@dataclass
class _Lines:
    """Rows or columns of a matrix: which have another value than zero, squared lengths and movements."""

    used: np.ndarray | float = 0.0
    theirs: np.ndarray | float = 0.0
    moved: np.ndarray | float = 0.0


@dataclass
class _Check:
    export: ExportedFiles
    origin: ExportedFiles | None
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    values: dict[str, _Values] = field(default_factory=dict)
    explained: int = 0

    def say(self, tensor: str, what: str) -> None:
        self.faults.append(Fault(tensor, what))


def check_export(
    folder: Path, against: Path | None = None, tell: Callable[[int, int], None] | None = None
) -> ExportReport:
    """Checks the export in `folder`. `against`: the model from which its training began. `tell` is called before each
    tensor, with those that were read and their number.

    Raises ConfigError for an unsupported or a different model, EnvironmentFault for files that are missing, damaged or
    another model's.
    """
    export = ExportedFiles(folder)
    origin = None
    if against is not None:
        origin = ExportedFiles(against)
        check_checkpoint(against, origin.model, "--against")
        if differing := other_architecture(against, export.model):
            raise EnvironmentFault(
                f"--against {against}: another architecture than {folder} ({differing}); give the model from which "
                "its training began"
            )
    check = _Check(export, origin)
    check.faults += [Fault(*fault) for fault in export.faults]
    specs = _structure(check)
    for number, spec in enumerate(specs):
        if tell is not None:
            tell(number, len(specs))
        _look_at(check, spec)
    _constant(check)
    _repeated(check)
    _far(check)
    moved = _moved(check, specs)
    for adapters in sorted({*folder.glob(CONFIG), *folder.glob(f"*/{CONFIG}")}):
        check.notes.append(f"{adapters.parent.name}/ has adapters, which are not in these weights: merge or serve them")
    size = sum(tensor.file.stat().st_size for tensor in {p.file: p for p in export.tensors.values()}.values())
    return ExportReport(
        export.model.family, len(tensor_specs(export.model)), size, tuple(check.faults), tuple(check.notes), moved
    )


# ---------------------------------------------------------------- names, shapes, dtypes


def _structure(check: _Check) -> list[TensorSpec]:
    """Finds what headers show. Returns the tensors whose values can be read."""
    model = check.export.model
    tensors = check.export.tensors
    wanted = {spec.name: spec for spec in tensor_specs(model)}
    scales = {scale_of(name) for name in check.export.scales}
    known = wanted.keys() & tensors.keys()
    others = [name for name in tensors if name not in wanted and name not in scales and not is_spare(name, model)]
    if len(known) < _FEW * len(wanted):
        if wrapper := _wrapper(others, wanted.keys()):
            raise EnvironmentFault(
                f"{check.export.folder}: names begin with {wrapper!r}, of a module around the model (torch.compile, "
                "DataParallel, FSDP, peft, or a model that reads images): transformers finds no weights under them; "
                f"save without {wrapper!r}"
            )
        like = ", ".join(sorted(others)[:2]) or "none"
        raise EnvironmentFault(
            f"{check.export.folder}: another model's export: it has {len(known)} of the {len(wanted)} tensors of the "
            f"{model.family} model that config.json describes; others in it: {like}"
        )
    reported = {fault.tensor for fault in check.faults}  # those that the index lists and no shard has
    for name in wanted:
        if name not in tensors and name not in reported:
            check.say(name, "is missing")
    for name in others:
        check.say(name, "is not part of the model")
    readable = []
    for name in wanted:
        if name in known and _shape(check, wanted[name]) and _readable(check, name):
            readable.append(wanted[name])
    _dtypes(check, readable)
    return readable


def _wrapper(others: list[str], wanted: Iterable[str]) -> str:
    """Returns what stands before most of the model's names; empty if nothing does."""
    names = set(wanted)
    begins = "|".join({name.partition(".")[0] for name in names})  # model, lm_head
    prefixes = {name[: found.start()] for name in others for found in re.finditer(rf"(?<=\.)({begins})\.", name)}
    counts = {prefix: sum(name.removeprefix(prefix) in names for name in others) for prefix in prefixes}
    best = max(counts, key=counts.get, default="")
    return best if 2 * counts.get(best, 0) > len(others) else ""


def _shape(check: _Check, spec: TensorSpec) -> bool:
    shape = check.export.tensors[spec.name].shape
    if shape == spec.shape:
        return True
    why = ""
    vocab_size = check.export.model.vocab_size
    if spec.name in (EMBEDDING, HEAD) and len(shape) == 2 and shape[0] > vocab_size and shape[1] == spec.shape[1]:
        why = f": the padding of the vocabulary was kept, {shape[0] - vocab_size} rows beyond vocab_size"
    elif shape == spec.shape[::-1]:
        why = ": it is transposed"
    check.say(spec.name, f"has shape {list(shape)}, not {list(spec.shape)}{why}")
    return False


def _readable(check: _Check, name: str) -> bool:
    dtype = check.export.tensors[name].dtype
    if dtype not in READABLE:
        check.say(name, f"is {dtype}, which holds no weights; read are {', '.join(READABLE)}")
        return False
    if dtype == FP8 and (check.export.model.fp8_block is None or name not in check.export.scales):
        check.say(name, f"is {FP8} without {scale_of(name)}, or without a quantization_config with blocks")
        return False
    return True


def _dtypes(check: _Check, specs: list[TensorSpec]) -> None:
    """Says which tensors have another dtype than config.json and the family say, once if all have."""
    model = check.export.model
    precise = family_of(model).rounded
    usual = CODES.get(model.dtype, model.dtype)
    if not check.export.says_dtype and specs:
        usual = Counter(check.export.tensors[spec.name].dtype for spec in specs).most_common(1)[0][0]
        check.notes.append(f"config.json has no dtype: {usual} of the files is taken as the export's")
    wrong: dict[str, list[str]] = {}
    for spec in specs:
        stored = check.export.tensors[spec.name].dtype
        allowed = {_dtype_of(check, spec, usual)} | ({"F32"} if spec.name.endswith(precise) else set())
        if model.fp8_block is not None:
            allowed.add(FP8)
        if stored not in allowed:
            wrong.setdefault(stored, []).append(spec.name)
    for stored, names in wrong.items():
        why = ": its largest number is 65504, so weights and products overflow" if stored == "F16" else ""
        if len(names) == len(specs):
            check.say("", f"all tensors are {stored}, and config.json says {model.dtype}{why}")
            continue
        for name in names:
            spec = next(spec for spec in specs if spec.name == name)
            check.say(name, f"is {stored}, not {_dtype_of(check, spec, usual)}{why}")


def _dtype_of(check: _Check, spec: TensorSpec, usual: str) -> str:
    """Returns safetensors' name of the dtype that a tensor should have."""
    return usual if spec.dtype == check.export.model.dtype else CODES.get(spec.dtype, spec.dtype)


# ---------------------------------------------------------------- values


def _look_at(check: _Check, spec: TensorSpec) -> None:
    """Reads a tensor once, beside the origin's, and says what is wrong with its values."""
    name = spec.name
    found = _measure(check, name)
    check.values[name] = found
    if found.bad:
        check.say(name, f"has {found.bad} elements that are NaN or infinite")
        return
    rows, columns = found.rows, found.columns
    found.rows, found.columns = _Lines(), _Lines()
    if found.is_constant:
        return
    if len(spec.shape) > 1:
        _zero(check, name, found, "rows", rows)
        _zero(check, name, found, "columns", columns)
    if check.origin is None or not found.length:  # biases are made as zeros: only their step says something (_far)
        return
    if len(spec.shape) == 1 and found.share > _NEAR / 100 and (other := _nearer_vector(check, name, found)):
        found.is_named = True
        check.say(name, f"holds {other} of the origin")
    elif found.unexplained > MOVED * found.length:
        said = _outlying(check, name, rows, columns) if len(spec.shape) > 1 else ""
        if not said and check.explained < _EXPLAINED and len(spec.shape) > 1:
            check.explained += 1
            said = _explained(check, name)
        if not said:
            why = _scaled(found)
            said = f"moved by {_percent(found.share)} of its length, more than training moves{why}"
        found.is_named = True
        check.say(name, said)
    elif len(spec.shape) > 1 and (said := _outlying(check, name, rows, columns)):
        found.is_named = True
        check.say(name, said)


def _zero(check: _Check, name: str, found: _Values, kind: str, lines: _Lines) -> None:
    """Says which rows or columns are zero, and were not in the origin. Unused tokens may have zeros: a note."""
    is_zero = ~lines.used
    if check.origin is not None:
        is_zero &= lines.theirs > 0
    if not is_zero.any():
        return
    said = f"{kind} {_listed(np.flatnonzero(is_zero))} of {len(is_zero)} are zero"
    if check.origin is not None:
        left = found.unexplained**2 - float(lines.theirs[is_zero].sum(dtype=np.float64))
        found.unexplained = sqrt(max(0.0, left))
        found.is_named = True
        check.say(name, f"{said}, and are not in the origin")
    elif name in (EMBEDDING, HEAD) and kind == "rows":
        check.notes.append(f"{name}: {said}: unused tokens, or a part that was left out; --against tells")
    else:
        found.is_named = True
        check.say(name, said)


def _listed(numbers: np.ndarray) -> str:
    """Returns "3, 7-9" for rising numbers, of the first runs."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:_RUNS]]
    more = sum(len(run) for run in runs[_RUNS:])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _outlying(check: _Check, name: str, rows: _Lines, columns: _Lines) -> str:
    """Returns which rows or columns moved far out of the others of their tensor; empty if none did.

    Steps of elements are compared, as the same step is long beside a short row. Lines that did not move, as those of
    rare tokens, have no part in what is usual.
    """
    for kind, lines in (("rows", rows), ("columns", columns)):
        moved, lengths = np.sqrt(lines.moved), np.sqrt(lines.theirs)
        length = float(np.median(lengths))
        usual = float(np.median(moved[moved > 0])) if moved.any() else 0.0
        if usual > MOVED * length and 2 * np.count_nonzero(moved) < len(moved):
            usual = 0.0  # the lines that moved are the wrong ones
        floor = np.maximum(MOVED * lengths, _ROW_LENGTH * length)
        is_far = lines.used & (moved > np.maximum(floor, FAR * usual))
        numbers = np.flatnonzero(is_far)
        if not len(numbers) or 2 * len(numbers) > len(moved):
            continue
        why = ""
        if check.explained < _EXPLAINED:
            check.explained += 1
            some = numbers[_sample(len(numbers))]
            why = _rows(check, name, some) if kind == "rows" else _columns(check, name, some)
        share = float((moved[numbers] / np.maximum(lengths[numbers], 1e-30)).max())
        far = "more than their length" if share > 10 else f"up to {share:.0%} of their length"
        times = (
            f"{moved[numbers].min() / usual:.0f} times the usual step or more" if usual else "most others not at all"
        )
        return f"{kind} {_listed(numbers)} of {len(moved)} moved by {far}, {times}" + (f": {why}" if why else "")
    return ""


def _far(check: _Check) -> None:
    """Says which tensors moved far out of the others: their step is many times the usual, and so is their share.

    Both, as the same step is a large share of small weights, and the same share a large step of large weights. What
    was zero has a step alone.
    """
    if check.origin is None:
        return
    moved = {name: found for name, found in check.values.items() if found.moved and not found.bad}
    from_zero = {name: moved.pop(name) for name in [name for name, found in moved.items() if not found.length]}
    usual = median([found.step for found in moved.values()] or [0.0])
    for name, found in from_zero.items():
        if found.step > FAR * usual and not found.is_named:
            check.say(name, f"is zero in the origin, and moved by {found.step:.2g}; half of the others by {usual:.2g}")
    if len(moved) < _ENOUGH:
        return
    step = median(found.step for found in moved.values())
    share = median(found.share for found in moved.values())
    for name, found in moved.items():
        is_far = found.share > max(_FAR_TENSOR, FAR * share) and found.step > FAR * step
        if found.is_named or not is_far:
            continue
        why = _scaled(found)
        check.say(
            name,
            f"moved by {found.share:.1%} of its length, and half of the tensors that moved by {share:.2%} or less{why}",
        )


def _scaled(found: _Values) -> str:
    """Returns by which factor a tensor was multiplied, if that is nearly all of its movement."""
    if not found.length or found.moved == inf:
        return ""
    factor = (found.own**2 + found.length**2 - found.moved**2) / (2 * found.length**2)
    is_it = ((factor - 1) * found.length) ** 2 > 0.9 * found.moved**2
    return f": it is {factor:.2f} times the origin's" if is_it else ""


def _percent(share: float) -> str:
    return "more than all" if share == inf else f"{share:.0%}"


def _measure(check: _Check, name: str) -> _Values:
    found = _Values(shape=check.export.tensors[name].shape)
    digest = blake2b(digest_size=16)
    others = iter(())
    if check.origin is not None:
        others = check.origin.chunks(name)
    is_matrix = len(found.shape) > 1
    used, theirs, moved = [], [], []  # of rows, a chunk each
    for chunk in check.export.chunks(name):
        found.bad += int(chunk.size - np.count_nonzero(np.isfinite(chunk)))
        found.low = min(found.low, float(chunk.min()))
        found.high = max(found.high, float(chunk.max()))
        digest.update(chunk)
        if is_matrix:
            used.append(chunk.any(1))
            found.columns.used = np.logical_or(found.columns.used, chunk.any(0))
        other = next(others, None)
        if other is None:
            continue
        found.own += _square(chunk)
        step = chunk - other
        theirs.append(np.einsum("ij,ij->i", other, other))
        moved.append(np.einsum("ij,ij->i", step, step))
        if is_matrix:
            found.columns.theirs = found.columns.theirs + np.einsum("ij,ij->j", other, other)
            found.columns.moved = found.columns.moved + np.einsum("ij,ij->j", step, step)
    found.digest = digest.hexdigest()
    found.rows = _Lines(*(np.concatenate(each) if each else 0.0 for each in (used, theirs, moved)))
    found.own = sqrt(found.own)
    found.length = sqrt(float(np.sum(found.rows.theirs, dtype=np.float64)))
    squares = float(np.sum(found.rows.moved, dtype=np.float64))
    found.moved = found.unexplained = sqrt(squares) if squares == squares else inf
    return found


def _square(values: Floats) -> float:
    flat = values.reshape(-1)
    return float(np.dot(flat, flat))


def _distance(one: Floats, other: Floats) -> float:
    """Returns the distance of two, divided by the length of the other."""
    length = sqrt(_square(other))
    return sqrt(_square(one - other)) / length if length else inf


def _constant(check: _Check) -> None:
    """Says which tensors have one value only: matrices, and norms that were left as they are made."""
    made = {1.0, 0.0 if check.export.model.zero_centered_norm else 1.0}
    norms = [found for name, found in check.values.items() if name.endswith(_NORM)]
    is_new = all(found.is_constant and found.low in made and not found.share for found in norms)
    if is_new and norms:
        check.notes.append("all norms have the value with which a model is made")
    for name, found in check.values.items():
        if not found.is_constant:
            continue
        changed = check.origin is None or found.share > 0
        if name.endswith(_NORM) and found.low in made:
            if changed and not is_new:
                found.is_named = True
                check.say(name, f"is {found.low + 0.0:g} everywhere, as a norm is made: the trained one was left out")
        elif (len(found.shape) > 1 and changed) or found.share > MOVED:
            found.is_named = True
            check.say(name, f"is {found.low + 0.0:g} everywhere")


def _repeated(check: _Check) -> None:
    """Says which tensors have the bytes of another one."""
    model = check.export.model
    first: dict[tuple, str] = {}
    for name, found in check.values.items():
        if found.is_constant or found.bad:
            continue
        other = first.setdefault((found.shape, found.digest), name)
        if other == name or (model.tie_word_embeddings and {name, other} == {EMBEDDING, HEAD}):
            continue
        is_of_origin = check.origin is not None and not found.share and not check.values[other].share
        if not is_of_origin:
            found.is_named = True
            check.say(name, f"has the same values as {other}")
    has_both = HEAD in check.export.tensors and EMBEDDING in check.values
    if model.tie_word_embeddings and has_both and not _same(check.export, EMBEDDING, HEAD):
        check.say(HEAD, f"differs from {EMBEDDING}, and config.json says tie_word_embeddings")


def _same(files: ExportedFiles, one: str, other: str) -> bool:
    both = (files.tensors[one], files.tensors[other])
    if both[0].shape != both[1].shape or both[1].dtype not in READABLE:
        return False
    return all(np.array_equal(a, b) for a, b in zip(files.chunks(one), files.chunks(other), strict=True))


def _moved(check: _Check, specs: list[TensorSpec]) -> tuple[Moved, ...]:
    if check.origin is None:
        check.notes.append("without --against, tensors in each other's place cannot be seen")
        return ()
    shares = [Moved(spec.name, check.values[spec.name].share) for spec in specs if not check.values[spec.name].bad]
    still = sum(each.share == 0 for each in shares)
    if still:
        all_of_them = "all tensors are" if still == len(shares) else f"{still} of {len(shares)} tensors are"
        check.notes.append(f"{all_of_them} the origin's, unmoved")
    return tuple(sorted(shares, key=lambda each: -each.share))


# ---------------------------------------------------------------- what a tensor holds instead


def _nearer_vector(check: _Check, name: str, found: _Values) -> str:
    """Returns the origin's vector of the same layer that this one is far nearer to than to its own; empty if none."""
    ours = np.concatenate(list(check.export.chunks(name)))
    best = min(
        ((_distance(ours, np.concatenate(list(check.origin.chunks(other)))), other) for other in _alike(check, name)),
        default=(inf, ""),
    )
    return best[1] if best[0] < found.share / 4 else ""


def _alike(check: _Check, name: str) -> list[str]:
    """Returns the origin's other tensors of a tensor's shape: those of its layer, and its kind in other layers."""
    tensors = check.origin.tensors
    layer = _LAYER.search(name)
    kind = _NUMBER.sub("*", name)
    return [
        other
        for other, tensor in tensors.items()
        if other != name
        and tensor.shape == tensors[name].shape
        and tensor.dtype in READABLE
        and ((layer and layer[0] in other) or _NUMBER.sub("*", other) == kind)
    ]


def _explained(check: _Check, name: str) -> str:
    """Returns what a matrix holds instead of the origin's; empty if it is none of what can be recognised."""
    for found in (_held(check, name), _transposed(check, name), _rows(check, name), _columns(check, name)):
        if found:
            return found
    return ""


def _sample(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, _SAMPLED).astype(np.int64))


def _held(check: _Check, name: str) -> str:
    rows = _sample(check.export.tensors[name].rows)
    ours = check.export.some(name, rows)
    alike = ((_distance(ours, check.origin.some(other, rows)), other) for other in _alike(check, name))
    distance, other = min(alike, default=(inf, ""))
    return f"holds {other} of the origin" if distance < _NEAR else ""


def _transposed(check: _Check, name: str) -> str:
    tensor = check.export.tensors[name]
    if tensor.rows != tensor.columns:
        return ""
    rows = _sample(tensor.rows)
    theirs = np.concatenate([chunk[:, rows] for chunk in check.origin.chunks(name)])
    is_it = _distance(check.export.some(name, rows), np.ascontiguousarray(theirs.T)) < _NEAR
    return "is transposed" if is_it else ""


def _rows(check: _Check, name: str, rows: np.ndarray | None = None) -> str:
    """Looks for rows among those of the layer's matrices with as many columns: joined projections, heads in another
    order.
    """
    tensor = check.export.tensors[name]
    rows = _sample(tensor.rows) if rows is None else rows
    ours = check.export.some(name, rows)
    layer = _LAYER.search(name)
    nearest = [(inf, "", -1)] * len(rows)
    for other in _same_layer(check, name, layer[0] if layer else name):
        first = 0
        for chunk in check.origin.chunks(other):
            distances = _distances(ours, chunk)
            for i, row in enumerate(distances.argmin(1)):
                nearest[i] = min(nearest[i], (float(distances[i, row]), other, first + int(row)))
            first += len(chunk)
    found = [(mine, other, row) for mine, (near, other, row) in zip(rows, nearest, strict=True) if near < _NEAR]
    moved = [(mine, other, row) for mine, other, row in found if (other, row) != (name, mine)]
    if not moved or 2 * len(found) < len(rows):
        return ""
    mine, other, row = moved[0]
    whose = "" if other == name else f" of {other}"
    return f"has rows in other places: row {mine} is the origin's row {row}{whose}"


def _same_layer(check: _Check, name: str, layer: str) -> list[str]:
    """Returns the origin's matrices of a layer with as many columns, one expert's only."""
    expert = re.search(r"\.experts\.\d+\.", name)
    columns = check.origin.tensors[name].columns
    return [
        other
        for other, tensor in check.origin.tensors.items()
        if layer in other
        and len(tensor.shape) == len(check.origin.tensors[name].shape)
        and tensor.columns == columns
        and tensor.dtype in READABLE
        and (".experts." not in other or (expert is not None and expert[0] in other))
    ]


def _distances(ours: Floats, theirs: Floats) -> Floats:
    """Returns the distance of each row of one to each of the other, divided by the length of the former."""
    lengths = np.einsum("ij,ij->i", ours, ours)
    squares = lengths[:, None] + np.einsum("ij,ij->i", theirs, theirs)[None] - 2 * ours @ theirs.T
    return np.sqrt(np.maximum(squares, 0) / np.maximum(lengths, 1e-30)[:, None])


def _columns(check: _Check, name: str, columns: np.ndarray | None = None) -> str:
    """Looks for columns in another order, as slices of tensor ranks that were joined wrongly."""
    columns = _sample(check.export.tensors[name].columns) if columns is None else columns
    products = theirs = ours = 0.0
    for one, other in zip(check.export.chunks(name), check.origin.chunks(name), strict=True):
        mine = one[:, columns]
        products = products + mine.T @ other
        theirs = theirs + np.einsum("ij,ij->j", other, other)
        ours = ours + np.einsum("ij,ij->j", mine, mine)
    squares = ours[:, None] + theirs[None] - 2 * products
    distances = np.sqrt(np.maximum(squares, 0) / np.maximum(ours, 1e-30)[:, None])
    nearest = distances.argmin(1)
    is_near = distances.min(1) < _NEAR
    moved = is_near & (nearest != columns)
    if not moved.any() or 2 * is_near.sum() < len(columns):
        return ""
    first = int(np.flatnonzero(moved)[0])
    return f"has columns in other places: column {columns[first]} is the origin's column {nearest[first]}"
