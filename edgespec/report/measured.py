"""A bench and an evaluation, read as what every draft length and every setting gave. Derives what needs raw counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts, bootstrap, ratio_of_sums
from edgespec.core.output import note
from edgespec.core.table import sampling_words
from edgespec.report.fields import Fields, Interval

PLAIN, AUTO = 0, -1  # draft lengths of a plain run, and of one whose draft lengths were chosen
MOST_POSITIONS = 8  # of a draft that are shown; the chooser goes as far
MOST_LENGTHS = 64  # of one bench: plain decoding, every γ that a bench takes, and chosen ones
MOST_SETTINGS = 40  # of an evaluation that are shown
MOST_PROMPTS = 10_000  # with raw counts in an evaluation; a suite has at most as many questions
RESAMPLED = 1024  # prompts that an interval of raw counts is made of: evenly chosen where there are more


def name_of(draft_length: int, chosen: str) -> str:
    """What a draft length is called; `chosen`: lengths that were chosen block by block."""
    return {PLAIN: "plain", AUTO: chosen}.get(draft_length, f"γ = {draft_length}")


class Speed(Fields):
    """One draft length of a bench, as its JSON file has it; costs in plain steps."""

    @property
    def draft_length(self) -> int:
        return self.whole("draft_length") or PLAIN

    @property
    def name(self) -> str:
        return name_of(self.draft_length, f"γ chosen ({self.number('mean_draft_length') or 0.0:.1f})")

    @property
    def speedup(self) -> Interval | None:
        return self.interval("speedup")

    @property
    def tau(self) -> Interval | None:
        return self.interval("block_efficiency")

    @property
    def mbsu(self) -> dict[str, float | None]:
        bounds = self.object("mbsu")
        return {kind: bounds.number(kind) for kind in ("parameters", "bytes") if kind in bounds.values}

    @property
    def mbsu_kind(self) -> str:
        """By bytes where the bench has it: that is what memory moves."""
        return "bytes" if "bytes" in self.mbsu else next(iter(self.mbsu), "")


class Bench(Fields):
    """A bench's file."""

    @cached_property
    def speeds(self) -> list[Speed]:
        """Raises InputError: no plain run, draft lengths without end."""
        found = [Speed(one.values, one.where) for one in self.objects("summaries", MOST_LENGTHS)]
        lengths = [one.whole("draft_length") for one in found]
        if not {PLAIN} < {*lengths} or any(one is None or one < AUTO for one in lengths):
            raise InputError(
                f"{self.where}: 'summaries' has the draft lengths {lengths}; plain decoding (0) and another one "
                f"are wanted, none below {AUTO}: measure it again"
            )
        return found

    @cached_property
    def counts(self) -> dict[int, list[RawCounts]]:
        """By draft length, one sum for every prompt."""
        summed: dict[int, dict[int, RawCounts]] = {}
        for run in self.objects("runs"):
            length, prompt = run.whole("draft_length"), run.whole("prompt")
            if length is None or prompt is None:
                raise InputError(f"{run.where} has no 'draft_length' or no 'prompt'; measure it again")
            summed.setdefault(length, {}).setdefault(prompt, RawCounts()).add(
                run.object("counts").raw_counts()
            )
        return {length: [one for _, one in sorted(prompts.items())] for length, prompts in summed.items()}

    @property
    def plain(self) -> Speed:
        return next(one for one in self.speeds if one.draft_length == PLAIN)

    @property
    def chosen(self) -> Speed | None:
        """With draft lengths that were chosen block by block."""
        return next((one for one in self.speeds if one.draft_length == AUTO), None)

    @property
    def fixed(self) -> list[Speed]:
        return [one for one in self.speeds if one.draft_length > PLAIN]

    @property
    def drafted(self) -> list[Speed]:
        """The fixed draft lengths. A rule with a loop of its own has none, and its one way to draft stands for them."""
        return self.fixed or [one for one in self.speeds if one.draft_length == AUTO]

    @property
    def best(self) -> Speed | None:
        """The fastest of them."""
        timed = [one for one in self.drafted if one.speedup is not None]
        return max(timed, key=lambda one: one.speedup[0] if one.speedup else 0.0, default=None)


class Setting(Fields):
    """One setting of an evaluation: τ and α with intervals, and counts by prompt where the file has them."""

    @property
    def temperature(self) -> float:
        return self.number("temperature") or 0.0

    @property
    def top_p(self) -> float:
        return 1.0 if (top_p := self.number("top_p")) is None else top_p

    @property
    def draft_length(self) -> int:
        return self.whole("draft_length") or 0

    @property
    def sampling(self) -> str:
        return sampling_words(self.temperature, self.top_p)

    def metric(self, name: str) -> Interval | None:
        return self.object("metrics").interval(name)

    def by_rule(self, rule: str) -> Interval | None:
        """α on the target's own text, by the rule that an engine is known by."""
        forced = self.metric("alpha_teacher_forced")
        if rule == "lossless":
            return forced
        same = forced if self.temperature == 0 else None  # there every rule is the agreement of two argmaxes
        return self.metric(f"alpha_{rule}") or same

    @property
    def counts(self) -> list[RawCounts]:
        return [one.raw_counts() for one in self.objects("counts", MOST_PROMPTS)]


def settings_of(found: Fields) -> list[Setting]:
    """The distilled drafter's settings (else those of the last drafter listed), by temperature and γ."""
    read = [Setting(one.values, one.where) for one in found.objects("settings")]
    names = [one.text("drafter") for one in read]
    name = "distilled" if "distilled" in names else (names or [""])[-1]
    chosen = [one for one, its in zip(read, names, strict=True) if its == name]
    if len(chosen) > MOST_SETTINGS:
        note(
            f"{found.where} has {len(chosen):,} settings of one drafter; the first {MOST_SETTINGS} are shown"
        )
    return sorted(chosen, key=lambda one: (one.temperature, one.top_p, one.draft_length))[:MOST_SETTINGS]


def share(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """Σ part / Σ whole over prompts with its 95 % bootstrap interval; None where no prompt has any."""
    known = [pair for pair in pairs if pair[1] > 0]
    if not known:
        return None
    ratio = ratio_of_sums(itemgetter(0), itemgetter(1))
    _, low, high = bootstrap(known[:: -(-len(known) // RESAMPLED)], ratio)
    return ratio(known), low, high


def by_position(counts: Sequence[RawCounts]) -> list[Interval]:
    """α at every position of a draft, of those that were tested there."""
    found: list[Interval] = []
    for place in range(min(MOST_POSITIONS, max((len(one.tested) for one in counts), default=0))):
        at = share([(one.accepted[place], one.tested[place]) for one in counts if place < len(one.tested)])
        if at is None:  # nothing got so far
            break
        found.append(at)
    return found
