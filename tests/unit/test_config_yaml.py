"""Reading YAML: plain data only, numbers as people write them, every value with its line."""

import pytest

from mrl.config.yaml_tree import dump_value, merge, parse_yaml
from mrl.errors import ConfigError, shown


def plain(text: str):
    return parse_yaml(text, "f.yaml").plain()


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3e-4", 3e-4), ("1e-6", 1e-6), ("1E3", 1000.0), (".5", 0.5), ("-2.5e+3", -2500.0), ("12", 12), ("-1", -1),
        ("010", 10),
        ("0x1f", 31), ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("on", "on"), ("yes", "yes"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("'3e-4'", "3e-4"),
        ("1.2.3", "1.2.3"), ("e5", "e5"),
    ],
)  # fmt: skip
def test_scalars_follow_the_core_schema(written, value):
    assert plain(f"a: {written}") == {"a": value}
    assert type(plain(f"a: {written}")["a"]) is type(value)


@pytest.mark.parametrize(
    "value",
    ["3e-4", "12", "true", "null", "", "~", " a", "a: b", "a # b", "two\nlines", "tab\t", "ä 😀", "'", '"', "- x",
     "[a]", 1e-6, 3e-4, 0.0, 1e22, -1, True, None, [], ["1", 1, None, [2.5]], {}, {"a b": {"c": ["x", "1e3"]}}],
)  # fmt: skip
def test_a_dumped_value_is_one_line_and_reads_back_as_itself(value):
    text = dump_value(value)
    assert "\n" not in text
    assert parse_yaml(f"k:\n  a: {text}  # comment", "f").plain() == {"k": {"a": value}}


def test_every_value_knows_its_line():
    tree = parse_yaml("a:\n  b: 1\n\n  c:\n    - x\n    - y\n", "f.yaml")
    lines = {".".join(p): str(tree.find(p)[0].origin) for p in (("a",), ("a", "b"), ("a", "c"))}
    assert lines == {"a": "f.yaml:1", "a.b": "f.yaml:2", "a.c": "f.yaml:4"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3: the key a appears twice"),
        ("a: !!python/object/apply:os.system [x]", "f.yaml:1: .*tag .*python.* is refused"),
        ("a: !!str 1", "tag .* is refused"),
        ("a: !mine 1", "tag !mine is refused"),
        ("x: &x {a: 1}\ny:\n  <<: *x", r"f.yaml:3: merge keys"),
        ("1: a", "a key must be text"),
        ("a: [1", "f.yaml:1: not valid YAML"),
        ("a: @x", "f.yaml:1: not valid YAML"),
        ("a: &a [*a]", "contains it"),
        ("a: 1\n---\nb: 2", "f.yaml:2: not valid YAML"),
        ("a: \x07", "not valid YAML"),
        ("[" * 400, "nested too deeply"),
    ],
)
def test_what_is_no_plain_mapping_is_refused_with_its_line(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "f.yaml")


def test_aliases_cannot_blow_up():
    levels = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 9))
    with pytest.raises(ConfigError, match="once aliases are expanded"):
        parse_yaml(f"l0: &l0 [x]\n{levels}", "f.yaml")


def test_a_few_aliases_are_fine():
    assert plain("a: &x [1, 2]\nb: *x") == {"a": [1, 2], "b": [1, 2]}


def test_mappings_merge_deeply_and_everything_else_replaces():
    below = parse_yaml("a: {x: 1, y: {z: 1, w: 1}}\nl: [1, 2]\nm: {k: 1}", "low")
    above = parse_yaml("a: {y: {z: 2}}\nl: [3]\nm: null\nn: 5", "high")
    merged = merge(below, above)
    assert merged.plain() == {"a": {"x": 1, "y": {"z": 2, "w": 1}}, "l": [3], "m": None, "n": 5}
    assert [str(merged.find(("a", k, *rest))[0].origin) for k, rest in (("x", ()), ("y", ("z",)))] == [
        "low:1",
        "high:1",
    ]


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -1, 1e-6, 1.0, 0.25, 1e20, float("inf"), float("nan"), "fast", "a/b.yaml", "", "null", "3", "3e-4",
        "two words",
     [1, "x"], (), {}, {"vllm": {"quantization": "fp8", "sizes": [1, 2]}}, "# x", "a: b"],
    ids=repr,
)  # fmt: skip
def test_messages_show_values_as_a_file_would_say_them(value):
    assert shown(value) == dump_value(value)
