"""Values and sections of launch commands are read as hydra reads them, and merged as in verl's own configuration."""

import json
import math

import pytest
from golden import golden

from mrl.errors import ConfigError
from mrl.tools.import_verl.expansion import Value
from mrl.tools.import_verl.hydra_values import hydra_value, read_value
from mrl.tools.import_verl.verl_command import from_arguments


def named(value):
    """As the golden file has it: names are texts, and numbers that JSON has not are spelt."""
    if isinstance(value, dict):
        return {str(name): named(below) for name, below in value.items()}
    if isinstance(value, list):
        return [named(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def test_every_value_is_hydras_and_what_hydra_refuses_is_refused():
    read = 0
    for case in (case for case in golden("overrides") if "text" in case):
        if not case["read"]:
            with pytest.raises(ConfigError):
                read_value(case["text"])
            continue
        ours = named(read_value(case["text"]))
        # as texts, which tell 1 from 1.0 and True
        assert json.dumps(ours, sort_keys=True) == json.dumps(case["gave"], sort_keys=True), case["text"]
        if case["text"].strip() != "None":  # a text to hydra; scripts pass Python's null on from a variable
            assert named(hydra_value(case["text"])) == ours
        read += 1
    assert read > 450


def test_sections_are_merged_as_in_verls_configuration():
    """Each key that verl's configuration has otherwise is there with that value, and all others are as they were."""
    compared = 0
    for case in (case for case in golden("overrides") if "words" in case):
        command = from_arguments([Value(word) for word in case["words"]])
        ours = {override.key: override.value for override in command.overrides}
        assert not command.faults
        assert case["changed"].keys() <= ours.keys(), case["words"]
        assert ours == {key: (case["changed"] | case["holds"])[key] for key in ours}, case["words"]
        compared += len(ours)
    assert compared > 150
