"""What a launch file makes of `vllm serve`: its shell line is run with a `vllm` that only says how it was called.

The arguments then go through vLLM's own parser.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT

SAYS_ITS_ARGUMENTS = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"


def arguments(command: Sequence[str], env: Mapping[str, str], folder: Path) -> list[str]:
    """Those that `vllm` is called with, its first one (`serve`) included."""
    vllm = folder / "vllm"
    vllm.write_text(SAYS_ITS_ARGUMENTS)
    vllm.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, env={"PATH": path, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [str(word) for word in json.loads(done.stdout)]


def parsed(calls: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """What vLLM's parser makes of each."""
    command = [sys.executable, "tests/examples/parse_serve.py"]
    given = json.dumps([list(call) for call in calls])
    done = subprocess.run(command, cwd=ROOT, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found
