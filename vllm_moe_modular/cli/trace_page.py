"""Draws traces as one HTML page that refers to nothing outside of itself."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from statistics import mean

from vllm_moe_modular.cli.svg import Cell, bars, heat_map, lines
from vllm_moe_modular.cli.trace_files import PHASES, RankTrace, Sample

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --quiet: #66707d; --line: #d8dde3; --page: #ffffff; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --quiet: #98a2ae; --line: #3a424c; --page: #14181d; --card: #1d232a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1080px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .2rem; }
p { color: var(--quiet); margin: .2rem 0 .6rem; max-width: 75ch; }
figure { margin: 0; padding: .8rem; background: var(--card); border-radius: 6px; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem .15rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; color: var(--quiet); }
svg text { font: 12px system-ui, sans-serif; fill: var(--quiet); } svg .axis { stroke: var(--line); }
"""


def page(traces: Sequence[RankTrace], *, title: str) -> str:
    """The page; `traces` as `read_traces` gives them."""
    sections = [
        ("In short", "", _summary(traces)),
        (
            "Load of the experts, by layer",
            "How often each expert ran in the sampled steps, against the mean of its layer: 1 is even. Experts stand "
            "in the order of ranks, a thin gap parts the ranks.",
            _expert_load(traces),
        ),
        (
            "Imbalance between ranks",
            "Of each sampled step: the work of the fullest rank (expert rows, over all layers) against the mean of the "
            "ranks. The step is as slow as the fullest rank: at 2, half of the machine waits.",
            _imbalance(traces),
        ),
        (
            "Time of a step",
            "Prepare, experts and finalize of all traced layers together. A rank that waits for others waits in "
            "prepare or finalize.",
            _step_times(traces),
        ),
        (
            "Where the time goes",
            "Mean of the sampled steps, all traced layers together. Meanwhile: other work that ran on the way home, "
            "shared experts usually.",
            _phases(traces),
        ),
        ("Rows from rank to rank", "A row is one token at one layer, in the sampled steps.", _rows(traces)),
    ]
    body = "\n".join(
        f"<section><h2>{escape(head)}</h2>{f'<p>{escape(text)}</p>' if text else ''}<figure>{drawn}</figure></section>"
        for head, text, drawn in sections
        if drawn
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>MoE trace: {escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>MoE trace: {escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _summary(traces: Sequence[RankTrace]) -> str:
    layers = {layer.name: layer for trace in traces for layer in trace.layers.values()}
    parts = sorted({f"{layer.all2all} + {layer.experts}" for layer in layers.values()})
    samples = [s for trace in traces for s in trace.samples]
    missing = sorted(set(range(traces[0].size)) - {trace.rank for trace in traces})
    spread = _spread(traces)
    rows = [
        ("parts", ", ".join(parts)),
        ("layers", str(len(layers))),
        ("ranks", f"{traces[0].size}" + (f", no trace of rank {', '.join(map(str, missing))}" if missing else "")),
        ("sampled steps", f"{len({s.step for s in samples})}, one in {traces[0].every}"),
        ("span", f"{max((s.at_s for s in samples), default=0.0):.0f} s"),
        ("tokens of a rank in a step", _range([s.tokens for s in samples])),
        ("imbalance of ranks, mean", f"{mean(spread.values()):.2f}" if spread else "no rows"),
    ]
    return _table((), rows)


def _expert_load(traces: Sequence[RankTrace]) -> str:
    totals: dict[tuple[str, int], list[int]] = {}
    for trace in traces:
        for s in trace.samples:
            so_far = totals.setdefault((s.layer, trace.rank), [0] * len(s.expert_tokens))
            totals[s.layer, trace.rank] = [a + b for a, b in zip(so_far, s.expert_tokens, strict=True)]
    names = _layer_names(traces)
    cells = []
    for name in names:
        of_ranks = {rank: counts for (layer, rank), counts in sorted(totals.items()) if layer == name}
        everything = [n for counts in of_ranks.values() for n in counts]
        even = mean(everything) if everything else 0.0
        row = [
            Cell(n / even if even else 0.0, f"{name}, rank {rank}, its expert {e}: {n} rows", starts_group=e == 0)
            for rank, counts in of_ranks.items()
            for e, n in enumerate(counts)
        ]
        cells.append(row)
    return heat_map(cells, labels=_short(names)) if any(cells) else ""


def _imbalance(traces: Sequence[RankTrace]) -> str:
    points = sorted(_spread(traces).items())
    return lines({"fullest rank / mean": points}, x="step", least_y=1.0) if points else ""


def _spread(traces: Sequence[RankTrace]) -> dict[int, float]:
    """By step, the work of the fullest rank against the mean; steps without any rows, or not of all ranks, left out."""
    work = _by_step(traces, lambda s: float(sum(s.expert_tokens)))
    size = traces[0].size
    return {
        step: max(of.values()) / (sum(of.values()) / size)
        for step, of in work.items()
        if len(of) == size and sum(of.values()) > 0
    }


def _step_times(traces: Sequence[RankTrace]) -> str:
    ranks = sorted({trace.rank for trace in traces})
    times = _by_step(traces, lambda s: sum(s.ms[phase] for phase in PHASES if phase != "meanwhile"))
    series = {f"rank {rank}": sorted((step, of[rank]) for step, of in times.items() if rank in of) for rank in ranks}
    return lines(series, x="step", unit="ms")


def _phases(traces: Sequence[RankTrace]) -> str:
    by_rank: dict[str, dict[str, float]] = {}
    for trace in traces:
        steps = len({s.step for s in trace.samples})
        if steps:
            name = f"rank {trace.rank}"
            totals = by_rank.setdefault(name, dict.fromkeys(PHASES, 0.0))
            for phase in PHASES:
                totals[phase] += sum(s.ms[phase] for s in trace.samples) / steps
    return bars(by_rank, unit="ms")


def _rows(traces: Sequence[RankTrace]) -> str:
    size = traces[0].size
    sent: dict[int, list[int]] = {}
    for trace in traces:
        for s in trace.samples:
            if s.rows_sent is not None:
                so_far = sent.setdefault(trace.rank, [0] * size)
                sent[trace.rank] = [a + b for a, b in zip(so_far, s.rows_sent, strict=True)]
    if not sent:
        return ""
    head = ("from", *(f"to rank {rank}" for rank in range(size)))
    return _table(head, [(f"rank {rank}", *(f"{n:,}" for n in counts)) for rank, counts in sorted(sent.items())])


def _by_step(traces: Sequence[RankTrace], of: Callable[[Sample], float]) -> Mapping[int, Mapping[int, float]]:
    """By step and rank, the sum over layers."""
    totals: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for trace in traces:
        for s in trace.samples:
            totals[s.step][trace.rank] += of(s)
    return totals


def _layer_names(traces: Sequence[RankTrace]) -> list[str]:
    return list(dict.fromkeys(layer.name for trace in traces for layer in trace.layers.values()))


def _short(names: Sequence[str]) -> list[str]:
    """What tells them apart: without the words that all of them begin and end with."""
    words = [name.split(".") for name in names]
    while len(words) > 1 and all(len(w) > 1 for w in words) and len({w[0] for w in words}) == 1:
        words = [w[1:] for w in words]
    while len(words) > 1 and all(len(w) > 1 for w in words) and len({w[-1] for w in words}) == 1:
        words = [w[:-1] for w in words]
    return [".".join(w) for w in words]


def _range(numbers: Sequence[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}, mean {mean(numbers):.1f}" if numbers else "none"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    rest = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{first}{rest}</table>"
