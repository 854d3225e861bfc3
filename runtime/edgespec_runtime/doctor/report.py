"""What the doctor's measurements mean: tables, which limit binds, whether speculation should pay. Pure; times nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.core.metrics import mbsu, predicted_block_efficiency
from edgespec.core.options import as_flags, shell_line
from edgespec.core.table import many, table
from edgespec_runtime.bench.report import block_cause
from edgespec_runtime.chooser.expected_acceptance import Acceptance
from edgespec_runtime.chooser.pass_costs import Costs, CostsAt
from edgespec_runtime.doctor.block_difference import Difference
from edgespec_runtime.engines.device import Device
from edgespec_runtime.engines.exactness import EXACT, FAST

USUAL_CONTEXT = 256
CLEARLY = 1.05  # what is less than this faster is not worth a flag, nor worth telling from noise
BOUND_SHARE = 0.6  # of the bandwidth: a step that streams at least so much of it waits for memory
IN_CACHE = 1.2  # times the bandwidth: what streams faster does not come from memory
FEW = 4  # tokens of a pass that verifies a usual draft
STEEP = 0.5  # plain steps that a further one of them costs, from which on arithmetic binds


@dataclass(frozen=True)
class Variant:
    """One way to run the pair. `flash_attention`: None where the engine has no such choice; `fast_graph`: see Pair."""

    engine: str
    precision: str
    flash_attention: bool | None
    costs: Costs
    difference: Difference
    fast_graph: bool = False

    @property
    def at(self) -> CostsAt:
        """Its costs in an everyday chat."""
        return self.costs.nearest(USUAL_CONTEXT)

    @property
    def name(self) -> str:
        flash = {None: "", True: ", flash attention", False: ", no flash attention"}[self.flash_attention]
        return f"{self.engine} {self.precision}{flash}{', fast mode' if self.fast_graph else ''}"


@dataclass(frozen=True)
class Threads:
    """Seconds at one thread count, of a plain target step, a target pass of four tokens and a drafter step.

    draft: None where the drafter is a head, which has one thread.
    """

    threads: int
    target: float
    target4: float
    draft: float | None


@dataclass(frozen=True)
class Findings:
    """All that was measured.

    `asked`: the options of loading that were given; `bandwidth` in bytes a second; `streamed` bytes a plain step reads, cache of
    the usual context included; `byte_ratio`: c by bytes streamed; `verified`: blocks against single steps where the bundle was
    made; `kept`: the costs are of an earlier run.
    """

    bundle: str
    asked: dict[str, Any]
    target: str
    drafter: str
    device: Device
    bandwidth: float
    threads: int
    streamed: int
    byte_ratio: float
    chosen: Variant
    others: tuple[Variant, ...]
    thread_counts: tuple[Threads, ...]
    acceptances: tuple[Acceptance, ...]
    verified: str
    kept: bool
    notes: tuple[str, ...]


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headers, and rows of cells."""


def cost_table(costs: Costs) -> Table:
    """Milliseconds of the single steps at every context."""
    rows = [
        (str(at.context), f"{1e3 * at.verify(1):.3g}", f"{1e3 * at.draft:.3g}", f"{at.c_t:.3f}")
        for at in map(costs.at, costs.contexts)
    ]
    return ("context", "plain step ms", "drafter step ms", "c_t"), rows


def draft_length_table(findings: Findings) -> Table:
    """For each γ: v(γ + 1) at every context, then at the usual one the pass to make, the cost of a block and the α that pays it.

    Beside them what each known α gives, and what memory alone would allow (MBSU).
    """
    costs, at = findings.chosen.costs, findings.chosen.at
    headers = ["", *(f"v at {context}" for context in costs.contexts), "pass", "cost", "break-even α"]
    for known in findings.acceptances:
        headers += [f"x plain, {known.where}", "MBSU"]
    rows = []
    for length in range(1, costs.longest):
        size, needed = at.pass_length(length + 1), at.break_even(length)
        padded = f"{length + 1} -> {size}" if size > length + 1 else str(size)
        row = [f"γ = {length}", *(f"{costs.at(context).v(length + 1):.2f}" for context in costs.contexts)]
        row += [padded, f"{at.block(length):.2f}", "none" if needed is None else f"{needed:.2f}"]
        for known in findings.acceptances:
            bound = mbsu(predicted_block_efficiency(known.rate, length), length, findings.byte_ratio)
            row += [f"{at.speedup(known.rate, length):.2f}", f"{bound:.2f}"]
        rows.append(row)
    return headers, rows


def variant_table(findings: Findings) -> Table:
    """Every engine, precision and attention kernel that was measured; the chosen one first."""
    headers = ["", "plain tok/s", "v(2)", "v(4)", "c_t", "block diff", "flips"]
    headers += ["best γ", "x plain", "tok/s"] if findings.acceptances else []
    rows = []
    for variant in (findings.chosen, *findings.others):
        at, seen = variant.at, variant.difference
        row = [variant.name, f"{at.plain_rate:.0f}", f"{at.v(2):.2f}", f"{at.v(4):.2f}", f"{at.c_t:.2f}"]
        row += [f"{seen.largest:.1g}", f"{seen.flips}/{seen.positions}"]
        for known in findings.acceptances[:1]:
            length, gain = at.best(known.rate)
            row += [str(length), f"{gain:.2f}", f"{at.token_rate(known.rate):.0f}"]
        rows.append(row)
    return headers, rows


def thread_table(counts: Sequence[Threads]) -> Table:
    """Milliseconds at each thread count."""
    rows = []
    for row in counts:
        times = [seconds for seconds in (row.target, row.target4, row.draft) if seconds is not None]
        rows.append([str(row.threads), *(f"{1e3 * seconds:.3g}" for seconds in times)])
    return ("threads", "target step ms", "4 tokens ms", "drafter step ms")[: len(rows[0])], rows


def limit(findings: Findings) -> str:
    """Which limit binds a plain step: memory, arithmetic, or what a pass costs whatever it holds."""
    at = findings.chosen.at
    rate, bandwidth = findings.streamed * at.plain_rate, findings.bandwidth
    few = min(FEW, findings.chosen.costs.longest)
    further = (at.v(few) - 1) / max(1, few - 1)
    used = (
        f"a step of {1e3 / at.plain_rate:.3g} ms reads {findings.streamed / 1e6:.3g} MB, {rate / 1e9:.3g} GB/s where memory "
        f"gives {bandwidth / 1e9:.3g}; each further token in a pass costs {max(0.0, further):.2f} steps"
    )
    if further >= STEEP:
        return f"Arithmetic binds ({used}): a long pass saves little, so only a very good drafter pays."
    if rate > IN_CACHE * bandwidth:
        return f"The weights stay in the processor's caches ({used}), so memory does not bind."
    if rate >= BOUND_SHARE * bandwidth:
        return f"Memory bandwidth binds ({used}): verifying a few tokens costs little more than one."
    return f"Neither memory nor arithmetic binds alone ({used}): much of a step is paid once, whatever the pass holds."


def diagnosis(findings: Findings) -> list[str]:
    """For every known α one sentence: what the best γ should give, or why none pays."""
    chosen = findings.chosen
    if not findings.acceptances:
        least = chosen.at.least(range(1, chosen.costs.longest))
        if least is None:
            return ["Speculation cannot pay here, whatever the drafter: no α below 1 breaks even."]
        return [f"The bundle does not say its α; drafts pay where it is above {least[0]:.2f}."]
    return [_diagnosed(findings, known) for known in findings.acceptances]


def _diagnosed(findings: Findings, known: Acceptance) -> str:
    at, rate = findings.chosen.at, known.rate
    length, gain = at.best(rate)
    where = f"{known.where}, α = {rate:.2f}"
    if length:
        needed = at.break_even(length)
        margin = f"it pays down to α = {needed:.2f}" if needed else "it pays at any α"
        word = "should pay" if gain >= CLEARLY else "makes little difference"
        return f"Speculation {word} ({where}): {gain:.2f}x plain decoding at γ = {length}; {margin}."
    drafts = range(1, at.most + 1)
    if not drafts:
        return "Speculation cannot run: the context has no room for a draft."
    best = max(drafts, key=lambda draft: at.speedup(rate, draft))
    predicted = at.speedup(rate, best)
    verify_cost = at.v(at.pass_length(best + 1))
    cause = block_cause(rate, predicted_block_efficiency(rate, best), best, at.c_t, verify_cost)
    return (
        f"Speculation does not pay ({where}): {predicted:.2f}x plain decoding at best, at γ = {best}. {cause}"
        + _exactness_costs(findings, best)
    )


def _exactness_costs(findings: Findings, length: int) -> str:
    """What the exact mode is part of the cause of: the same file in the other mode verifies clearly faster."""
    chosen = findings.chosen
    for other in findings.others:
        same = (other.engine, other.precision) == (chosen.engine, chosen.precision)
        mine = chosen.at.verify(length + 1)
        theirs = other.at.verify(length + 1)
        if same and mine > CLEARLY * theirs and other.difference.flips > chosen.difference.flips:
            return (
                f" Exactness is part of it: {other.name} verifies in {theirs / mine:.0%} of the time and changes "
                f"{other.difference.flips} of {other.difference.positions} argmaxes."
            )
    return ""


def advice(findings: Findings) -> list[str]:
    """Commands to run next, each with what it is for."""
    chosen, asked = findings.chosen, dict(findings.asked)
    steps = {row.threads: row.target for row in findings.thread_counts}
    quickest = min(steps, key=steps.__getitem__, default=0)
    if quickest and CLEARLY * steps[quickest] < steps.get(findings.threads, 0.0):
        asked["threads"] = quickest

    def line(verb: str, options: Mapping[str, Any], use: str) -> str:
        return f"{shell_line('edgespec', verb, findings.bundle, *as_flags(options))}    # {use}"

    if not findings.acceptances:
        return [line("bench", asked, "measures α and the speed-up")]
    rate = findings.acceptances[0].rate
    length, gain = chosen.at.best(rate)
    how = {"draft_length": length} if length else {"draft": False}
    said = f"predicted {chosen.at.token_rate(rate):.0f} tok/s"
    said += f", {gain:.2f}x plain decoding" if length else ""
    if chosen.difference.flips:
        said += "; not exact: a block can change a greedy reply"
    lines = [line("chat", asked | how, said)]
    if length:
        lines.append(line("bench", asked, "measures what is predicted here"))
    fastest = max((chosen, *findings.others), key=lambda variant: variant.at.token_rate(rate))
    times = fastest.at.token_rate(rate) / chosen.at.token_rate(rate)
    if times > CLEARLY:
        files = [(way.engine, way.precision) for way in (chosen, *findings.others) if way.fast_graph]
        exact = (
            EXACT if (fastest.engine, fastest.precision) in files else None
        )  # the file's usual mode may be fast
        other = {
            "engine": fastest.engine,
            "precision": fastest.precision,
            "flash_attention": fastest.flash_attention,
            "mode": FAST if fastest.fast_graph else exact,
        }
        said = f"about {times:.1f} times as fast"
        if fastest.precision != chosen.precision:
            said += "; other weights, so other replies"
        if fastest.difference.flips:
            said += "; not exact"
        lines.append(line("doctor", findings.asked | other, said))
    return lines


def text(findings: Findings, *, markdown: bool = False) -> str:
    """The whole report."""
    chosen, device = findings.chosen, findings.device
    source = "kept from an earlier run; --fresh measures again" if findings.kept else "measured now"
    tables = {
        f"Single steps ({source})": cost_table(chosen.costs),
        f"Draft lengths: v = a pass of γ + 1 tokens in plain steps; the rest at a context of {chosen.at.context}": (
            draft_length_table(findings)
        ),
    }
    if findings.others:
        tables["Ways to run this bundle"] = variant_table(findings)
    if findings.thread_counts:
        tables["Threads"] = thread_table(findings.thread_counts)
    parts = [
        f"{findings.target} with {findings.drafter}: {chosen.name}, "
        f"{many(findings.threads, 'thread')}\n{device}; reads {findings.bandwidth / 1e9:.1f} GB/s",
        *(f"{title}\n\n{table(*cells, markdown=markdown)}" for title, cells in tables.items()),
        f"Blocks against single steps: {chosen.difference} here; where the bundle was made: {findings.verified}.",
        limit(findings),
        "\n".join(diagnosis(findings)),
    ]
    if findings.notes:
        parts.append("\n".join(f"Note: {note}." for note in findings.notes))
    parts.append("\n".join(f"Next: {line}" for line in advice(findings)))
    return "\n\n".join(parts)


def as_json(findings: Findings) -> dict[str, Any]:
    """Everything measured, then what is derived from it."""
    costs, usual = findings.chosen.costs, findings.chosen.at
    return {
        **asdict(findings),
        "derived": {
            "context": usual.context,
            "v": {str(at): [costs.at(at).v(n) for n in range(1, costs.longest + 1)] for at in costs.contexts},
            "c_t": {str(at): costs.at(at).c_t for at in costs.contexts},
            "break_even": {str(length): usual.break_even(length) for length in range(1, costs.longest)},
            "best": [
                {"where": known.where, "draft_length": length, "speedup": gain}
                for known in findings.acceptances
                for length, gain in [usual.best(known.rate)]
            ],
            "limit": limit(findings),
            "diagnosis": diagnosis(findings),
            "advice": advice(findings),
        },
    }
