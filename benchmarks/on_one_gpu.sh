#!/usr/bin/env bash
# What one GPU can check and measure, a part at a time. Logs and JSON lines go to OUT_DIR; ends with 0 if all parts did.
#
#   benchmarks/on_one_gpu.sh OUT_DIR PART...
#
#   tests    kernels, experts, and the benchmark's shapes                 3 minutes with 16 processors
#   experts  triton and deep_gemm against their peers, bf16 and fp8       6 minutes
#   batched  the batched format a quarter full, beside the standard one   1 minute
#   accuracy both, 20 seeds, against plain torch's error                  4 minutes
#   tune     a tuned table in OUT_DIR/tuned, which `experts` takes        3 minutes; fails while cells are left: run it again
#   tokens   tiny checkpoints served with and without the plugin          5 minutes
#   speed    tokens per second with and without the plugin                3 minutes
#   kit      the conformance kit on every part, ranks sharing the GPU     4 minutes
#   stress   100,000 random steps of nvlink's kernels, all ranks in one   6 minutes
#            process; 200 more under compute-sanitizer
#   all2all  nvlink and DeepEP on two ranks that share the GPU            2 minutes
#   ranks    tiny checkpoints served over two ranks that share the GPU    2 minutes for a model; an NCCL from 2.30 on in NCCL
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

cli="python -m vllm_moe_modular.cli.main"

run() { timeout "$@" 2>&1 | tee -a "$out/$part.log" | tail -n 45; }

failed=0
for part in "$@"; do
    echo "== $part"
    began=$SECONDS
    case $part in
    tests)
        run 240 python -m pytest -q -n 14 -p no:cacheprovider tests/kernels tests/experts
        kernels=$?
        run 240 python -m pytest -q -n 4 -p no:cacheprovider tests/bench && [ $kernels = 0 ] # each holds a whole layer
        ;;
    experts)
        tuned=()
        [ ! -d "$out/tuned" ] || tuned=(--tuned "$out/tuned")
        run 300 $cli bench experts --out "$out/experts.jsonl" --rounds 7 "${tuned[@]}" &&
            run 150 $cli bench experts --fp8 --out "$out/experts_fp8.jsonl" --rounds 7 "${tuned[@]}"
        ;;
    accuracy) run 240 $cli bench experts --accuracy && run 120 $cli bench experts --accuracy --fp8 ;;
    tune)
        mkdir -p "$out/tuned"
        tune="$cli tune --out $out/tuned --rows 2 8 32 128 512 2048 8192 --rounds 7 --compilers 14"
        run 300 $tune --model qwen3-30b-a3b mixtral-8x7b qwen3-235b gpt-oss-120b --seconds 200
        bf16=$?
        run 150 $tune --model qwen3-30b-a3b deepseek-v3-ep8 --dtype fp8 --seconds 90 && [ $bf16 = 0 ]
        ;;
    tokens)
        run 420 python -m benchmarks.serving tokens --out "$out/tokens.jsonl" &&
            run 180 python -m benchmarks.serving tokens --out "$out/tokens_fp8.jsonl" \
                --models qwen3_moe:fp8_block qwen3_moe:fp8_channel --experts triton vllm
        ;;
    speed) run 300 python -m benchmarks.serving speed --out "$out/speed.jsonl" --profile ;;
    kit)
        parts="triton triton_batched deep_gemm deep_gemm_batched triton_or_deep_gemm torch local allgather nvlink"
        ! python -c "import deep_ep" 2>/dev/null || parts="$parts deepep_high_throughput deepep_low_latency deepep_auto"
        try="timeout 240 $cli conformance {} --device cuda >$out/kit_{}.log 2>&1 || echo {} ended with \$?"
        faulty=$(echo "$parts" | tr ' ' '\n' | xargs -P 5 -I{} sh -c "$try")
        tail -qn 12 "$out"/kit_*.log | cut -c1-400
        echo "${faulty:-every part passed}"
        [ -z "$faulty" ]
        ;;
    batched) run 100 python -m benchmarks.batched_experts && run 100 python -m benchmarks.batched_experts --fp8 ;;
    stress)
        stress="python -m benchmarks.nvlink_stress"
        run 120 $stress --steps 50000 --ranks 2 && run 60 $stress --steps 25000 --ranks 3 &&
            run 60 $stress --steps 25000 --ranks 2 --fp8 &&
            run 200 compute-sanitizer --target-processes all --error-exitcode 7 python -m benchmarks.deepep_smoke \
                --ranks 2 --parts nvlink --checks "200 random steps" --timeout 180
        ;;
    all2all) run 240 python -m benchmarks.deepep_smoke --ranks 2 --timeout 40 --log "$out/all2all.errors" ;;
    ranks)
        export LD_PRELOAD=${NCCL:?the path of libnccl.so.2 from 2.30 on} VLLM_NCCL_SO_PATH=$NCCL
        run 400 python -m benchmarks.serving tokens --out "$out/ranks.jsonl" --ranks 2 \
            --models qwen3_moe qwen3_moe:fp8_block deepseek_v3 --all2all nvlink allgather &&
            run 200 python -m benchmarks.serving tokens --out "$out/ranks_deepep.jsonl" --ranks 2 \
                --models qwen3_moe:fp8_block --all2all deepep_low_latency --experts triton_batched
        ;;
    *)
        echo "no part '$part'" >&2
        exit 2
        ;;
    esac || failed=1
    echo "== $part took $((SECONDS - began)) s"
done
exit $failed
