"""Draws traces as one HTML page that refers to nothing outside of itself.

Letters: L layers, W ranks, E the most experts of a rank, P phases, S sampled steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from vllm_moe_modular.cli import trace_figures
from vllm_moe_modular.cli.trace_figures import Numbers
from vllm_moe_modular.cli.trace_files import PHASES, RankTrace

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; max-width: 1040px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .2rem; }
p { color: #56606c; margin: .2rem 0 .6rem; max-width: 75ch; }
figure { margin: 0; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem .15rem 0; text-align: left; border-bottom: 1px solid #d8dde3; }
th { font-weight: 400; color: #56606c; }
"""


@dataclass(frozen=True, slots=True)
class _Steps:
    """The sampled steps, in order; all layers of a rank together. NaN where a rank did not sample a step.

    Attributes:
        at: [S], seconds since the first rank began to trace.
        ms: [S, W, P].
        work: [S, W], expert rows.
    """

    at: Numbers
    ms: Numbers
    work: Numbers

    def imbalance(self) -> tuple[Numbers, Numbers]:
        """Of each step with rows and of all ranks: when it was, and the work of the fullest rank against the mean."""
        mean_S = self.work.mean(axis=1)
        is_whole_S = mean_S > 0  # NaN is not
        return self.at[is_whole_S], self.work[is_whole_S].max(axis=1) / mean_S[is_whole_S]


def page(traces: Sequence[RankTrace], *, title: str) -> str:
    """The page; `traces` as `read_traces` gives them."""
    layers, load_LWE = _load(traces)
    steps = _steps(traces)
    sections = [
        ("In short", "", _summary(traces, layers, load_LWE, steps)),
        (
            "Load of the experts, by layer",
            "How often each expert ran in the sampled steps, against the mean of its layer: 1 is even. White lines "
            "part the ranks; grey is not known.",
            trace_figures.expert_load(load_LWE, _short(layers)) if layers else "",
        ),
        (
            "Imbalance between ranks",
            "Of each sampled step: the work of the fullest rank (expert rows, over all layers) against the mean of the "
            "ranks. The step is as slow as the fullest rank: at 2, half of the machine waits.",
            _imbalance(steps),
        ),
        (
            "Time of a step",
            "Prepare, experts and finalize of all traced layers together: the mean of the ranks, and from the quickest "
            "to the slowest.",
            _step_times(steps),
        ),
        (
            "Where the time goes",
            "Mean of the sampled steps, all traced layers together. A rank that waits for others waits in prepare or "
            "finalize. Other: work that ran on the way home, shared experts usually.",
            _phases(steps),
        ),
        (
            "Rows from rank to rank",
            "Sent by the one and received by the other, in the sampled steps. A row is one token at one layer.",
            _rows_between_ranks(traces),
        ),
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


def _summary(traces: Sequence[RankTrace], layers: Sequence[str], load_LWE: Numbers, steps: _Steps) -> str:
    parts = sorted({f"{layer.all2all} + {layer.experts}" for trace in traces for layer in trace.layers.values()})
    missing = sorted(set(range(traces[0].size)) - {trace.rank for trace in traces})
    tokens = [s.tokens for trace in traces for s in trace.samples]
    _, imbalance = steps.imbalance()
    rows = [
        ("parts", ", ".join(parts)),
        ("layers", str(len(layers))),
        ("ranks", f"{traces[0].size}" + (f", no trace of rank {', '.join(map(str, missing))}" if missing else "")),
        ("sampled steps", f"{len(steps.at)}, one in {traces[0].every}"),
        ("span", f"{steps.at.max():.0f} s"),
        ("tokens of a rank in a step", f"{min(tokens)} to {max(tokens)}, mean {np.mean(tokens):.1f}"),
        ("imbalance of ranks, mean", f"{imbalance.mean():.2f}" if len(imbalance) else "no rows"),
    ]
    if layers:
        layer, rank, expert = map(int, np.unravel_index(np.nanargmax(load_LWE), load_LWE.shape))
        most = f"{load_LWE[layer, rank, expert]:.2f} times the mean: {layers[layer]}, rank {rank}, its expert {expert}"
        rows.append(("fullest expert", most))
    return f"<table>{''.join(f'<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in rows)}</table>"


def _imbalance(steps: _Steps) -> str:
    at_S, imbalance_S = steps.imbalance()
    if len(at_S) == 0 or steps.work.shape[1] == 1:
        return ""
    limits = 1.0, max(1.2, imbalance_S.max() * 1.05)
    return trace_figures.over_time(at_S, imbalance_S, label="fullest rank / mean", limits=limits)


def _step_times(steps: _Steps) -> str:
    ms_SW = steps.ms[..., [phase != "meanwhile" for phase in PHASES]].sum(axis=2)
    band = np.nanmin(ms_SW, axis=1), np.nanmax(ms_SW, axis=1)
    limits = 0.0, max(np.nanmax(ms_SW) * 1.05, 1e-3)
    return trace_figures.over_time(steps.at, np.nanmean(ms_SW, axis=1), label="ms", limits=limits, band=band)


def _phases(steps: _Steps) -> str:
    ranks = [rank for rank, ms_SP in enumerate(steps.ms.swapaxes(0, 1)) if not np.isnan(ms_SP).all()]
    names = ["other" if phase == "meanwhile" else phase for phase in PHASES]
    return trace_figures.phases(np.nanmean(steps.ms[:, ranks], axis=0), ranks, names)


def _rows_between_ranks(traces: Sequence[RankTrace]) -> str:
    rows_WW = _rows(traces)
    return "" if len(rows_WW) == 1 or np.isnan(rows_WW).all() else trace_figures.rows_between_ranks(rows_WW)


def _load(traces: Sequence[RankTrace]) -> tuple[list[str], Numbers]:
    """The sampled layers, and [L, W, E]: how often each expert ran against the mean of its layer, NaN: not known."""
    samples = [(trace.rank, s) for trace in traces for s in trace.samples if s.expert_tokens]
    layers = list(dict.fromkeys(s.layer for _, s in samples))
    index = {layer: number for number, layer in enumerate(layers)}
    shape = len(layers), traces[0].size, max((len(s.expert_tokens) for _, s in samples), default=0)
    rows_LWE, is_known_LWE = np.zeros(shape), np.zeros(shape, dtype=bool)
    for rank, s in samples:
        here = index[s.layer], rank, slice(len(s.expert_tokens))
        rows_LWE[here] += s.expert_tokens
        is_known_LWE[here] = True
    even_L = rows_LWE.sum(axis=(1, 2)) / is_known_LWE.sum(axis=(1, 2))
    load_LWE = rows_LWE / np.where(even_L > 0, even_L, 1.0)[:, None, None]
    return layers, np.where(is_known_LWE, load_LWE, np.nan)


def _steps(traces: Sequence[RankTrace]) -> _Steps:
    samples = [(trace.rank, s) for trace in traces for s in trace.samples]
    numbers = sorted({s.step for _, s in samples})
    index = {step: number for number, step in enumerate(numbers)}
    S, W, P = len(numbers), traces[0].size, len(PHASES)
    told_SWX, is_known_SW = np.zeros((S, W, P + 1)), np.zeros((S, W), dtype=bool)
    at: dict[int, float] = {}
    for rank, s in samples:
        told_SWX[index[s.step], rank] += [*(s.ms[phase] for phase in PHASES), sum(s.expert_tokens)]
        is_known_SW[index[s.step], rank] = True
        at.setdefault(s.step, s.at_s)
    told_SWX[~is_known_SW] = np.nan
    return _Steps(np.array([at[step] for step in numbers]), ms=told_SWX[..., :P], work=told_SWX[..., P])


def _rows(traces: Sequence[RankTrace]) -> Numbers:
    """[W, W], from rank to rank, as the sender counted or, where it left no trace, the receiver; NaN: neither."""
    W = traces[0].size
    sent_WW, received_WW, is_known_W = np.zeros((W, W)), np.zeros((W, W)), np.zeros(W, dtype=bool)
    for trace in traces:
        for s in trace.samples:
            if s.rows_sent is not None and s.rows_received is not None:
                sent_WW[trace.rank] += s.rows_sent
                received_WW[:, trace.rank] += s.rows_received
                is_known_W[trace.rank] = True
    received_WW[:, ~is_known_W] = np.nan
    return np.where(is_known_W[:, None], sent_WW, received_WW)


def _short(names: Sequence[str]) -> list[str]:
    """What tells them apart: without the words that all of them begin and end with."""
    words = [name.split(".") for name in names]
    while len(words) > 1 and all(len(w) > 1 for w in words) and len({w[0] for w in words}) == 1:
        words = [w[1:] for w in words]
    while len(words) > 1 and all(len(w) > 1 for w in words) and len({w[-1] for w in words}) == 1:
        words = [w[:-1] for w in words]
    return [".".join(w) for w in words]
