"""Each claim of the paper, what the finished runs say of it, and how many seeds would tell it where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.analysis import statistics
from hkd_hpc.analysis.tables import NOTHING
from hkd_hpc.common.words import counted
from hkd_hpc.report.paper import contents
from hkd_hpc.results.differences import GOALS

from . import tables
from .tables import ASKED, OURS, Results

STAR, REFERENCE, PROTO = "fedhkd_star", schemes.REFERENCE, "fedproto"
LAST = {goal: f"{goal}_test_accuracy_last" for goal in GOALS}
POINT = 0.01
MAIN = ("table1", "small", "smoke")  # tables at beta .5, the paper's own setting first
BETAS = ("beta02", "beta5")
CONSTANT = "constant"  # another reading of the paper's learning rate
LAST_SEEDS = 10  # with which the study ends
MOST_TIME, MOST_PAYLOAD = 1.10, 1.01  # of FedAvg's: what is still "low cost" here
HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"
NOT_RUN, NOT_MEASURED = "not run yet", f"{OPEN}: not measured in every run"
EXCLUDED, NOT_EXCLUDED, LARGER = "excluded", "not excluded", "it is larger"
PAPERS_NET = "ResNet18"


@dataclass(frozen=True)
class Answer:
    """One claim in one table.

    Attributes:
        claim: in a few words.
        table: its title, and of how many seeds.
        measured: differences with half of their 95 % intervals.
        papers: what the paper has for it.
        verdict: HOLDS, FAILS or that it cannot be told, and why.
        as_large: whether a difference as large as the paper's is excluded.
        needed: about how many seeds would tell an effect of the paper's size, and one point.
        is_final: whether no run of it is still to come.
    """

    claim: str
    table: str
    measured: str
    papers: str
    verdict: str
    as_large: str
    needed: str
    is_final: bool = False


def answers(results: Mapping[str, Results], ratios: Mapping[str, Sequence[float]]) -> list[Answer]:
    """All claims in all tables that speak of them; `ratios`: as of seconds.read."""
    own = {asked.name: (asked.title, without_controls(results[asked.name])) for asked in ASKED}
    main, betas = [own[name] for name in MAIN], [own[name] for name in BETAS]
    at = {**dict.fromkeys((*MAIN, CONSTANT), 0.5), **dict(zip(BETAS, (0.2, 5.0)))}
    return [
        *(above(OURS, REFERENCE, goal, *own[name], beta) for goal in GOALS for name, beta in at.items()),
        *(best(goal, *each) for goal in GOALS for each in main),
        *(above(STAR, PROTO, "global", *each) for each in main),
        *(little_time(network, values) for network, values in ratios.items()),
        *(few_bytes(*each) for each in main),
        *(between(goal, *each) for goal in GOALS for each in main),
        *(less_affected(goal, *(each for _, each in betas)) for goal in GOALS),
    ]


# ---------------------------------------------------------------------------------------------- the claims


def above(one: str, other: str, goal: str, title: str, results: Results, beta: float = 0.5) -> Answer:
    """One scheme is better than another."""
    claim, papers = f"{named(one)} has a better {goal} accuracy than {named(other)}", gain(one, other, goal, beta)
    own = results.only((one, other))
    if not has(own, one, other):
        return not_run(claim, title, papers_text(title, papers))
    gap_S = difference(own, one, other, goal)
    return Answer(
        claim,
        of_seeds(title, own),
        interval_text(gap_S),
        f"{papers_text(title, papers)}: {size_text(gap_S, papers)}",
        provisional(all_better({other: gap_S}), own.seeds),
        provisional(as_large(gap_S, papers), own.seeds),
        needed_text([(gap_S, papers)], 1),
        has_ended(own.seeds),
    )


def best(goal: str, title: str, results: Results) -> Answer:
    """FedHKD has the best accuracy: it is better than each of the paper's seven others; FedHKD* is its own variant."""
    claim, papers = f"FedHKD has the best {goal} accuracy of eight", gain(OURS, REFERENCE, goal)
    rivals = [row for row in schemes.PAPER if row not in (OURS, STAR)]
    own = results.only((OURS, *rivals)).compared
    if not has(own, OURS, REFERENCE):
        return not_run(claim, title, papers_text(title, papers))
    beside = {row: difference(own, OURS, row, goal) for row in rivals if row in own.rows}
    lacking = [named(row) for row in rivals if row not in own.rows]
    verdict = all_better(beside, len(rivals))
    is_waiting = bool(lacking) and not verdict.startswith(FAILS)
    if is_waiting:
        verdict = f"{OPEN} before all runs of {', '.join(lacking)} are there"
    return Answer(
        claim,
        of_seeds(title, own),
        f"FedHKD – FedAvg {interval_text(beside[REFERENCE])}; {rank_text(own, rivals, goal)}",
        f"{papers_text(title, papers)}: {size_text(beside[REFERENCE], papers)}",
        provisional(verdict, own.seeds),
        NOTHING,
        needed_text([(values, gain(OURS, row, goal)) for row, values in beside.items()], len(rivals)),
        has_ended(own.seeds) and not is_waiting,
    )


def between(goal: str, title: str, results: Results) -> Answer:
    """FedHKD* is better than FedAvg, and FedHKD better than FedHKD*."""
    claim, pairs = f"FedHKD\\* is between FedAvg and FedHKD, {goal}", ((STAR, REFERENCE), (OURS, STAR))
    papers = [gain(*pair, goal) for pair in pairs]
    told, own = papers_text(title, *papers), results.only((OURS, STAR, REFERENCE))
    if not has(own, OURS, STAR, REFERENCE):
        return not_run(claim, title, told)
    steps = {f"{named(one)} – {named(other)}": difference(own, one, other, goal) for one, other in pairs}
    return Answer(
        claim,
        of_seeds(title, own),
        "; ".join(f"{name} {interval_text(values)}" for name, values in steps.items()),
        told,
        provisional(all_better(steps, len(steps), "above 0:", "below 0:"), own.seeds),
        NOTHING,
        needed_text(list(zip(steps.values(), papers)), len(steps)),
        has_ended(own.seeds),
    )


def little_time(network: str, ratios: Sequence[float]) -> Answer:
    """A client's round of FedHKD takes at most MOST_TIME of FedAvg's CPU seconds; by the geometric mean, as ratios have
    it."""
    claim, table = "FedHKD takes little more time than FedAvg", f"{network}, a client alone ({len(ratios)} pairs)"
    papers = f"{shown(papers_time(), '.2f')} (GPU seconds)"
    if len(ratios) < 2:
        return not_run(claim, table, papers)
    mean, half = statistics.interval(np.log(ratios))
    low, middle, high = np.exp([mean - half, mean, mean + half])
    verdict = HOLDS if high <= MOST_TIME else FAILS if low > MOST_TIME else OPEN
    measured = f"{shown(middle, '.2f')} ({shown(low, '.2f')} to {shown(high, '.2f')}) of FedAvg's"
    return Answer(claim, table, measured, papers, verdict, NOTHING, NOTHING, is_final=True)


def few_bytes(title: str, results: Results) -> Answer:
    """A round of FedHKD sends at most MOST_PAYLOAD of FedAvg's bytes in every seed."""
    claim = "FedHKD sends few more bytes than FedAvg"
    own = results.only((OURS, REFERENCE))
    if not has(own, OURS, REFERENCE):
        return not_run(claim, title, NOTHING)
    payload = max(payload_ratio(own, seed) for seed in own.seeds)
    verdict = HOLDS if payload <= MOST_PAYLOAD else FAILS
    measured, told = f"at most {shown(payload, '.4f')} of FedAvg's", provisional(verdict, own.seeds)
    return Answer(claim, of_seeds(title, own), measured, NOTHING, told, NOTHING, NOTHING, has_ended(own.seeds))


def less_affected(goal: str, severe: Results, even: Results) -> Answer:
    """From beta 5 to .2 FedHKD loses less accuracy, or gains more, than FedAvg."""
    claim, title = f"FedHKD – FedAvg is larger at beta .2 than at 5, {goal}", "Beta .2 and 5, small net"
    papers = round(gain(OURS, REFERENCE, goal, beta=0.2) - gain(OURS, REFERENCE, goal, beta=5.0), 4)
    severe, even = (each.only((OURS, REFERENCE)) for each in (severe, even))
    if not has(severe, OURS, REFERENCE) or not has(even, OURS, REFERENCE):
        return not_run(claim, title, papers_text(title, papers))
    seeds = min(severe.seeds, even.seeds, key=len)
    change_S = difference(severe, OURS, REFERENCE, goal, seeds) - difference(even, OURS, REFERENCE, goal, seeds)
    measured = f"(FedHKD – FedAvg at .2) – (at 5) {interval_text(change_S)}"
    told = f"{papers_text(title, papers)}: {size_text(change_S, papers)}"
    verdict = all_better({"at .2": change_S}, 1, "larger", "smaller")
    return Answer(
        claim,
        f"{title} ({count_text(seeds)})",
        measured,
        told,
        provisional(verdict, seeds),
        provisional(as_large(change_S, papers), seeds),
        needed_text([(change_S, papers)], 1),
        has_ended(seeds),
    )


# ---------------------------------------------------------------------------------------------- how it is told


def has(results: Results, *rows: str) -> bool:
    """Whether there are runs of all these rows, with one seed at least."""
    return bool(results.seeds) and set(rows) <= set(results.rows)


def not_run(claim: str, title: str, papers: str) -> Answer:
    return Answer(claim, title, NOT_RUN, papers, NOT_RUN, NOTHING, NOTHING)


def papers_text(title: str, *differences: float) -> str:
    """+0.030, and of which network where the table is of another."""
    told = "; ".join(shown(value, "+.3f") for value in differences)
    return told if PAPERS_NET in title else f"{told} ({PAPERS_NET})"


def of_seeds(title: str, results: Results) -> str:
    return f"{title} ({count_text(results.seeds)})"


def count_text(seeds: Sized) -> str:
    return counted(len(seeds), "seed")


def has_ended(seeds: Sized) -> bool:
    return len(seeds) >= LAST_SEEDS


def provisional(verdict: str, seeds: Sized) -> str:
    """The study is not at its end before its last seed, whatever a test says."""
    is_told = verdict.startswith((HOLDS, FAILS, EXCLUDED, LARGER))
    return verdict if has_ended(seeds) or not is_told else f"provisionally {verdict}"


def all_better(
    difference_S_by_name: Mapping[str, np.ndarray],
    family: int = 0,
    above: str = "better than",
    below: str = "worse than",
) -> str:
    """HOLDS where every difference is called better, FAILS where any is called worse.

    Args:
        difference_S_by_name: one a seed.
        family: how many there will be, if more.
        above, below: in words.
    """
    there = {name: values for name, values in difference_S_by_name.items() if not np.isnan(values).any()}
    found = statistics.verdicts(there, max(family, len(difference_S_by_name)))
    listed = lambda verdict: ", ".join(named(name) for name, own in found.items() if own == verdict)
    if worse := listed("worse"):
        return f"{FAILS}: {below} {worse}"
    if len(there) < len(difference_S_by_name):
        return NOT_MEASURED
    if set(found.values()) == {"better"}:
        return HOLDS
    seeds = next(iter(difference_S_by_name.values()))
    return f"{OPEN} with {count_text(seeds)}" + (f"; {above} {better}" if (better := listed("better")) else "")


def as_large(difference_S: np.ndarray, effect: float) -> str:
    """Whether the exact test excludes that the difference is of the paper's size: EXCLUDED where it is smaller, LARGER,
    NOT_EXCLUDED, or that so few seeds cannot tell."""
    if np.isnan(difference_S).any():
        return NOT_MEASURED
    told = statistics.verdicts({"": difference_S - effect})[""]
    return {"worse": EXCLUDED, "better": LARGER, statistics.NOT_SEPARATED: NOT_EXCLUDED}.get(told, told)


def size_text(difference_S: np.ndarray, effect: float) -> str:
    """Where the paper's effect is, seen from the interval."""
    mean, half = statistics.interval(difference_S)
    if not half >= 0:
        return NOTHING
    return (
        "within the interval" if abs(effect - mean) <= half else f"{'above' if effect > mean else 'below'} the interval"
    )


def needed_text(effects: Sequence[tuple[np.ndarray, float]], family: int) -> str:
    """For effects of the paper's size, and of one point: the most that any needs. – of one seed alone, and where the
    paper has none."""
    if any(len(values) < 2 or np.isnan(values).any() for values, _ in effects):
        return NOTHING
    needs = lambda size: max(
        statistics.seeds_to_see(size(effect), deviation(values), family) for values, effect in effects
    )
    papers = f"{needs(lambda effect: effect):,}" if all(effect for _, effect in effects) else NOTHING
    return f"{papers}; {needs(lambda effect: POINT):,}"


def deviation(values: np.ndarray) -> float:
    """Rounded, so that no number of seeds depends on a last bit."""
    return round(float(values.std(ddof=1)), 9)


def rank_text(results: Results, rivals: Sequence[str], goal: str) -> str:
    """rank 4 of 8"""
    rows = [OURS, *(row for row in rivals if row in results.rows)]
    means = {row: round(float(results.values(row, LAST[goal]).mean()), 9) for row in rows}
    if any(mean != mean for mean in means.values()):
        return "no rank: not measured in every run"
    return f"rank {1 + sum(mean > means[OURS] for mean in means.values())} of {len(means)}"


def interval_text(values: np.ndarray, form: str = "+.3f") -> str:
    """+0.003 ± 0.010"""
    mean, half = statistics.interval(values)
    if mean != mean:
        return NOTHING
    return shown(mean, form) + (f" ± {shown(half, form.removeprefix('+'))}" if half == half else "")


def shown(value: float, form: str) -> str:
    """Rounded twice, so that no digit depends on a last bit."""
    return format(round(value, 9), form)


def named(row: str) -> str:
    """The scheme's name as people write it."""
    names = {"fedavg": "FedAvg", "fedhkd": "FedHKD", "fedhkd_star": "FedHKD\\*", "fedprox": "FedProx", "moon": "MOON"}
    more = {"fedalign": "FedAlign", "fedgen": "FedGen", "fedmd": "FedMD", "fedproto": "FedProto"}
    return {**names, **more}.get(row, row)


# ---------------------------------------------------------------------------------------------- the numbers


def without_controls(results: Results) -> Results:
    return results.only(tables.without_controls(results.rows))


def difference(results: Results, one: str, other: str, goal: str, seeds: Sequence[int] | None = None) -> np.ndarray:
    """(S,) of the last round's accuracy, one row minus another, seed by seed."""
    places = [results.seeds.index(seed) for seed in (results.seeds if seeds is None else seeds)]
    return (results.values(one, LAST[goal]) - results.values(other, LAST[goal]))[places]


def payload_ratio(results: Results, seed: int) -> float:
    """Bytes of a round, FedHKD's / FedAvg's."""
    ours, its = (sum(results.rows[row][seed].made["payload_bytes"].values()) for row in (OURS, REFERENCE))
    return ours / its


def papers_columns(beta: float) -> Iterator[tuple[dict, int]]:
    """(table, place of the column) of CIFAR10 with 10 clients."""
    for table in contents()["table"]:
        for place, column in enumerate(table["columns"]):
            if table["preset"] == "cifar10" and column["fed.clients"] == 10 and column["data.beta"] == beta:
                yield table, place


def gain(one: str, other: str, goal: str, beta: float = 0.5) -> float:
    """The paper's difference between two schemes on CIFAR10 with 10 clients."""
    table, place = next(papers_columns(beta))
    return round(table[goal][one][place] - table[goal][other][place], 4)


def papers_time() -> float:
    """Of FedHKD / FedAvg."""
    table, _ = next(papers_columns(0.5))
    return table["train_s"][OURS] / table["train_s"][REFERENCE]
