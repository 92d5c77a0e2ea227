"""Every seeded fault is caught, by the fuzzer or by a probe; the two that change nothing are known not to be.

A fuzzer that finds nothing proves nothing unless it finds these.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import sys
from collections.abc import Iterator

import pytest
from replay import fuzz, mutants

MOST_PROGRAMS = 60
PROGRAMS_OF_EQUIVALENTS = 6


@pytest.fixture(autouse=True)
def _broken_code_is_loud(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    logging.disable(logging.CRITICAL)
    yield
    gc.collect()  # what broken code has left lying about would be just as loud in another test
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("mutant", mutants.CAUGHT, ids=lambda mutant: mutant.name)
def test_a_seeded_fault_is_caught(mutant: mutants.Mutant) -> None:
    with mutant.planted():
        if mutant.probe is not None:
            with pytest.raises(AssertionError):
                _probe(mutant.probe)
            return
        _, found = fuzz.run(
            range(mutant.start, mutant.start + MOST_PROGRAMS),
            lane=mutant.lane,
            crash_points=6,
            first_only=True,
            draw=mutant.draw,
        )
    assert found, "the fuzzer saw nothing"


def test_the_probes_pass_without_a_fault() -> None:
    for name in {mutant.probe for mutant in mutants.CAUGHT if mutant.probe is not None}:
        _probe(name)


@pytest.mark.parametrize("mutant", mutants.EQUIVALENT, ids=lambda mutant: mutant.name)
def test_a_change_that_is_known_to_matter_to_nobody_is_not_caught(mutant: mutants.Mutant) -> None:
    with mutant.planted():
        _, found = fuzz.run(range(PROGRAMS_OF_EQUIVALENTS), crash_points=6)
    assert not found


def test_a_mutant_whose_text_is_gone_is_an_error() -> None:
    first = mutants.CAUGHT[0]
    rotten = mutants.Mutant("rotten", first.owner, first.function, "no such text", "")
    with pytest.raises(mutants.Rotten), rotten.planted():
        pass


def _probe(name: str) -> None:
    hazards = importlib.import_module("replay.test_hazards")

    asyncio.run(getattr(hazards, name)())
