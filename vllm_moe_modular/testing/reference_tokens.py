"""Greedy tokens by Hugging Face transformers in float32: the truth that a served model is compared with.

    python -m vllm_moe_modular.testing.reference_tokens CKPT --prompts prompts.json --max-tokens 24 > tokens.json

`prompts.json` is a list of prompts, each a list of token ids; the output is one list of new token ids per prompt. One
prompt at a time, so that no padding touches the numbers; the end-of-sequence token does not stop generation.
"""

import argparse
import importlib
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LONGEST_PROMPT = 200
FIRST_ORDINARY_ID = 3  # smaller ids are special tokens in `testing.checkpoints`


def default_prompts(
    n: int = 8, *, seed: int = 0, vocab: int = 320, longest: int = LONGEST_PROMPT, shortest: int = 1
) -> list[list[int]]:
    """`n` random prompts of ordinary token ids; the lengths spread evenly from `shortest` to `longest`, shuffled."""
    draw = random.Random(seed)
    span = longest - shortest
    lengths = [shortest + (span * i) // max(1, n - 1) for i in range(n)]
    draw.shuffle(lengths)
    return [[draw.randrange(FIRST_ORDINARY_ID, vocab) for _ in range(length)] for length in lengths]


def load_model(checkpoint: Path | str) -> Any:
    """The causal language model in float32 with the plain attention of transformers; raises if a weight is missing."""
    import torch

    transformers: Any = importlib.import_module("transformers")  # Any: its own types are incomplete
    dtype_argument = "torch_dtype" if transformers.__version__.startswith("4.") else "dtype"
    transformers.utils.logging.disable_progress_bar()
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", output_loading_info=True, **{dtype_argument: torch.float32}
    )
    wrong = {kind: loaded[kind] for kind in ("missing_keys", "mismatched_keys") if loaded[kind]}
    if wrong:
        raise ValueError(f"{checkpoint} does not fit {type(model).__name__}: {wrong}; make the checkpoint again")
    return model.eval()


def greedy_tokens(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The `max_tokens` most likely next tokens, one after the other."""
    return greedy_tokens_and_margins(model, prompt, max_tokens)[0]


def greedy_tokens_and_margins(model: Any, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """Also by how much each token's logit exceeds the second best: near zero, float32 cannot decide the token."""
    import torch

    tokens: list[int] = []
    margins: list[float] = []
    step = torch.tensor([list(prompt)])
    cache = None
    with torch.inference_mode():
        for _ in range(max_tokens):
            output = model(input_ids=step, past_key_values=cache, use_cache=True)
            best = output.logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            cache = output.past_key_values
            step = best.indices[:1].view(1, 1)
    return tokens, margins


def reference_tokens(checkpoint: Path | str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy tokens of every prompt, in order."""
    model = load_model(checkpoint)
    return [greedy_tokens(model, prompt, max_tokens) for prompt in prompts]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; prints JSON on stdout."""
    parser = argparse.ArgumentParser(prog="python -m vllm_moe_modular.testing.reference_tokens")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: a list of lists of token ids")
    parser.add_argument("--max-tokens", type=int, default=24)
    options = parser.parse_args(argv)
    json.dump(
        reference_tokens(options.checkpoint, json.loads(options.prompts.read_text()), options.max_tokens), sys.stdout
    )
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
