"""A byte-level tokenizer without a download: three special tokens, 256 bytes, unused tokens up to the vocabulary."""

import json
from pathlib import Path

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
FIRST_BYTE_ID = 3  # ids below are special


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Writes `tokenizer.json` and its configuration; every id below `vocab` decodes to something."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = [PAD, BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += [f"<unused{i}>" for i in range(vocab - len(symbols))]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, BOS, EOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"pad_token": PAD, "bos_token": BOS, "eos_token": EOS},
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
