"""What the report says is missing can be made: a command is named only where a bundle among its runs takes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgespec.core.manifest import HEAD, BundleModel, Manifest
from edgespec.report.curves import curves_section
from edgespec.report.gather import BUNDLE, Run, Source
from edgespec.report.other_engines import others_section
from edgespec.report.parts import Section

MODEL = BundleModel("tiny", "local folder", {"context_length": 64}, 1000, {})
PLAIN = Manifest({}, MODEL, MODEL, {"precision": "fp32"}, {}, {}, {}, {})
OWN_TOKENS = replace(PLAIN, drafter=replace(MODEL, vocabulary="drafter/vocabulary.json"))
A_HEAD = replace(OWN_TOKENS, drafter=replace(OWN_TOKENS.drafter, kind=HEAD))


def named(section: Section) -> list[str]:
    return [command.split()[1] for _, command in section.missing]


def test_a_command_that_the_bundle_refuses_is_not_named() -> None:
    plain, own, head = (
        Run(number, {BUNDLE: Source(BUNDLE, Path("bundle"), manifest=manifest)})
        for number, manifest in enumerate((PLAIN, OWN_TOKENS, A_HEAD))
    )
    assert [named(curves_section([run])) for run in (plain, own, head)] == [["tradeoff"], ["tradeoff"], []]
    assert "other-engines" in named(others_section([plain]))
    assert not {"other-engines"} & {*named(others_section([own])), *named(others_section([head]))}
    assert named(curves_section([head, plain])) == ["tradeoff"]
    assert named(others_section([own, plain])) == ["other-engines"]
    assert named(curves_section([Run()])) == ["tradeoff"]  # files of measurements alone
