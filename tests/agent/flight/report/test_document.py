"""The document: JSON that any reader takes, with keys that stay."""

import json
from dataclasses import replace

import pytest

from mp_agent.flight.report import as_dict, as_json
from tests.agent.flight.analyses import EVIL, analysis_of, exploding
from tests.agent.flight.builders import calm
from tests.agent.node.builders import merged_step


def test_the_document_is_json_that_any_reader_takes():
    analysis = exploding(run=EVIL)
    steps = (*analysis.history.steps, merged_step(99, loss_scale=0.0, abs_max=0.0))
    analysis = replace(analysis, history=replace(analysis.history, steps=steps))
    document = json.loads(as_json(analysis), parse_constant=pytest.fail)
    assert (document["format"], document["version"]) == ("mp_agent postmortem", 1)
    assert document["first_bad"]["cause"] == "gradient_explosion"
    assert document["first_bad"]["step"] == 63
    assert document["findings"][0]["likelihood"] == "likely"


def test_the_keys_of_the_document_stay():
    document = as_dict(exploding())
    assert set(document) == set(
        "format version source reasons run first_bad findings remedies moves steps layers ranks "
        "conditions not_measured notes".split()
    )
    assert set(document["findings"][0]) == set(
        "cause title likelihood score alerts follows step sequence rank layer phase "
        "for against".split()
    )
    assert set(document["first_bad"]) == set("step sequence rank layer phase cause".split())


def test_a_clean_run_has_no_first_bad_step():
    assert as_dict(analysis_of(*calm(60)))["first_bad"] is None


def test_a_run_without_steps_can_be_written():
    json.loads(as_json(analysis_of()))
