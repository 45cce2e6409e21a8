#!/usr/bin/env bash
# The fp8 kernels on one GPU: tests, tiles, times. Ends with 0 if the tests passed. Takes about four minutes.
#
#   benchmarks/gpu_fp8.sh [OUT_DIR]        vLLM takes part where it can be imported
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-${OUT:-.}}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
began=$SECONDS

# Compiling is what takes the time: side by side.
k=tests/kernels e=tests/experts
parts=(
    "$k/test_quantize_fp8.py $k/test_small_batch.py"
    "$k/test_grouped_gemm_fp8.py -k gated"
    "$k/test_grouped_gemm_fp8.py -k down"
    "$k/test_small_batch_fp8.py -k gated"
    "$k/test_small_batch_fp8.py -k down"
    "$k/test_grouped_gemm.py -k float32"
    "$e/test_triton_experts_fp8.py -k matches"
    "$e/test_triton_experts_fp8.py -k graph"
    "$e/test_triton_experts_fp8.py -k not(graph)and(not(matches))"
)
running=()
for i in "${!parts[@]}"; do
    # shellcheck disable=SC2086
    timeout 150 python -m pytest -q --maxfail=4 --no-header -p no:cacheprovider ${parts[$i]} >"$out/tests_$i.log" 2>&1 &
    running+=($!)
done
failed=0
for i in "${!parts[@]}"; do
    wait "${running[$i]}" || { failed=1; echo "FAILED: ${parts[$i]}"; tail -n 25 "$out/tests_$i.log"; }
done
tail -qn 1 "$out"/tests_*.log
echo "tests took $((SECONDS - began)) s"

python -m benchmarks.tune_fp8 --out "$out/tiles.jsonl" --seconds 70 --rounds 5
echo "tiles by $((SECONDS - began)) s"
timeout 100 python -m benchmarks.experts --fp8 --out "$out/experts_fp8.jsonl" --tokens 1 8 32 128 512 2048 --rounds 7
echo "all by $((SECONDS - began)) s"
exit $failed
