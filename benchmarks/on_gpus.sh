#!/usr/bin/env bash
# What one GPU, or two with NVLink, can check and measure, a part at a time. Logs and JSON lines go to OUT_DIR; ends with
# 0 if all parts did.
#
#   benchmarks/on_gpus.sh OUT_DIR PART...
#
# One GPU:
#   tests    kernels, experts, and the benchmark's shapes                 3 minutes with 16 processors
#   experts  triton and deep_gemm against their peers, bf16 and fp8       6 minutes
#   batched  the batched format a quarter full, beside the standard one   2 minutes
#   accuracy both, 20 seeds, against plain torch's error                  2 minutes
#   tune     a tuned table in OUT_DIR/tuned, which `experts` takes        3 minutes; fails while cells are left: run it again
#   tokens   tiny checkpoints served with and without the plugin          5 minutes
#   marlin   the same of AWQ and mxfp4, on vLLM's own experts             3 minutes
#   speed    tokens per second with and without the plugin                3 minutes
#   speed_fp8  the same with weights in fp8 blocks                        5 minutes: vLLM compiles DeepGEMM for each graph
#   kit      the conformance kit on every part; ranks share the GPU, or   4 minutes
#            have one each
#   kit_nccl  the all-to-alls of the kit over NCCL; on one GPU an NCCL    2 minutes
#            from 2.30 on in NCCL
#   stress   100,000 random steps of nvlink's kernels, all ranks in one   6 minutes
#            process; 200 more under compute-sanitizer
#   all2all  nvlink, DeepEP and pplx on two ranks, check by check         2 minutes
#   ranks    tiny checkpoints served over two ranks                       2 minutes for a model; on one GPU an NCCL from
#                                                                         2.30 on in NCCL
#   eplb     the same with redundant experts that move between steps      2 minutes
#
# Two GPUs (written, not yet run whole; no time is known):
#   links    what needs links: the tests, and every all-to-all beside its library and plain copies, bf16 and fp8
#   served   tokens per second and rank over two ranks: nvlink and allgather, then DeepEP's, beside stock vLLM
#
# vLLM takes part in `experts` where it can be imported; what serves needs it, and the package installed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: benchmarks/on_gpus.sh OUT_DIR PART...}
shift
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# DeepGEMM compiles its kernels.
export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")}

cli="python -m vllm_moe_modular.cli.main"

run() { timeout "$@" 2>&1 | tee -a "$out/$part.log" | tail -n 45; }

few_graphs='{"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 64, 256]}}'
eplb='{"enable_eplb": true, "eplb_config": {"num_redundant_experts": 4, "window_size": 8, "step_interval": 8}}'

# Two ranks of vLLM on one GPU take an NCCL that lets them.
shared_gpu_nccl() {
    [ "$(python -c 'import torch; print(torch.cuda.device_count())')" = 1 ] || return
    export LD_PRELOAD=${NCCL:?the path of libnccl.so.2 from 2.30 on} VLLM_NCCL_SO_PATH=$NCCL
}

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
    marlin)
        run 280 python -m benchmarks.serving tokens --out "$out/marlin.jsonl" --experts vllm \
            --models qwen3_moe:awq gpt_oss:mxfp4 --engine '{"moe_backend":"marlin"}'
        ;;
    speed) run 300 python -m benchmarks.serving speed --out "$out/speed.jsonl" --profile ;;
    speed_fp8)
        run 400 python -m benchmarks.serving speed --out "$out/speed_fp8.jsonl" --quantization fp8_block --kv-gib 6 \
            --experts triton triton_or_deep_gemm --engine "$few_graphs"
        ;;
    kit)
        parts="triton triton_batched deep_gemm deep_gemm_batched triton_or_deep_gemm torch local allgather nvlink"
        ! python -c "import deep_ep" 2>/dev/null || parts="$parts deepep_high_throughput deepep_low_latency deepep_auto"
        ! python -c "import pplx_kernels" 2>/dev/null || parts="$parts pplx"
        try="timeout 240 $cli conformance {} --device cuda >$out/kit_{}.log 2>&1 || echo {} ended with \$?"
        faulty=$(echo "$parts" | tr ' ' '\n' | xargs -P 5 -I{} sh -c "$try")
        tail -qn 12 "$out"/kit_*.log | cut -c1-400
        echo "${faulty:-every part passed}"
        [ -z "$faulty" ]
        ;;
    kit_nccl)
        shared_gpu_nccl
        export NCCL_MULTI_RANK_GPU_ENABLE=1
        faulty=""
        for name in allgather torch nvlink; do run 120 $cli conformance $name --device cuda || faulty="$faulty $name"; done
        echo "${faulty:-every part passed}"
        [ -z "$faulty" ]
        ;;
    batched) run 100 python -m benchmarks.batched_experts && run 100 python -m benchmarks.batched_experts --fp8 ;;
    stress)
        stress="python -m benchmarks.nvlink_stress"
        run 120 $stress --steps 50000 --ranks 2 && run 60 $stress --steps 25000 --ranks 2 --seed 1 &&
            run 60 $stress --steps 25000 --ranks 2 --fp8 &&
            run 200 compute-sanitizer --target-processes all --error-exitcode 7 python -m benchmarks.deepep_smoke \
                --ranks 2 --parts nvlink --checks "200 random steps" --timeout 180
        ;;
    all2all) run 240 python -m benchmarks.deepep_smoke --ranks 2 --timeout 40 --log "$out/all2all.errors" ;;
    ranks)
        shared_gpu_nccl
        run 400 python -m benchmarks.serving tokens --out "$out/ranks.jsonl" --ranks 2 \
            --models qwen3_moe qwen3_moe:fp8_block deepseek_v3 --all2all nvlink allgather &&
            run 200 python -m benchmarks.serving tokens --out "$out/ranks_deepep.jsonl" --ranks 2 \
                --models qwen3_moe:fp8_block --all2all deepep_low_latency --experts triton_batched
        ;;
    eplb)
        shared_gpu_nccl
        run 300 python -m benchmarks.serving tokens --out "$out/eplb.jsonl" --ranks 2 --models qwen3_moe \
            --all2all nvlink allgather --engine-on "$eplb"
        ;;
    links)
        run 200 python -m pytest -q -p no:cacheprovider -m multi_gpu tests/prepare_finalize
        tests=$?
        run 400 $cli bench all-to-all --hidden 7168 2048 --tokens 1 32 128 1024 4096 --fp8 --out "$out/links.jsonl" &&
            [ $tests = 0 ]
        ;;
    served)
        speed="python -m benchmarks.serving speed --ranks 2 --kv-gib 6 --profile"
        run 400 $speed --out "$out/served.jsonl" --all2all nvlink allgather --experts triton &&
            run 400 $speed --out "$out/served_deepep.jsonl" --all2all deepep_low_latency --experts triton_batched &&
            run 400 $speed --out "$out/served_deepep.jsonl" --all2all deepep_high_throughput --experts triton &&
            run 400 $speed --out "$out/served_deepep.jsonl" --all2all deepep_auto --experts auto
        ;;
    *)
        echo "no part '$part'" >&2
        exit 2
        ;;
    esac || failed=1
    echo "== $part took $((SECONDS - began)) s"
done
exit $failed
