"""What VLLM_MOE_MODULAR_TRACE wrote, as numbers: how uneven the experts' load is, and where the time goes.

    VLLM_MOE_MODULAR=1 VLLM_MOE_MODULAR_TRACE=traces vllm serve MODEL -dp 2 --enable-expert-parallel
    python examples/3_read_a_trace.py traces

`vllm-moe-modular trace traces` draws the same as a page. A file has one JSON object a line: the run, then layers, then
sampled calls of a layer.
"""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path


def main(folder: Path) -> None:
    """Prints a line for each rank and each layer."""
    files = sorted(folder.glob("rank*.jsonl"))
    if not files:
        raise SystemExit(f"{folder} has no rank*.jsonl; serve with VLLM_MOE_MODULAR_TRACE={folder} and send requests")
    load: dict[str, Counter[str]] = defaultdict(Counter)  # by layer, of each expert of each rank
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        names = {line["layer"]: line["name"] for line in lines if line["kind"] == "layer"}
        samples = [line for line in lines if line["kind"] == "sample"]
        ms: Counter[str] = Counter()
        for sample in samples:
            ms.update(sample["ms"])
            for expert, tokens in enumerate(sample.get("expert_tokens", [])):
                load[names[sample["layer"]]][f"{file.stem} expert {expert}"] += tokens
        shares = ", ".join(f"{phase} {took / (sum(ms.values()) or 1):.0%}" for phase, took in ms.items())
        print(f"{file.stem}: {len(samples)} sampled calls, {sum(ms.values()):.1f} ms: {shares}")
    for layer, experts in load.items():
        (busiest, most), mean = experts.most_common(1)[0], sum(experts.values()) / len(experts)
        print(f"{layer}: busiest is {busiest}, {most / (mean or 1):.2f} times the mean of {len(experts)} experts")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: 3_read_a_trace.py FOLDER, the one that VLLM_MOE_MODULAR_TRACE named")
    main(Path(sys.argv[1]))
