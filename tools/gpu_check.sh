#!/usr/bin/env bash
# Checks and measures everything that needs a GPU, in stages of a few minutes. Run it again to continue where it was.
#
#     tools/gpu_check.sh [STAGE...]      default: all stages, in this order
#
#   torch      the torch engine and Megatron on CUDA: tests/gpu/test_cuda.py, test_scoring.py
#   identity   SGLang generates the same tokens as the torch engine, with any draft
#   history    as identity, with draft tokens from history
#   chi_square SGLang samples from the model's distribution
#   contract   the contract of all engines; the worker around SGLang: profile, migrations, sleep
#   migration  KV of migrated samples equals that of a prefill; 500 samples while an engine dies or freezes
#   weights    weight updates of target and draft; sleep
#   pressure   a KV pool so small that SGLang retracts requests
#   train      train.py rollout=sglang: with a killed scheduler, resumed, and equal to a run with the torch engine
#   trees      as identity, with draft trees
#   models     as identity: Qwen2, Qwen3, untied embeddings, a reduced draft vocabulary; TP 2 where there are two GPUs
#   mutations  tests detect a wrong draft offset, noise seed or KV slot, and a dropped hook
#   updates    seconds of a weight update of an 8B model
#   curve      seconds of a decode step of an 8B model, by batch, length and draft tokens
#   speed      tokens per second, compared with SGLang's own settings (SPEED_MODEL=tiny or small)
#   generation the torch engine's drafting policies on CUDA: benchmarks.generation
#
# The SGLang tests are those of make test-sglang; docs/sglang.md lists what only a GPU can show.
# Needs an NVIDIA GPU, this package's [gpu] and [test] extras (or their sources on PYTHONPATH). A stage that
# passes writes $GPU_OUT/gpu_STAGE.json (default: benchmarks/results) with GPU, driver and versions. A stage whose file
# exists is skipped: delete the file to run it again. The first stage that fails ends the script.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${GPU_OUT:-benchmarks/results}
python=${PYTHON:-python3}
mkdir -p "$out"
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TRITON_F32_DEFAULT=ieee # tests compare in float32; Triton would round products to TF32
# SGLang finds the plug-in through this package's metadata, which plain sources do not have.
"$python" -c 'import importlib.metadata as m; m.distribution("rlhfspec-mega")' 2>/dev/null || "$python" setup.py -q egg_info

tests() { # STAGE FILE... -- [pytest options]
    local stage=$1
    shift
    "$python" -m pytest -p no:cacheprovider -x -rA --junitxml "$out/gpu_$stage.xml" "$@"
    "$python" -m benchmarks.gpu_report "$out/gpu_$stage.xml" "$out/gpu_$stage.json"
    rm "$out/gpu_$stage.xml"
}

run() {
    case $1 in
    torch) tests torch tests/gpu/test_cuda.py tests/gpu/test_scoring.py ;;
    identity) tests identity tests/sglang/test_identity.py -k "not trees" ;;
    trees) tests trees tests/sglang/test_identity.py -k trees ;;
    history) tests history tests/sglang/test_history.py ;;
    chi_square) tests chi_square tests/sglang/test_losslessness.py ;;
    contract) tests contract tests/sglang/test_engine_contract.py tests/sglang/test_worker.py ;;
    migration) tests migration tests/sglang/test_moves.py tests/sglang/test_migration.py ;;
    weights | pressure | train | models | mutations) tests "$1" "tests/sglang/test_$1.py" ;;
    updates | curve) "$python" -m benchmarks.gpu_generation "$1" --out "$out" ;;
    speed) "$python" -m benchmarks.gpu_generation speed --out "$out" --model "${SPEED_MODEL:-tiny}" ;;
    generation)
        "$python" -m benchmarks.generation --quick --rows-only --device cuda --dtype bfloat16 \
            --out "$out/gpu_generation.json"
        ;;
    *)
        echo "gpu_check: there is no stage '$1'; see the head of tools/gpu_check.sh" >&2
        exit 2
        ;;
    esac
}

stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(
    torch identity history chi_square contract migration weights pressure train trees models mutations
    updates curve speed generation
)
for stage in "${stages[@]}"; do
    if [ -e "$out/gpu_$stage.json" ]; then
        echo "gpu_check: $stage is done, see $out/gpu_$stage.json"
    else
        echo "gpu_check: $stage"
        run "$stage"
    fi
done
