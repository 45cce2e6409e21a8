#!/usr/bin/env bash
# What one GPU can check and measure, a part at a time. Logs and JSON lines go to OUT_DIR; ends with 0 if all parts did.
#
#   benchmarks/on_one_gpu.sh OUT_DIR PART...
#
#   tests    kernels and experts                                          1 minute with 16 processors
#   experts  triton and deep_gemm against vLLM, bf16 and fp8              3 minutes
#   tiles    candidates of the fp8 tiles                                  2 minutes
#   tokens   tiny checkpoints served with and without the plugin          5 minutes
#   speed    tokens per second with and without the plugin                3 minutes
#
# vLLM takes part in `experts` where it can be imported; `tokens` and `speed` need it, and the package installed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: benchmarks/on_one_gpu.sh OUT_DIR PART...}
shift
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# DeepGEMM compiles its kernels.
export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")}

run() { timeout "$@" 2>&1 | tee -a "$out/$part.log" | tail -n 45; }

failed=0
for part in "$@"; do
    echo "== $part"
    began=$SECONDS
    case $part in
    tests) run 240 python -m pytest -q -n 14 -p no:cacheprovider tests/kernels tests/experts ;;
    experts)
        run 200 python -m benchmarks.experts --out "$out/experts.jsonl" --rounds 7 &&
            run 150 python -m benchmarks.experts --fp8 --out "$out/experts_fp8.jsonl" --rounds 7
        ;;
    tiles) run 150 python -m benchmarks.tune_fp8 --out "$out/tiles.jsonl" --seconds 75 --rounds 5 ;;
    tokens)
        run 420 python -m benchmarks.serving tokens --out "$out/tokens.jsonl" &&
            run 180 python -m benchmarks.serving tokens --out "$out/tokens_fp8.jsonl" \
                --models qwen3_moe:fp8_block qwen3_moe:fp8_channel --experts triton vllm
        ;;
    speed) run 300 python -m benchmarks.serving speed --out "$out/speed.jsonl" --profile ;;
    *)
        echo "no part '$part'" >&2
        exit 2
        ;;
    esac || failed=1
    echo "== $part took $((SECONDS - began)) s"
done
exit $failed
