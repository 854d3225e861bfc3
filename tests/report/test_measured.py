"""Files of measurements as large as edgespec writes them are read and shown; larger ones are cut or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from edgespec_runtime.bench.report import LEAST_PROMPTS
from edgespec_runtime.bench.suite import MAX_CATEGORIES
from edgespec_runtime.rules.table import MAX_DRAFT

from edgespec.core.errors import InputError
from edgespec.report.engines import ways_section
from edgespec.report.fields import Fields
from edgespec.report.gather import BENCH, Run, Source
from edgespec.report.measured import AUTO, PLAIN, settings_of
from edgespec.report.parts import ABSENT, flips
from edgespec.report.speed import category_section, speed_section


def bench_run(**values: Any) -> Run:
    file = Path("bench.json")
    return Run(sources={BENCH: Source(BENCH, file, fields=Fields(values, str(file)))})


def test_a_bench_of_every_draft_length_is_shown() -> None:
    lengths = [PLAIN, *range(1, MAX_DRAFT + 1), AUTO]
    rows = [{"draft_length": length, "speedup": [1.5, 1.4, 1.6]} for length in lengths]
    gains, columns = speed_section([bench_run(summaries=rows)]).parts
    (table,) = columns[0]
    assert len(table.rows) == len(lengths)
    assert table.rows[-2][0].text == f"γ = {MAX_DRAFT}"
    for length in (1, 5, 61):  # every fourth one is written below the picture
        assert f">{length}</text>" in gains.svg
    assert ">62</text>" not in gains.svg
    with pytest.raises(InputError, match=f"has {len(lengths) + 1} entries; at most"):
        speed_section([bench_run(summaries=[*rows, rows[-1]])])


def test_a_suite_of_the_most_kinds_is_shown() -> None:
    rows = [
        {"category": str(number), "draft_length": length}
        for length in (3, AUTO)
        for number in range(MAX_CATEGORIES + 1)
    ]
    (columns,) = category_section([bench_run(categories=rows)]).parts
    assert [len(table.rows) for table in columns[0]] == [MAX_CATEGORIES + 1] * 2


def test_a_kind_of_few_questions_has_no_interval() -> None:
    """As in the table that bench prints: of fewer than five it is too narrow."""
    names = ("block_efficiency", "plain_token_rate", "token_rate", "speedup")
    found = {"draft_length": 3, "acceptance_rate": 0.5, **{name: [1.5, 1.4, 1.6] for name in names}}
    rows = [{"category": "a", "prompts": asked, **found} for asked in (LEAST_PROMPTS - 1, LEAST_PROMPTS)]
    (columns,) = category_section([bench_run(categories=rows)]).parts
    few, enough = columns[0][0].rows
    assert [cell.text for cell in few] == [cell.text for cell in enough]
    assert [cell.note for cell in few] == ["4 questions", *[""] * 5]
    assert [cell.note for cell in enough] == ["5 questions", "1.40 to 1.60", "", *["1.40 to 1.60"] * 3]


@pytest.mark.parametrize(("lengths", "shown"), [(22, 22), (50, 40)])
def test_an_evaluation_of_many_settings_is_read(
    lengths: int, shown: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the distilled drafter the first ones are shown; how many there are is said where some are not."""
    rows = [
        {"drafter": drafter, "draft_length": length}
        for drafter in ("pretrained", "distilled")
        for length in range(1, lengths + 1)
    ]
    found = settings_of(Fields({"settings": rows}, "evaluation.json"))
    assert [(one.text("drafter"), one.draft_length) for one in found] == [
        ("distilled", length) for length in range(1, shown + 1)
    ]
    said = capsys.readouterr().err
    assert ("evaluation.json has 50 settings" in said) is (shown < lengths)


def test_flips_beside_a_bench_are_those_of_the_bundle() -> None:
    """Bench counts none: on this machine they may be others."""
    summaries = [{"draft_length": PLAIN}, {"draft_length": 1, "speedup": [1.5, 1.4, 1.6]}]
    run = bench_run(summaries=summaries, exactness={"flips": 2, "positions": 400})
    (table,) = ways_section([run]).parts
    assert table.title == "Measured by bench"
    assert dict(zip(table.headers, table.rows[0], strict=True))["flips when packed"].text == "2"


def test_flips_among_no_positions_were_not_measured() -> None:
    assert flips(0, 0).text == flips(None, 40).text == ABSENT
    assert flips(0, None).text == "0"
    assert (flips(0, 40).text, flips(0, 40).note) == ("0", "of 40")
